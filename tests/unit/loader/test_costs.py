"""Slow samples are told from usual ones, remembered within bounds, and forgotten in time."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from stoker.loader.costs import LEAST_SECONDS, Costs, RunningMedian, Usual


def test_the_running_median_is_not_moved_by_outliers() -> None:
    median = RunningMedian()
    rng = random.Random(0)
    for _ in range(2000):
        usual = rng.uniform(0.9, 1.1)
        median.update(usual * 300 if rng.random() < 0.06 else usual)
    assert 0.8 < median.value < 1.3


def test_the_running_median_recovers_quickly_from_an_odd_first_value() -> None:
    median = RunningMedian()
    median.update(50.0)
    for _ in range(100):
        median.update(1.0)
    assert median.value < 1.2


def test_nothing_is_slow_before_there_is_something_to_compare_with() -> None:
    assert Usual().limit == float("inf")


def fed(sample: float, count: int, batches: int = 50, worst: float | None = None) -> Usual:
    usual = Usual()
    for _ in range(batches):
        top = sample if worst is None else worst
        usual.batch(sample * (count - 1) + top, top, count)
    return usual


def test_a_sample_is_slow_if_it_takes_longer_than_a_usual_batch() -> None:
    assert fed(0.001, 64).limit == pytest.approx(0.064, rel=0.2)


def test_of_small_batches_a_sample_is_slow_if_it_takes_eight_times_as_long_as_usual() -> None:
    assert fed(0.01, 1).limit == pytest.approx(0.08, rel=0.2)


def test_noise_of_the_machine_is_not_slow() -> None:
    assert fed(1e-6, 4).limit == LEAST_SECONDS


def test_a_batch_of_which_every_sample_was_skipped_says_nothing() -> None:
    usual = Usual()
    usual.batch(0.0, 0.0, 0)
    assert usual.limit == float("inf")


def test_the_cost_of_a_batch_is_that_of_its_slow_samples() -> None:
    costs = Costs()
    costs.note([1, 2, 3, 4], [(2, 0.5), (4, 0.25)])
    assert costs.of([9, 4, 2]) == 0.75
    assert costs.of([1, 3]) == 0.0
    assert costs.of(4) == 0.25


def test_a_sample_that_is_not_slow_any_more_is_forgotten_after_a_few_visits() -> None:
    costs = Costs()
    costs.note([7], [(7, 0.01)])
    seen = []
    while costs:
        seen.append(costs.of([7]))
        costs.note([7, 8], [])
    assert seen == [0.01, 0.005, 0.0025, 0.00125]


def test_one_quick_visit_does_not_make_a_slow_sample_forgotten() -> None:
    costs = Costs()
    costs.note([7], [(7, 1.0)])
    costs.note([7], [])
    costs.note([7], [(7, 1.0)])
    assert costs.of([7]) == 1.0


def test_memory_is_bounded_and_the_longest_unseen_goes_first() -> None:
    costs = Costs(most=3)
    for index in (1, 2, 3):
        costs.note([index], [(index, 1.0)])
    costs.note([1], [(1, 1.0)])
    costs.note([4], [(4, 1.0)])
    assert [bool(costs.of([index])) for index in (1, 2, 3, 4)] == [True, False, True, True]


@pytest.mark.parametrize("index", [[1, 2], {"a": 1}, (1, [2]), torch.tensor(3), object(), None])
def test_indices_that_do_not_travel_well_are_ignored(index: object) -> None:
    costs = Costs()
    costs.note([index], [(index, 1.0)])
    assert len(costs) == 0
    costs.note([5], [(5, 1.0)])
    assert costs.of([index]) == 0.0
    assert costs.of([index, 5]) == 1.0
    costs.note([index, 5], [])
    assert costs.of([5]) == 0.5


@pytest.mark.parametrize("index", [3, "a/b.jpg", b"key", (2, "left"), np.int64(3)])
def test_numbers_strings_and_tuples_are_known_again(index: object) -> None:
    costs = Costs()
    costs.note([index], [(index, 1.0)])
    assert costs.of([index]) == 1.0


def test_an_integer_is_the_same_index_whatever_its_type() -> None:
    costs = Costs()
    costs.note([3], [(np.int64(3), 1.0)])
    assert costs.of([3]) == 1.0
