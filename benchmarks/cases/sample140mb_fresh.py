"""The 140 MB sample again, but `__getitem__` allocates and fills it anew, as a decoder would.

The allocation is the dataset's own cost, the same for every contender, and no loader can remove it:
the ratio is smaller than in sample140mb, and closer to what a real dataset of this size sees.
"""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.cases import sample140mb
from benchmarks.cases.views import TupleViews
from benchmarks.throughput import ENDLESS, Throughput


class Clones:
    """Clones of another dataset's samples."""

    def __init__(self, views: TupleViews) -> None:
        self._views = views

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.clone() for tensor in self._views[index])


def dataset(folder: Path) -> Clones:
    """Fresh copies of the two samples of sample140mb."""
    return Clones(sample140mb.dataset(folder))


CASE = Throughput(
    name="sample140mb_fresh",
    title="140 MB sample allocated anew by the dataset, batch 1",
    dataset=dataset,
    batch_size=1,
    read_seconds=1.5,
    copy_seconds=1.0,
    max_rounds=3,
)
