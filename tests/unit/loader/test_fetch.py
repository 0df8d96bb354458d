"""Fetching one batch from the user's dataset: what is asked of it, what it cost, what failed."""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate, default_convert

from stoker.loader.fetch import (
    At,
    Fetcher,
    Job,
    NothingLeft,
    heap_room,
    own_random_state,
    position_seed,
    seed_everything,
    wrap_exception,
)


def as_list(samples: Any) -> Any:
    return samples


def job(dataset: Any, **changed: Any) -> Job:
    facts: dict[str, Any] = {
        "dataset": dataset,
        "iterable": False,
        "batched": True,
        "collate_fn": as_list,
        "drop_last": False,
        "base_seed": 1,
        "worker_init_fn": None,
        "num_workers": 1,
        "shared_seed": None,
        "skip_errors": False,
        "tight": False,
    }
    return Job(**{**facts, **changed})


class Items:
    """Raises for the indices in `bad`; says what it was asked for."""

    def __init__(self, bad: tuple[int, ...] = (), slow: int = -1) -> None:
        self.bad = bad
        self.slow = slow
        self.asked: list[Any] = []

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        if index == self.slow:
            time.sleep(0.02)
        if index in self.bad:
            raise OSError(f"bad {index}")
        return index * 10


class Many(Items):
    def __getitems__(self, indices: list[int]) -> list[int]:
        self.asked.append(list(indices))
        if set(indices) & set(self.bad):
            raise OSError(f"bad among {indices}")
        return [index * 10 for index in indices]


