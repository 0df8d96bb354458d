"""The first-batch case: seconds from `iter(loader)` to its first batch, by start method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from benchmarks.case import Case, Context, Measurement, Round, Row, Summary, Target
from benchmarks.contenders import LoaderSpec, load_library, make_loader
from benchmarks.intervals import interval, paired_ratio, values_of
from benchmarks.throughput import same_checksums


class Held:
    """A dataset that holds its data in a numpy array, which is pickled byte by byte."""

    def __init__(self, held_bytes: int) -> None:
        self._rows = np.arange(held_bytes // 4096 * 512, dtype=np.int64).reshape(-1, 512)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        row: np.ndarray[tuple[int, ...], np.dtype[np.int64]] = self._rows[index]
        return row


@dataclass(frozen=True)
class FirstBatch(Case):
    """How long a training run waits before it can begin."""

    name: str
    title: str
    start_method: str
    held_bytes: int
    workers: int
    most_of_torch: float
    contenders: tuple[str, ...] = ("torch", "stoker")
    max_rounds: int | None = None
    kind: str = "first_batch"

    def estimated_seconds(self, contender: str, quick: bool) -> float:
        heavy = self.held_bytes > 100_000_000
        return 3.0 if quick or not heavy else (40.0 if contender == "torch" else 10.0)

    def measure(
        self, contender: str, context: Context, baseline: Callable[[], None]
    ) -> Measurement:
        import torch

        from benchmarks.consume import fingerprint

        torch.set_num_threads(1)
        load_library(contender)
        size, workers = self.held_bytes, self.workers
        if context.quick:
            size, workers = min(size, 50_000_000), 2
        spec = LoaderSpec(Held(size), 8, workers, start_method=self.start_method)
        loader = make_loader(contender, spec)
        baseline()
        started = perf_counter()
        batches = iter(loader)
        first = next(batches)
        seconds = perf_counter() - started
        return {"seconds": seconds, "checksums": [fingerprint(first), fingerprint(next(batches))]}

    def summarise(self, rounds: Sequence[Round]) -> Summary:
        agree = same_checksums(rounds)
        summary = Summary(targets=[Target("same data from every contender", *agree)])
        for contender in self.contenders:
            seconds = values_of(rounds, contender, seconds_of)
            if seconds:
                ratio = paired_ratio(rounds, contender, "torch", seconds_of)
                summary.rows.append(Row(contender, "wait", interval(seconds), "s", ratio))
        ratio = paired_ratio(rounds, "stoker", "torch", seconds_of)
        if ratio is not None:
            got = f"{ratio.median:.2f} of torch's wait [{ratio.low:.2f}, {ratio.high:.2f}]"
            text = f"at most {self.most_of_torch:g} of torch's wait"
            summary.targets.append(Target(text, got, ratio.median <= self.most_of_torch))
        return summary


def seconds_of(got: Measurement) -> float:
    """The wait for the first batch."""
    return float(got["seconds"])
