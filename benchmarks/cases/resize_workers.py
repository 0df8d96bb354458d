"""From 1 to 4 workers in mid-epoch: the longest pause, and how soon the pace is that of 4 workers.

Samples that take 2 ms to come, batch 8, and a consumer that takes what there is: one worker
delivers a batch every 16 ms, four every 4 ms. The pace to reach is 90 % of what a loader gives that
began with 4 workers, in the same process; it counts as reached with the first of 32 batches in a
row that keep it. The longest pause is taken from the last batch before the change to the 300th
after it; it can't be much less than the 16 ms in which one worker makes a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from time import perf_counter

import torch

from benchmarks.case import Case, Context, Measurement, Round, Row, Summary, Target
from benchmarks.contenders import LoaderSpec, load_library
from benchmarks.intervals import interval, paired_ratio, values_of
from benchmarks.resizing import Pass, Sleepy
from benchmarks.throughput import same_checksums

BATCH, SAMPLE_BYTES, SAMPLE_SECONDS = 8, 1024, 0.002
FEW, MANY = 1, 4
SETTLING, REFERENCE = 60, 250
BEFORE, AFTER, IN_A_ROW = 40, 300, 32
ENOUGH = 0.9
MOST_OF_TORCH = 0.5
MOST_SECONDS = 1.0


class ResizeWorkers(Case):
    """Milliseconds of pause, and seconds to the new pace."""

    kind = "resize_workers"
    name = "resize_workers"
    title = "1 to 4 workers in mid-epoch: 2 ms a sample, batch 8"
    contenders = ("torch", "stoker")

    def estimated_seconds(self, contender: str, quick: bool) -> float:
        del contender, quick
        return 6.0

    def measure(
        self, contender: str, context: Context, baseline: Callable[[], None]
    ) -> Measurement:
        from benchmarks.consume import read

        del context
        torch.set_num_threads(1)
        load_library(contender)
        baseline()
        samples = Sleepy(SAMPLE_BYTES, SAMPLE_SECONDS)
        pace = steady_pace(contender, LoaderSpec(samples, BATCH, MANY))
        run = Pass(contender, LoaderSpec(samples, BATCH, FEW))
        times, sums = [], []
        for _ in range(BEFORE):
            sums.append(read(run.next()))
            times.append(perf_counter())
        asked = perf_counter()
        run.resize({"workers": MANY}, {"workers": MANY})
        for _ in range(AFTER):
            sums.append(read(run.next()))
            times.append(perf_counter())
        pauses = [later - earlier for earlier, later in pairwise(times)]
        return {
            "checksums": sums,
            "pace": pace,
            "pace_before": (BEFORE - 10) * BATCH / (times[BEFORE - 1] - times[9]),
            "pause_seconds": max(pauses[BEFORE - 1 :]),
            "pace_seconds": at_pace(times[BEFORE:], ENOUGH * pace) - asked,
        }

    def summarise(self, rounds: Sequence[Round]) -> Summary:
        agree = same_checksums(rounds)
        summary = Summary(targets=[Target("same data from every contender", *agree)])
        for contender in self.contenders:
            for variant, value in (("pause", pause_ms), ("pace", pace_ms)):
                figures = values_of(rounds, contender, value)
                if figures:
                    ratio = paired_ratio(rounds, contender, "torch", value)
                    row = Row(contender, variant, interval(figures), "ms", ratio)
                    summary.rows.append(row)
        pause = paired_ratio(rounds, "stoker", "torch", pause_ms)
        if pause is not None:
            got = f"{pause.median:.2f} of torch's pause [{pause.low:.2f}, {pause.high:.2f}]"
            text = f"longest pause at most {MOST_OF_TORCH:g} of torch's"
            summary.targets.append(Target(text, got, pause.median <= MOST_OF_TORCH))
        ours = values_of(rounds, "stoker", pace_ms)
        if ours:
            median = interval(ours).median
            text = f"{100 * ENOUGH:g} % of the pace of {MANY} workers within {MOST_SECONDS:g} s"
            reached = median <= 1000 * MOST_SECONDS
            summary.targets.append(Target(text, f"{median:.0f} ms", reached))
        return summary


def steady_pace(contender: str, spec: LoaderSpec) -> float:
    """Samples a second of a loader that begins with all its workers."""
    run = Pass(contender, spec)
    for _ in range(SETTLING):
        run.next()
    started = perf_counter()
    for _ in range(REFERENCE):
        run.next()
    return REFERENCE * spec.batch_size / (perf_counter() - started)


def at_pace(times: list[float], pace: float) -> float:
    """When the first batch came from which on so many in a row kept the pace."""
    for first, last in zip(times, times[IN_A_ROW:], strict=False):
        if IN_A_ROW * BATCH / (last - first) >= pace:
            return first
    raise AssertionError(f"{len(times)} batches after the change, and {pace:.0f}/s not reached")


def pause_ms(got: Measurement) -> float:
    """The longest time between two batches, from the change on."""
    return 1000 * float(got["pause_seconds"])


def pace_ms(got: Measurement) -> float:
    """From the change to the new pace."""
    return 1000 * float(got["pace_seconds"])


CASE = ResizeWorkers()
