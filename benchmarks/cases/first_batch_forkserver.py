"""First batch of a 500 MB dataset, 8 workers, forkserver: torch pickles it for each worker."""

from benchmarks.first_batch import FirstBatch

CASE = FirstBatch(
    name="first_batch_forkserver",
    title="First batch: 500 MB dataset, forkserver, 8 workers",
    start_method="forkserver",
    held_bytes=500_000_000,
    workers=8,
    most_of_torch=0.25,
    max_rounds=3,
)
