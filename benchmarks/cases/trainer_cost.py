"""What a small batch costs the training process itself in CPU time: 32 samples of 1 kB, a label.

CPU time of the whole process (its threads too) for each batch, minus the reading of the batch. On a
GPU machine this is time in which the trainer launches no kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import process_time, thread_time

import torch

from benchmarks.case import Case, Context, Measurement, Round, Row, Summary, Target
from benchmarks.cases.views import random_floats
from benchmarks.contenders import LoaderSpec, load_library, make_loader
from benchmarks.intervals import interval, paired_ratio, values_of
from benchmarks.throughput import ENDLESS, same_checksums

MOST_MICROSECONDS = 150.0


class Labelled:
    """1 kB of features, as a view, and an integer label."""

    def __init__(self) -> None:
        self._base = random_floats(1021, 256)

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._base[index % len(self._base)], index % 10


class TrainerCost(Case):
    """Microseconds of the trainer's CPU for each batch."""

    kind = "trainer_cost"
    name = "trainer_cost"
    title = "Trainer's CPU time for a batch of 32 samples of 1 kB"
    contenders = ("torch", "stoker")

    def estimated_seconds(self, contender: str, quick: bool) -> float:
        del contender
        return 4.0 if quick else 7.0

    def measure(
        self, contender: str, context: Context, baseline: Callable[[], None]
    ) -> Measurement:
        from benchmarks.consume import fingerprint, read

        torch.set_num_threads(1)
        load_library(contender)
        dataset = Labelled()
        baseline()
        batches = iter(make_loader(contender, LoaderSpec(dataset, 32)))
        checksums = [fingerprint(next(batches)) for _ in range(100)]
        count = 500 if context.quick else 2000
        reading = 0.0
        started = process_time()
        for _ in range(count):
            batch = next(batches)
            before = thread_time()
            read(batch)
            reading += thread_time() - before
        spent = process_time() - started - reading
        return {"checksums": checksums, "microseconds": spent / count * 1e6}

    def summarise(self, rounds: Sequence[Round]) -> Summary:
        agree = same_checksums(rounds)
        summary = Summary(targets=[Target("same data from every contender", *agree)])
        for contender in self.contenders:
            costs = values_of(rounds, contender, microseconds_of)
            if costs:
                ratio = paired_ratio(rounds, contender, "torch", microseconds_of)
                summary.rows.append(Row(contender, "cpu", interval(costs), "us", ratio))
        ours = values_of(rounds, "stoker", microseconds_of)
        if ours:
            median = interval(ours).median
            reached = median < MOST_MICROSECONDS
            summary.targets.append(Target("below 150 us a batch", f"{median:.0f} us", reached))
        return summary


def microseconds_of(got: Measurement) -> float:
    """The trainer's CPU time for one batch."""
    return float(got["microseconds"])


CASE = TrainerCost()
