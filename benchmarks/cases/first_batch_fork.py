"""First batch of a small dataset with 2 forked workers: Stoker must not start slower than torch."""

from benchmarks.first_batch import FirstBatch

CASE = FirstBatch(
    name="first_batch_fork",
    title="First batch: 4 MB dataset, fork, 2 workers",
    start_method="fork",
    held_bytes=4_000_000,
    workers=2,
    most_of_torch=1.1,
    contenders=("torch", "stoker", "spdl"),
)