class Erratic:
    """An iterator that raises at some of its values and goes on."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __iter__(self) -> Iterator[Any]:
        return _Erratic(self.values)


class _Erratic:
    def __init__(self, values: list[Any]) -> None:
        self.values = list(values)

    def __iter__(self) -> _Erratic:
        return self

    def __next__(self) -> Any:
        if not self.values:
            raise StopIteration
        value = self.values.pop(0)
        if isinstance(value, Exception):
            raise value
        return value


def fetch(fetcher: Fetcher, index: Any) -> Any:
    return fetcher.fetch(index, heap_room())


# --- map-style ----------------------------------------------------------------------------------


def test_a_batch_asks_for_each_index_in_order() -> None:
    dataset = Items()
    assert fetch(Fetcher(job(dataset)), [3, 1, 2]) == [30, 10, 20]
    assert dataset.asked == [3, 1, 2]


def test_a_dataset_that_gives_many_at_once_is_asked_once() -> None:
    dataset = Many()
    assert fetch(Fetcher(job(dataset)), [3, 1]) == [30, 10]
    assert dataset.asked == [[3, 1]]


def test_a_dataset_whose_getitems_is_none_is_asked_one_by_one() -> None:
    dataset = Items()
    dataset.__getitems__ = None
    assert fetch(Fetcher(job(dataset)), [1, 2]) == [10, 20]


def test_without_batching_the_sample_goes_to_the_collate_fn_alone() -> None:
    fetcher = Fetcher(job(Items(), batched=False, collate_fn=str))
    assert fetch(fetcher, 4) == "40"


@pytest.mark.parametrize("batched", [False, True])
def test_the_default_collate_gives_what_torch_gives(batched: bool) -> None:
    collate: Callable[[Any], Any] = default_collate if batched else default_convert
    samples = [{"x": torch.full((3, 3), i), "y": np.arange(4) + i} for i in range(4)]
    fetched = fetch(
        Fetcher(job(samples, batched=batched, collate_fn=collate)), [2, 0, 3] if batched else 2
    )
    expected = collate([samples[2], samples[0], samples[3]] if batched else samples[2])
    assert fetched.keys() == expected.keys()
    for key in expected:
        assert torch.equal(fetched[key], expected[key])


@pytest.mark.parametrize(
    ("dataset", "batched", "index", "named"),
    [
        (Items((2,)), True, [1, 2, 3], 2),
        (Items((2,)), False, 2, 2),
        (Many((2,)), True, [1, 2, 3], [1, 2, 3]),
    ],
    ids=["each", "one", "many"],
)
def test_a_failing_index_is_named_and_its_exception_kept(
    dataset: Any, batched: bool, index: Any, named: Any
) -> None:
    with pytest.raises(At) as caught:
        fetch(Fetcher(job(dataset, batched=batched)), index)
    assert caught.value.index == named
    assert isinstance(caught.value.__cause__, OSError)


def test_costs_of_the_last_batch_are_noted() -> None:
    fetcher = Fetcher(job(Items(slow=2)))
    fetch(fetcher, [1, 2, 3])
    assert fetcher.slowest is not None
    assert fetcher.slowest[0] == 2
    assert fetcher.fetch_seconds >= fetcher.slowest[1] >= 0.02
    fetch(fetcher, [5])
    assert fetcher.slowest == (5, fetcher.fetch_seconds)


def test_a_quick_dataset_that_fails_later_has_its_index_named_too() -> None:
    fetcher = Fetcher(job(Items((7,))))
    for _ in range(3):  # by now it is known to be quick, and no longer timed one by one
        assert fetch(fetcher, [1, 2]) == [10, 20]
        assert fetcher.fetch_seconds > 0
    with pytest.raises(At) as caught:
        fetch(fetcher, [1, 7, 2])
    assert caught.value.index == 7
    assert isinstance(caught.value.__cause__, OSError)


# --- skipping -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Items, Many])
def test_bad_samples_are_skipped_and_listed(kind: type[Items]) -> None:
    fetcher = Fetcher(job(kind((2, 4)), skip_errors=True))
    assert fetch(fetcher, [1, 2, 3, 4]) == [10, 30]
    assert [index for index, _ in fetcher.skips] == [2, 4]
    assert all(words.startswith("OSError: bad") for _, words in fetcher.skips)
    assert fetch(fetcher, [5]) == [50]
    assert fetcher.skips == []


@pytest.mark.parametrize(("kind", "batched"), [(Items, True), (Many, True), (Items, False)])
def test_when_every_sample_is_bad_nothing_is_left(kind: type[Items], batched: bool) -> None:
    fetcher = Fetcher(job(kind((2,)), batched=batched, skip_errors=True))
    with pytest.raises(NothingLeft):
        fetch(fetcher, [2] if batched else 2)
    assert [index for index, _ in fetcher.skips] == [2]


def test_an_error_of_the_collate_fn_is_never_skipped() -> None:
    def refuse(samples: Any) -> Any:
        raise ValueError("uneven")

    with pytest.raises(ValueError, match="uneven"):
        fetch(Fetcher(job(Items(), collate_fn=refuse, skip_errors=True)), [1])


# --- iterable -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("drop_last", "expected"), [(False, [[0, 1], [2]]), (True, [[0, 1]])])
def test_a_stream_is_cut_into_batches_until_it_ends(drop_last: bool, expected: Any) -> None:
    fetcher = Fetcher(job(range(3), iterable=True, drop_last=drop_last))
    found = []
    for _ in expected:
        found.append(fetch(fetcher, [None, None]))
    assert found == expected
    for _ in range(2):
        with pytest.raises(StopIteration):
            fetch(fetcher, [None, None])


def test_a_stream_can_be_started_over() -> None:
    fetcher = Fetcher(job(range(2), iterable=True, batched=False))
    assert [fetch(fetcher, None), fetch(fetcher, None)] == [0, 1]
    with pytest.raises(StopIteration):
        fetch(fetcher, None)
    fetcher.restart()
    assert fetch(fetcher, None) == 0


@pytest.mark.parametrize("batched", [False, True])
def test_a_stream_skips_what_raises_and_goes_on(batched: bool) -> None:
    dataset = Erratic([OSError("a"), 1, OSError("b"), 2])
    fetcher = Fetcher(job(dataset, iterable=True, batched=batched, skip_errors=True))
    if batched:
        assert fetch(fetcher, [None, None]) == [1, 2]
        assert [words for _, words in fetcher.skips] == ["OSError: a", "OSError: b"]
    else:
        assert [fetch(fetcher, None), fetch(fetcher, None)] == [1, 2]


def test_a_stream_goes_on_after_an_exception_that_was_not_skipped() -> None:
    fetcher = Fetcher(job(Erratic([1, OSError("a"), 2]), iterable=True, batched=False))
    assert fetch(fetcher, None) == 1
    with pytest.raises(OSError, match="a"):
        fetch(fetcher, None)
    assert fetch(fetcher, None) == 2


# --- seeds --------------------------------------------------------------------------------------


def test_the_seed_of_a_position_is_its_own() -> None:
    seeds = {
        position_seed(base, epoch, position)
        for base in (0, 1, 2**62, -5)
        for epoch in range(5)
        for position in range(200)
    }
    assert len(seeds) == 4 * 5 * 200
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_seed_of_a_position_never_changes_between_releases() -> None:
    seeds = [position_seed(123, epoch, place) for epoch, place in ((0, 0), (0, 1), (1, 0))]
    assert seeds == [8081798942985517698, 5491115901193253725, 3166198486448919567]


def test_every_global_generator_is_seeded() -> None:
    drawn = []
    for _ in range(2):
        seed_everything(2**63 - 1)
        drawn.append((float(torch.rand(())), random.random(), float(np.random.rand())))
    assert drawn[0] == drawn[1]


def test_ones_own_random_state_leaves_the_trainers_alone() -> None:
    def draw() -> tuple[float, ...]:
        return float(torch.rand(())), random.random(), float(np.random.rand())

    def fail() -> None:
        with own_random_state(5):
            inside.append(draw())
            raise OSError("inside")

    inside: list[tuple[float, ...]] = []
    seed_everything(1)
    expected = draw()
    seed_everything(1)
    with pytest.raises(OSError, match="inside"):
        fail()
    assert draw() == expected
    assert inside != [expected]


# --- exceptions on their way --------------------------------------------------------------------


def caught_by(act: Callable[[], Any]) -> Exception:
    try:
        act()
    except Exception as error:  # noqa: BLE001 - that is what is tested
        return error
    raise AssertionError("nothing was raised")


def test_an_exception_travels_with_its_type_its_traceback_and_the_index() -> None:
    error = caught_by(lambda: fetch(Fetcher(job(Items((2,)))), [1, 2]))
    wrapper = pickle.loads(pickle.dumps(wrap_exception(error, "process 0")))
    with pytest.raises(OSError, match="Caught OSError in DataLoader worker process 0, index 2"):
        wrapper.reraise()
    assert "in __getitem__" in wrapper.exc_msg
    assert "OSError: bad 2" in wrapper.exc_msg


def test_an_exception_without_an_index_has_torchs_own_words() -> None:
    error = caught_by(lambda: [][1])
    with pytest.raises(IndexError, match=r"Caught IndexError in DataLoader worker process 3\.\n"):
        wrap_exception(error, "process 3").reraise()


def test_an_exception_class_that_can_not_travel_keeps_its_words() -> None:
    class Local(Exception):
        pass

    def fail() -> None:
        raise Local("deep inside")

    wrapper = pickle.loads(pickle.dumps(wrap_exception(caught_by(fail), "process 0")))
    with pytest.raises(RuntimeError, match=r"Local \(not picklable\)(.|\n)*deep inside"):
        wrapper.reraise()
