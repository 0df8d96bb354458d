"""Workers that fill one batch together: peak of shared memory, and the wait for the first batch.

Samples of 1 MB that take 8 ms to come (a sleep: a remote file, so that more workers help on any
machine), batches of 32. The wait is measured with 1, 2, 4 and 8 workers; the memory with 16 workers
and a consumer that takes a batch every 50 ms, which every contender can serve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter, sleep

import numpy as np

from benchmarks.case import Case, Context, Measurement, Round, Row, Summary, Target
from benchmarks.contenders import LoaderSpec, load_library, make_loader
from benchmarks.intervals import interval, paired_ratio, values_of
from benchmarks.throughput import same_checksums

BATCH, SAMPLE_BYTES, SAMPLE_SECONDS = 32, 1_000_000, 0.008
WAITING = (1, 2, 4, 8)
WORKERS, STEPS, STEP_SECONDS = 16, 60, 0.05
SLACK_BYTES = 2_000_000


class Slow:
    """Samples that come late."""

    def __len__(self) -> int:
        return BATCH * 1000

    def __getitem__(self, index: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        sleep(SAMPLE_SECONDS)
        return np.full(SAMPLE_BYTES, index % 251, np.uint8)


class Shared(Case):
    """How memory and the first wait go with the number of workers."""

    kind = "shared"
    name = "shared"
    title = "Workers that fill one batch together: 32 samples of 1 MB, 8 ms each"
    contenders = ("torch", "stoker", "stoker_shared")
    max_rounds = 3
    in_memory_cgroup = True

    def estimated_seconds(self, contender: str, quick: bool) -> float:
        del contender
        return 5.0 if quick else 9.0

    def measure(
        self, contender: str, context: Context, baseline: Callable[[], None]
    ) -> Measurement:
        import torch

        from benchmarks.consume import fingerprint, read

        torch.set_num_threads(1)
        load_library(contender)
        read(Slow()[0])
        baseline()
        waits = {}
        checksums = []
        for workers in WAITING:
            started = perf_counter()
            batches = iter(make_loader(contender, LoaderSpec(Slow(), BATCH, workers)))
            first = next(batches)
            waits[str(workers)] = perf_counter() - started
            checksums.append(fingerprint(first))
            del batches, first
        batches = iter(make_loader(contender, LoaderSpec(Slow(), BATCH, WORKERS)))
        for _ in range(20 if context.quick else STEPS):
            batch = next(batches)
            checksums.append(read(batch))
            sleep(STEP_SECONDS)
        return {"checksums": checksums, "waits": waits}

    def summarise(self, rounds: Sequence[Round]) -> Summary:
        agree = same_checksums(rounds)
        summary = Summary(targets=[Target("same data from every contender", *agree)])
        for contender in self.contenders:
            shared = values_of(rounds, contender, shared_bytes)
            if not shared:
                continue
            ratio = paired_ratio(rounds, contender, "torch", shared_bytes)
            megabytes = interval([got / 1e6 for got in shared])
            summary.rows.append(Row(contender, "shmem", megabytes, "MB", ratio))
            for workers in WAITING:

                def wait(got: Measurement, workers: int = workers) -> float:
                    return float(got["waits"][str(workers)])

                value = interval(values_of(rounds, contender, wait))
                ratio = paired_ratio(rounds, contender, "torch", wait)
                summary.rows.append(Row(contender, f"first_{workers}", value, "s", ratio))
        ours = values_of(rounds, "stoker_shared", shared_bytes)
        if ours:
            most = 3 * BATCH * SAMPLE_BYTES + SLACK_BYTES
            got = f"{max(ours) / 1e6:.0f} MB in the worst round"
            text = "16 workers in the memory of three batches (96 MB)"
            summary.targets.append(Target(text, got, max(ours) <= most))
        return summary


def shared_bytes(got: Measurement) -> float:
    """Shared memory (the arena; torch's files) at its peak, 16 workers at work."""
    memory = got["memory"]
    return float(memory["peak_shared_bytes"] - memory["base_shared_bytes"])


CASE = Shared()
