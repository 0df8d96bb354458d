"""Very large samples: two 720p frames and a voxel grid, float32, 140 MB; batch 1.

`__getitem__` returns views of preallocated tensors: no work. sample140mb_fresh allocates them.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.cases.views import TupleViews, random_floats
from benchmarks.throughput import Goal, Throughput


def dataset(folder: Path) -> TupleViews:
    """Two samples of 140 MB, visited in turn."""
    del folder
    return TupleViews(
        random_floats(2, 3, 720, 1280),
        random_floats(2, 3, 720, 1280),
        random_floats(2, 32, 720, 1280),
    )


CASE = Throughput(
    name="sample140mb",
    title="140 MB sample (3 float32 tensors), batch 1",
    dataset=dataset,
    batch_size=1,
    goal=Goal(5.0),
    read_seconds=1.5,
    copy_seconds=1.0,
)
