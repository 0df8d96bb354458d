"""One sample in a thousand takes 300 times as long; batch 64, 8 workers, shuffled: what is lost?

`__getitem__` sleeps 1 ms, or 300 ms for a fixed pseudo-random 0.1 %: a slow store, not a slow CPU,
so that 8 workers keep their pace on two cores. The slow samples are 30 % more work in all, which
nobody can hide. So the step of the consumer, not loading, is made the bottleneck: 1.25 times what 8
workers need for a batch *with* the slow ones, and the same step without them. What is lost then is
only that in-order delivery waits for a slow batch (one in sixteen) that was begun too late.

Each contender runs two epochs with the slow samples and two without; a loss is the time of an
epoch, from its first batch to its last, over that of the second epoch without them. Stoker
remembers slow samples from the epochs before, so its first epoch shows what it does without
knowing. `in_order=False` of torch's is what gives up the order instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from time import perf_counter, sleep
from typing import Any
from zlib import crc32

import numpy as np
import torch

from benchmarks.case import Case, Context, Measurement, Round, Row, Summary, Target
from benchmarks.contenders import LoaderSpec, load_library, make_loader
from benchmarks.intervals import interval, values_of
from benchmarks.throughput import same_checksums

WORKERS, PREFETCH, BATCH, BATCHES = 8, 2, 64, 500
USUAL_SECONDS, TIMES, SHARE = 0.001, 300, 0.001
SLACK = 1.25
MOST_LOST = 0.15


class Uneven:
    """Samples of which a few take very long, always the same ones; or none."""

    def __init__(self, batches: int, slow: bool) -> None:
        self._samples = batches * BATCH
        self._slow = np.random.default_rng(0).random(self._samples) < (SHARE if slow else 0.0)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> int:
        sleep(USUAL_SECONDS * TIMES if self._slow[index] else USUAL_SECONDS)
        return index


def step_seconds() -> float:
    """The consumer's step; a sleep of 1 ms takes a little longer, so it is measured."""
    began = perf_counter()
    for _ in range(100):
        sleep(USUAL_SECONDS)
    usual = (perf_counter() - began) / 100
    return SLACK * BATCH * (usual + SHARE * USUAL_SECONDS * TIMES) / WORKERS


def run_epoch(loader: Any, step: float) -> tuple[float, list[int]]:
    """Seconds from the first batch of an epoch to its end, and the samples in their order."""
    order: list[list[int]] = []
    batches = iter(loader)
    order.append(next(batches).tolist())
    began = perf_counter()
    for batch in batches:
        order.append(batch.tolist())
        sleep(step)
    return perf_counter() - began, list(chain.from_iterable(order))


class KnownSlow(Case):
    """Seconds an epoch, with slow samples and without."""

    kind = "known_slow"
    name = "known_slow"
    title = "0.1 % of samples 300x slower, 8 workers, batch 64, step 1.25x of what loading takes"
    contenders = ("torch", "torch_unordered", "stoker")
    max_rounds = 3

    def estimated_seconds(self, contender: str, quick: bool) -> float:
        del contender
        return 12.0 if quick else 48.0

    def measure(
        self, contender: str, context: Context, baseline: Callable[[], None]
    ) -> Measurement:
        torch.set_num_threads(1)
        load_library(contender)
        baseline()
        step = step_seconds()
        batches = BATCHES // 5 if context.quick else BATCHES
        result: Measurement = {"step": step, "checksums": []}
        for slow in (False, True):
            torch.manual_seed(0)
            spec = LoaderSpec(Uneven(batches, slow), BATCH, WORKERS, PREFETCH, shuffle=True)
            loader = make_loader(contender, spec)
            for epoch in (1, 2):
                seconds, order = run_epoch(loader, step)
                assert sorted(order) == list(range(len(spec.dataset)))
                result[f"{'slow' if slow else 'even'}_{epoch}"] = seconds
                if contender != "torch_unordered":
                    result["checksums"].append(crc32(np.array(order).tobytes()))
        return result

    def summarise(self, rounds: Sequence[Round]) -> Summary:
        ordered = [{w: got for w, got in r.items() if w != "torch_unordered"} for r in rounds]
        agree = same_checksums(ordered)
        summary = Summary(targets=[Target("the sampler's order, as torch's", *agree)])
        for contender in self.contenders:
            for epoch in (1, 2):
                losses = values_of(rounds, contender, lambda got, n=epoch: lost(got, n))
                if losses:
                    row = Row(contender, f"epoch {epoch}", interval(losses), "%")
                    summary.rows.append(row)
        ours = values_of(rounds, "stoker", lambda got: lost(got, 2))
        if ours:
            median = interval(ours).median
            text = f"at most {MOST_LOST:.0%} lost from the second epoch on"
            target = Target(text, f"{median:.0f} %", median <= 100 * MOST_LOST)
            summary.targets.append(target)
        return summary


def lost(got: Measurement, epoch: int) -> float:
    """Percent of time that an epoch with slow samples takes beyond one without."""
    return 100 * (float(got[f"slow_{epoch}"]) / float(got["even_2"]) - 1)


CASE = KnownSlow()
