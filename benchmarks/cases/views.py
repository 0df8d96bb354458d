"""A dataset that costs nothing: each sample is a view of a tensor allocated once.

The bases' lengths are prime, so that no two batches in a row are alike. What is left to measure is
the loader: collating, handing over, and its bookkeeping.
"""

from __future__ import annotations

import torch

from benchmarks.throughput import ENDLESS


class Views:
    """`base[i % k]`: a sample is a view, at the price of one index operation."""

    def __init__(self, base: torch.Tensor) -> None:
        self._base = base
        self._count = len(base)

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._base[index % self._count]


class TupleViews:
    """The same of several bases: a sample is a tuple of views."""

    def __init__(self, *bases: torch.Tensor) -> None:
        self._parts = [Views(base) for base in bases]

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple([part[index] for part in self._parts])


def random_floats(*shape: int) -> torch.Tensor:
    """Float32 values that are the same in every process."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def random_integers(*shape: int, dtype: torch.dtype, high: int) -> torch.Tensor:
    """Integers below `high` that are the same in every process."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
