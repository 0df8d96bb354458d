"""CIFAR-sized float32 images, batch 256 (3 MB). `__getitem__` returns a view: no work."""

from __future__ import annotations

from pathlib import Path

from benchmarks.cases.views import Views, random_floats
from benchmarks.throughput import Goal, Throughput


def dataset(folder: Path) -> Views:
    """521 images, visited in turn."""
    del folder
    return Views(random_floats(521, 3, 32, 32))


CASE = Throughput(
    name="small_f32",
    title="3x32x32 float32, batch 256",
    dataset=dataset,
    batch_size=256,
    goal=Goal(5.0),
)
