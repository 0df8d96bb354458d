"""ImageNet-sized float32 images, batch 64 (39 MB). `__getitem__` returns a view: no work."""

from __future__ import annotations

from pathlib import Path

from benchmarks.cases.views import Views, random_floats
from benchmarks.throughput import Goal, Throughput


def dataset(folder: Path) -> Views:
    """67 images, visited in turn."""
    del folder
    return Views(random_floats(67, 3, 224, 224))


CASE = Throughput(
    name="images_f32",
    title="3x224x224 float32, batch 64",
    dataset=dataset,
    batch_size=64,
    goal=Goal(5.0),
)
