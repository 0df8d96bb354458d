"""The throughput case: batches a second in steady state. The datasets are in benchmarks/cases/."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.case import Case, Context, Interval, Measurement, Round, Row, Summary, Target
from benchmarks.contenders import LoaderSpec, load_library, make_loader
from benchmarks.intervals import interval, paired_ratio, values_of

ENDLESS = 10_000_000
"""Length of a synthetic dataset: more than any window consumes."""

BEGINNING = 12
"""How many batches make the beginning of an epoch."""

SETTLING = 20
"""Batches after that, not counted: more than any contender keeps in flight with two workers."""

CHECKED = 3
"""How many batches after it are compared byte by byte among the contenders."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What Stoker must reach against torch: the median ratio, or merely to be surely ahead."""

    ratio: float | None

    def judge(self, ratio: Interval) -> Target:
        """Compare a measured interval with this goal."""
        got = figure(ratio)
        if self.ratio is None:
            return Target("lower bound above 1x torch", got, ratio.low > 1.0)
        return Target(f"{self.ratio:g}x torch", got, ratio.median >= self.ratio)


@dataclass(frozen=True)
class Throughput(Case):
    """Samples a second, with a consumer that reads each batch and with one that copies it."""

    name: str
    title: str
    dataset: Callable[[Path], Any]
    batch_size: int
    goal: Goal | None = None
    workers: int = 2
    prefetch: int = 2
    collate_fn: Callable[[list[Any]], Any] | None = None
    files: Callable[[Path], None] | None = None
    read_seconds: float = 1.0
    copy_seconds: float = 0.6
    max_rounds: int | None = None
    kind: str = "throughput"

    def prepare(self, context: Context) -> None:
        if self.files is not None:
            self.files(context.folder)

    def estimated_seconds(self, contender: str, quick: bool) -> float:
        del contender
        return 4.0 if quick else 3.5 + self.read_seconds + self.copy_seconds

    def measure(
        self, contender: str, context: Context, baseline: Callable[[], None]
    ) -> Measurement:
        import torch

        from benchmarks.consume import Copier, fingerprint, read

        torch.set_num_threads(1)
        load_library(contender)
        dataset = self.dataset(context.folder)
        baseline()
        started = perf_counter()
        batches = iter(make_loader(contender, self._spec(dataset)))
        # The beginning of an epoch is reported apart: workers start, memory is touched for the
        # first time, queues fill. What follows the fingerprints lets the queues settle again.
        for _ in range(BEGINNING):
            read(next(batches))
        beginning = BEGINNING * self.batch_size / (perf_counter() - started)
        checksums = [fingerprint(next(batches)) for _ in range(CHECKED)]
        for _ in range(SETTLING):
            read(next(batches))
        scale = 0.25 if context.quick else 1.0
        result: Measurement = {
            "checksums": checksums,
            "beginning": beginning,
            "read": self._samples_per_second(batches, read, self.read_seconds * scale),
        }
        copy = Copier(next(batches))
        for _ in range(3):
            copy(next(batches))
        result["copy"] = self._samples_per_second(batches, copy, self.copy_seconds * scale)
        return result

    def summarise(self, rounds: Sequence[Round]) -> Summary:
        agree = same_checksums(rounds)
        summary = Summary(targets=[Target("same data from every contender", *agree)])
        for variant in ("read", "copy", "beginning"):
            summary.rows.extend(self._rows(rounds, variant))
        against_torch = paired_ratio(rounds, "stoker", "torch", itemgetter("read"))
        if against_torch is not None and self.goal is not None:
            summary.targets.append(self.goal.judge(against_torch))
        against_spdl = paired_ratio(rounds, "stoker", "spdl", itemgetter("read"))
        if against_spdl is not None:
            text = "lower bound ahead of SPDL"
            summary.targets.append(Target(text, figure(against_spdl), against_spdl.low > 1.0))
        return summary

    def _rows(self, rounds: Sequence[Round], variant: str) -> Iterator[Row]:
        for contender in self.contenders:
            rates = values_of(rounds, contender, itemgetter(variant))
            if rates:
                ratio = paired_ratio(rounds, contender, "torch", itemgetter(variant))
                yield Row(contender, variant, interval(rates), "samples/s", ratio)

    def _spec(self, dataset: Any) -> LoaderSpec:
        return LoaderSpec(dataset, self.batch_size, self.workers, self.prefetch, self.collate_fn)

    def _samples_per_second(
        self, batches: Any, consume: Callable[[Any], Any], seconds: float
    ) -> float:
        done, started = 0, perf_counter()
        while True:
            batch = next(batches)
            consume(batch)
            done += 1
            elapsed = perf_counter() - started
            if elapsed >= seconds and done >= 3:
                return done * self.batch_size / elapsed


def same_checksums(rounds: Sequence[Round]) -> tuple[str, bool]:
    """Whether all contenders delivered the same first batches in the same order, in every round."""
    seen = {tuple(got["checksums"]) for round_ in rounds for got in round_.values()}
    return ("equal checksums" if len(seen) == 1 else "CHECKSUMS DIFFER"), len(seen) == 1


def figure(ratio: Interval) -> str:
    """A ratio and its interval, as people read it."""
    return f"{ratio.median:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]"
