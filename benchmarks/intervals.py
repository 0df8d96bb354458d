"""Medians with bootstrap confidence intervals, and ratios paired by round. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import median

from benchmarks.case import Interval, Measurement, Round

RESAMPLES = 10_000


def interval(values: Sequence[float]) -> Interval:
    """The median and its percentile-bootstrap 95 % interval, with a fixed seed."""
    if not values:
        raise ValueError("no values: every round of this contender failed")
    rng = random.Random(0)
    medians = sorted(median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    low, high = medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]
    return Interval(median(values), low, high)


def values_of(
    rounds: Sequence[Round], contender: str, value: Callable[[Measurement], float]
) -> list[float]:
    """A contender's figure in every round it finished."""
    return [value(round_[contender]) for round_ in rounds if contender in round_]


def paired_ratio(
    rounds: Sequence[Round], over: str, under: str, value: Callable[[Measurement], float]
) -> Interval | None:
    """The interval of value(over) / value(under), round by round; None if no round has both."""
    ratios = [
        value(round_[over]) / value(round_[under])
        for round_ in rounds
        if over in round_ and under in round_
    ]
    return interval(ratios) if ratios else None
