"""Less memory in mid-epoch: how much is held before and after, and how soon the rest is given back.

4 workers, prefetch 4, batches of 8 MiB that take 32 ms to come, one every 50 ms: slow enough that
queues are full. Stoker is told to hold 32 MiB at most (`Knobs(in_flight_bytes=...)`) and keeps its
workers. torch counts batches only: its way to about as little is a new iterator with 2 workers and
prefetch 1. Shared memory is read from the cgroup that the contender runs in, every 10 ms of a step;
it counts as given back from the reading on after which none is above the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter, sleep

import torch

from benchmarks.case import Case, Context, Measurement, Round, Row, Summary, Target
from benchmarks.contenders import LoaderSpec, load_library
from benchmarks.intervals import interval, paired_ratio, values_of
from benchmarks.memory_group import own_usage
from benchmarks.resizing import Pass, Sleepy
from benchmarks.throughput import same_checksums

WORKERS, PREFETCH, BATCH = 4, 4, 8
SAMPLE_BYTES, SAMPLE_SECONDS = 1 << 20, 0.004
STEP_SECONDS, READINGS = 0.05, 5
BEFORE, AFTER = 40, 40
LAST = 10
"""Steps whose largest reading is what is held before the change, and after it."""
BOUND_BYTES = 32 << 20
SLACK_BYTES = 2_000_000
"""The kernel adds up its counters for each CPU only now and then."""
MOST_BYTES = BOUND_BYTES + SLACK_BYTES
MOST_SECONDS = 1.0


class ResizeBytes(Case):
    """Megabytes of shared memory before and after, and the seconds between."""

    kind = "resize_bytes"
    name = "resize_bytes"
    title = "To 32 MiB in mid-epoch: 8 MiB batches, a step every 50 ms, 4 workers, prefetch 4"
    contenders = ("torch", "stoker")
    max_rounds = 3
    in_memory_cgroup = True

    def estimated_seconds(self, contender: str, quick: bool) -> float:
        del contender, quick
        return 8.0

    def measure(
        self, contender: str, context: Context, baseline: Callable[[], None]
    ) -> Measurement:
        from benchmarks.consume import read

        del context
        torch.set_num_threads(1)
        load_library(contender)
        samples = Sleepy(SAMPLE_BYTES, SAMPLE_SECONDS)
        read(torch.from_numpy(samples[0]))
        baseline()
        base = own_usage().shared_bytes
        readings: list[tuple[float, int]] = []
        sums: list[int] = []
        waits: list[float] = []

        def look() -> None:
            readings.append((perf_counter(), own_usage().shared_bytes - base))

        def step(asked: float) -> None:
            batch = run.next()
            waits.append(perf_counter() - asked)
            look()
            sums.append(read(batch))
            for _ in range(READINGS):
                sleep(STEP_SECONDS / READINGS)
                look()

        run = Pass(contender, LoaderSpec(samples, BATCH, WORKERS, PREFETCH))
        for _ in range(BEFORE):
            step(perf_counter())
        asked = perf_counter()
        run.resize({"in_flight_bytes": BOUND_BYTES}, {"workers": 2, "prefetch": 1})
        look()
        step(asked)
        for _ in range(AFTER - 1):
            step(perf_counter())
        before = [held for at, held in readings if at < asked]
        return {
            "checksums": sums,
            "before_bytes": max(before[-LAST * READINGS :]),
            "after_bytes": max(held for _, held in readings[-LAST * READINGS :]),
            "given_back_seconds": below_since(readings) - asked,
            "wait_seconds": max(waits[BEFORE:]),
        }

    def summarise(self, rounds: Sequence[Round]) -> Summary:
        agree = same_checksums(rounds)
        summary = Summary(targets=[Target("same data from every contender", *agree)])
        figures: list[tuple[str, Callable[[Measurement], float], str]] = [
            ("before", lambda got: got["before_bytes"] / 1e6, "MB"),
            ("after", after_megabytes, "MB"),
            ("given_back", given_back_ms, "ms"),
            ("wait", lambda got: 1000 * got["wait_seconds"], "ms"),
        ]
        for contender in self.contenders:
            for variant, value, unit in figures:
                values = values_of(rounds, contender, value)
                if values:
                    ratio = paired_ratio(rounds, contender, "torch", value)
                    summary.rows.append(Row(contender, variant, interval(values), unit, ratio))
        held = values_of(rounds, "stoker", after_megabytes)
        if held:
            got = f"{max(held):.1f} MB in the worst round"
            text = f"within the {BOUND_BYTES >> 20} MiB asked for ({BOUND_BYTES / 1e6:.1f} MB)"
            summary.targets.append(Target(text, got, max(held) * 1e6 <= MOST_BYTES))
            median = interval(values_of(rounds, "stoker", given_back_ms)).median
            text = f"the rest given back within {MOST_SECONDS:g} s"
            reached = median <= 1000 * MOST_SECONDS
            summary.targets.append(Target(text, f"{median:.0f} ms", reached))
        return summary


def below_since(readings: list[tuple[float, int]]) -> float:
    """When the first reading was taken after which none is above the bound."""
    above = [number for number, (_, held) in enumerate(readings) if held > MOST_BYTES]
    assert above, "never held more than the bound: nothing could be given back"
    assert above[-1] + 1 < len(readings), f"still holds {readings[-1][1] / 1e6:.0f} MB at the end"
    return readings[above[-1] + 1][0]


def after_megabytes(got: Measurement) -> float:
    """The most that was held in the last steps after the change."""
    return float(got["after_bytes"]) / 1e6


def given_back_ms(got: Measurement) -> float:
    """From the change to the first reading after which none was above the bound."""
    return 1000 * float(got["given_back_seconds"])


CASE = ResizeBytes()
