"""Sequences of 2048 int64 tokens, batch 32 (0.5 MB). `__getitem__` returns a view: no work."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.cases.views import Views, random_integers
from benchmarks.throughput import Goal, Throughput


def dataset(folder: Path) -> Views:
    """257 sequences, visited in turn."""
    del folder
    return Views(random_integers(257, 2048, dtype=torch.int64, high=50_257))


CASE = Throughput(
    name="tokens",
    title="2048 int64 tokens, batch 32",
    dataset=dataset,
    batch_size=32,
    goal=Goal(7.0),
)
