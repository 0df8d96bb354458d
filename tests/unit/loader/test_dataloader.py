"""``stoker.DataLoader`` without workers, and what it is before any worker is started.

What workers deliver is in tests/process; arguments of our own are in test_arguments.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

import stoker
from stoker.loader.iterator import EngineIter
from stoker.loader.main_iterator import MainIter


class Items(Dataset[Any]):
    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        self.bad = bad
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        if index in self.bad:
            raise OSError(f"bad {index}")
        return index


class Many(Items):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


class Erratic(IterableDataset[Any]):
    """Raises at 2 and at 4, and goes on."""

    def __iter__(self) -> Iterator[int]:
        return _Erratic()


class _Erratic:
    def __init__(self) -> None:
        self.next = -1

    def __iter__(self) -> _Erratic:
        return self

    def __next__(self) -> int:
        self.next += 1
        if self.next in (2, 4):
            raise OSError(f"bad {self.next}")
        if self.next > 6:
            raise StopIteration
        return self.next


def values(loader: Any) -> list[Any]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]


def test_without_workers_it_is_torchs_own_iterator_in_the_trainer() -> None:
    dataset = Items()
    iterator = iter(stoker.DataLoader(dataset, 3, num_workers=0))
    assert isinstance(iterator, (MainIter, _SingleProcessDataLoaderIter))
    assert values(iterator) == [[0, 1, 2], [3, 4, 5], [6]]
    assert dataset.asked == list(range(7))  # the very object, not a copy of it


def test_without_workers_an_exception_is_the_datasets_own() -> None:
    iterator = iter(stoker.DataLoader(Items((1,)), 1, num_workers=0))
    assert next(iterator) == 0
    with pytest.raises(OSError, match=r"^bad 1$"):
        next(iterator)
    assert next(iterator) == 2


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("dataset", "batch_size", "expected"),
    [
        (Items((2, 4)), 3, [[0, 1], [3, 5], [6]]),
        (Many((2, 4)), 3, [[0, 1], [3, 5], [6]]),
        (Items((2, 4)), None, [0, 1, 3, 5, 6]),
        (Items((2, 4)), 1, [[0], [1], [3], [5], [6]]),
        (Erratic(), 2, [[0, 1], [3, 5], [6]]),
        (Erratic(), None, [0, 1, 3, 5, 6]),
    ],
    ids=["map", "getitems", "map, unbatched", "map, one by one", "stream", "stream, unbatched"],
)
def test_skipping_is_the_same_with_and_without_workers(
    dataset: Any, batch_size: int | None, expected: list[Any], workers: int
) -> None:
    loader = stoker.DataLoader(dataset, batch_size, num_workers=workers, on_error="skip")
    assert values(loader) == expected
    stats = loader.stats()
    assert stats.skipped == 2
    assert [words for _, words in stats.skips] == ["OSError: bad 2", "OSError: bad 4"]


def test_a_loader_and_its_iterator_go_when_nobody_holds_them() -> None:
    for workers in (0, 1):
        loader = stoker.DataLoader(Items(), num_workers=workers)
        iterator = iter(loader)
        next(iterator)
        gone = [weakref.ref(loader), weakref.ref(iterator)]
        gc.collect()
        gc.disable()
        try:
            del loader, iterator
            assert [reference() for reference in gone] == [None, None]
        finally:
            gc.enable()


def test_statistics_follow_the_newest_iterator() -> None:
    loader = stoker.DataLoader(Items(), num_workers=1)
    assert loader.stats().workers == 0
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    assert isinstance(second, EngineIter)
    assert loader.stats().worker_pids == tuple(worker.pid for worker in second._workers)
    assert loader.stats().delivered == 2


def test_a_class_that_compares_its_instances_still_has_statistics() -> None:
    class Equal(stoker.DataLoader[Any]):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Equal)

        __hash__ = None  # type: ignore[assignment]

    loader = Equal(Items(), num_workers=1)
    assert len(values(loader)) == 7
    assert loader.stats().delivered == 7


def test_a_prefetch_factor_of_zero_is_refused_when_loading_starts_as_in_torch() -> None:
    loader = stoker.DataLoader(Items(), num_workers=1, prefetch_factor=0)
    with pytest.raises(AssertionError, match="prefetch_factor must be greater than 0"):
        iter(loader)


def test_a_dataset_may_be_a_plain_list() -> None:
    for workers in (0, 1):
        loader = stoker.DataLoader([1, 2, 3], batch_size=2, num_workers=workers)
        assert values(loader) == [[1, 2], [3]]


def test_an_empty_dataset_gives_an_empty_epoch() -> None:
    for workers in (0, 2):
        assert values(stoker.DataLoader([], num_workers=workers)) == []
