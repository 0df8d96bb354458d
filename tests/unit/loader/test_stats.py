"""Counters stay small however long a run is, and a snapshot says what happened."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.loader.stats import Counters, LoaderStats, Quantiles


def test_quantiles_before_the_first_batch_are_zero() -> None:
    assert Quantiles.of([]) == Quantiles(0.0, 0.0, 0.0, 0.0)


def test_quantiles_are_values_that_occurred() -> None:
    assert Quantiles.of([3.0]) == Quantiles(3.0, 3.0, 3.0, 3.0)
    assert Quantiles.of([float(n) for n in range(100, -1, -1)]) == Quantiles(
        50.0, 90.0, 99.0, 100.0
    )


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_quantiles_are_in_order(seconds: list[float]) -> None:
    found = Quantiles.of(seconds)
    assert min(seconds) <= found.p50 <= found.p90 <= found.p99 <= found.max == max(seconds)


def test_only_recent_batches_count() -> None:
    counters = Counters()
    for n in range(10_000):
        counters.batch(float(n), 2.0 * n)
    assert len(counters.fetch) == len(counters.collate) <= 1000
    assert counters.fetch[-1] == 9999.0
    assert counters.collate[-1] == 19998.0


@given(st.lists(st.tuples(st.integers(0, 200), st.floats(0.001, 1e3)), max_size=300))
def test_the_slowest_samples_are_found_each_with_its_worst_time(
    samples: list[tuple[int, float]],
) -> None:
    counters = Counters()
    worst: dict[int, float] = {}
    for index, seconds in samples:
        counters.slow_sample(index, seconds)
        worst[index] = max(worst.get(index, 0.0), seconds)
    assert [s for _, s in counters.slowest()] == sorted(worst.values(), reverse=True)[:10]
    assert all(worst[index] == seconds for index, seconds in counters.slowest())


@pytest.mark.parametrize("index", [[1, 2], (1, [2]), {"a": 1}, {1}], ids=repr)
def test_an_index_that_can_not_be_a_key_is_remembered_by_its_text(index: object) -> None:
    counters = Counters()
    counters.slow_sample(index, 2.0)
    counters.slow_sample(index, 1.0)
    assert counters.slowest() == [(repr(index), 2.0)]


def test_every_skip_is_counted_and_the_first_thousand_are_listed() -> None:
    counters = Counters()
    for n in range(1500):
        counters.skip(n, "ValueError: odd")
    assert counters.skipped == 1500
    assert counters.skips == [(n, "ValueError: odd") for n in range(1000)]


def test_a_snapshot_can_not_be_changed() -> None:
    assert LoaderStats.__dataclass_params__.frozen  # type: ignore[attr-defined]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Quantiles().p50 = 1.0  # type: ignore[misc]
