"""What a loader adds to a training run's memory at a given step rate: lidar's samples.

8 workers, prefetch 4, batches of 48 MB, one every 0.4 s: slow enough that every contender keeps the
pace, so that the difference is what each *holds*, not how fast it is. Each runs in a memory cgroup
of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter, sleep

from benchmarks.case import Case, Context, Measurement, Round, Row, Summary, Target
from benchmarks.cases.lidar import Scans, write_scans
from benchmarks.contenders import LoaderSpec, load_library, make_loader
from benchmarks.intervals import interval, paired_ratio, values_of
from benchmarks.throughput import same_checksums

WORKERS, PREFETCH, BATCH = 8, 4, 4
STEP_SECONDS, STEPS = 0.4, 22
LIMIT_BYTES = 400_000_000
TRAINER_SLACK_BYTES = 16_000_000
"""The trainer's own heap (queues, index lists, imports on first use): neither arena nor worker."""


class Memory(Case):
    """Peak memory above the base (interpreter, libraries and dataset, before the loader exists)."""

    kind = "memory"
    name = "memory"
    title = "Memory added at 2.5 steps/s: 48 MB batches, 8 workers, prefetch 4"
    contenders = ("torch", "stoker", "stoker_bounded", "spdl")
    max_rounds = 3
    in_memory_cgroup = True

    def prepare(self, context: Context) -> None:
        write_scans(context.folder)

    def estimated_seconds(self, contender: str, quick: bool) -> float:
        del contender
        return 8.0 if quick else 4.0 + STEPS * STEP_SECONDS

    def measure(
        self, contender: str, context: Context, baseline: Callable[[], None]
    ) -> Measurement:
        import torch

        from benchmarks.consume import read

        torch.set_num_threads(1)
        load_library(contender)
        dataset = Scans(context.folder)
        read(dataset[0])
        baseline()
        batches = iter(make_loader(contender, LoaderSpec(dataset, BATCH, WORKERS, PREFETCH)))
        checksums, late = [], 0
        batch = next(batches)
        due = perf_counter()
        for step in range(12 if context.quick else STEPS):
            checksums.append(read(batch))
            due += STEP_SECONDS
            sleep(max(0.0, due - perf_counter()))
            batch = next(batches)
            if step > WORKERS and perf_counter() > due + 0.5 * STEP_SECONDS:
                late += 1
        return {"checksums": checksums, "late_steps": late}

    def summarise(self, rounds: Sequence[Round]) -> Summary:
        agree = same_checksums(rounds)
        summary = Summary(targets=[Target("same data from every contender", *agree)])
        for contender in self.contenders:
            added = values_of(rounds, contender, added_bytes)
            if not added:
                continue
            worst = max(values_of(rounds, contender, lambda got: float(got["late_steps"])))
            note = f"{worst:.0f} late steps" if worst else "kept the pace"
            ratio = paired_ratio(rounds, contender, "torch", added_bytes)
            row = Row(contender, "added", interval([a / 1e6 for a in added]), "MB", ratio, note)
            base = values_of(rounds, contender, lambda got: got["memory"]["base_bytes"] / 1e6)
            summary.rows.extend([row, Row(contender, "base", interval(base), "MB")])
        half = paired_ratio(rounds, "stoker", "torch", added_bytes)
        if half is not None:
            got = f"{half.median:.2f} of torch [{half.low:.2f}, {half.high:.2f}]"
            summary.targets.append(Target("adds at most half of torch", got, half.median <= 0.5))
        excess = values_of(rounds, "stoker_bounded", excess_bytes)
        if excess:
            got = f"{max(excess) / 1e6:+.0f} MB against the bound, in the worst round"
            text = 'memory="400MB": peak within base + 400 MB + workers\' private memory'
            summary.targets.append(Target(text, got, max(excess) <= TRAINER_SLACK_BYTES))
        return summary


def added_bytes(got: Measurement) -> float:
    """What the loader added to the base at its peak."""
    return float(got["memory"]["peak_bytes"] - got["memory"]["base_bytes"])


def excess_bytes(got: Measurement) -> float:
    """How far the peak lies above base, limit and the workers' private memory together."""
    return added_bytes(got) - LIMIT_BYTES - float(got["memory"]["workers_private_bytes"])


CASE = Memory()
