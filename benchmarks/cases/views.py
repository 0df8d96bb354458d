"""A dataset that costs nothing: each sample is a view of a tensor allocated once.

The bases' lengths are prime, so that no two batches in a row are alike. What is left to measure is
the loader: collating, handing over, and its bookkeeping.
"""

from __future__ import annotations

import torch

from benchmarks.throughput import ENDLESS


class Views:
    """`base[i % k]` for each of some base tensors: one tensor alone, several as a tuple."""

    def __init__(self, *bases: torch.Tensor) -> None:
        self._bases = bases

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> torch.Tensor | tuple[torch.Tensor, ...]:
        views = tuple(base[index % len(base)] for base in self._bases)
        return views if len(views) > 1 else views[0]


def random_floats(*shape: int) -> torch.Tensor:
    """Float32 values that are the same in every process."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def random_integers(*shape: int, dtype: torch.dtype, high: int) -> torch.Tensor:
    """Integers below `high` that are the same in every process."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
