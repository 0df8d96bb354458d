"""ImageNet-sized uint8 images, batch 64 (10 MB). `__getitem__` returns a view: no work."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.cases.views import Views, random_integers
from benchmarks.throughput import Goal, Throughput


def dataset(folder: Path) -> Views:
    """67 images, visited in turn."""
    del folder
    return Views(random_integers(67, 3, 224, 224, dtype=torch.uint8, high=256))


CASE = Throughput(
    name="images_u8",
    title="3x224x224 uint8, batch 64",
    dataset=dataset,
    batch_size=64,
    goal=Goal(6.0),
)
