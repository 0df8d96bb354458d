"""Measures Stoker beside its peers. Not part of the installed package; see benchmarks/README.md."""
