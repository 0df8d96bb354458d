"""``on_error="skip"``: a bad sample is dropped, counted and listed; the epoch goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stoker import DataLoader
from tests.process import datasets
from tests.process.datasets import Failing, FailingMany, Numbers, Stream
from tests.process.epochs import counted, flat, numbers

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.parametrize("num_workers", [0, 2]),
]
BAD = {3, 8, 9, 10, 11, 22}
LEFT = [[0, 1, 2], [4, 5, 6, 7], [12, 13, 14, 15], [16, 17, 18, 19], [20, 21]]


def skipping(dataset: Any, num_workers: int, **more: Any) -> DataLoader[Any]:
    settings = {"batch_size": 4, "num_workers": num_workers, "on_error": "skip", **more}
    return DataLoader(dataset, **settings)


@pytest.mark.parametrize("kind", [Failing, FailingMany])
def test_bad_samples_are_dropped_counted_and_listed(num_workers: int, kind: type[Failing]) -> None:
    loader = skipping(kind(23, BAD, datasets.raise_value_error), num_workers)
    assert numbers(loader) == LEFT
    stats = loader.stats()
    assert stats.skipped == len(BAD)
    assert [index for index, _ in stats.skips] == sorted(BAD)
    assert all("ValueError: this sample is bad" in text for _, text in stats.skips)


def test_an_epoch_of_nothing_but_bad_samples_is_empty(num_workers: int) -> None:
    loader = skipping(Failing(10, set(range(10)), datasets.raise_value_error), num_workers)
    assert list(loader) == []
    assert loader.stats().skipped == 10


def test_drop_last_drops_what_the_sampler_drops_and_not_what_has_shrunk(num_workers: int) -> None:
    dataset = Failing(23, BAD, datasets.raise_value_error)
    assert numbers(skipping(dataset, num_workers, drop_last=True)) == LEFT[:-1]


def test_counts_add_up_over_epochs(num_workers: int) -> None:
    loader = skipping(
        Failing(23, BAD, datasets.raise_value_error),
        num_workers,
        persistent_workers=bool(num_workers),
    )
    for _ in range(3):
        assert numbers(loader) == LEFT
    assert loader.stats().skipped == 3 * len(BAD)


def test_without_batches_single_samples_fall_away(num_workers: int) -> None:
    loader = skipping(Failing(12, {3, 8}, datasets.raise_value_error), num_workers, batch_size=None)
    assert [int(sample[0]) for sample in loader] == [0, 1, 2, 4, 5, 6, 7, 9, 10, 11]
    assert [index for index, _ in loader.stats().skips] == [3, 8]


def test_an_error_in_collate_fn_is_not_skipped(num_workers: int) -> None:
    def bad(samples: list[torch.Tensor]) -> torch.Tensor:
        raise ValueError("collate is not a sample")

    with pytest.raises(ValueError, match="collate is not a sample"):
        next(iter(skipping(Numbers(8), num_workers, collate_fn=bad)))


class BumpyStream(Stream):
    """An iterator that goes on after an error, as one with its own __next__ can."""

    def __iter__(self) -> Any:
        self._at = -1
        return self

    def __next__(self) -> torch.Tensor:
        self._at += 1
        if self._at >= self.samples:
            raise StopIteration
        if self._at in BAD:
            raise ValueError("this sample is bad")
        return torch.full((8,), float(self._at))


def test_bad_samples_of_a_stream_are_dropped_and_its_batches_are_full(num_workers: int) -> None:
    loader = skipping(BumpyStream(23), min(num_workers, 1))
    good = [number for number in range(23) if number not in BAD]
    assert flat(numbers(loader)) == good
    assert loader.stats().skipped == len(BAD)


def test_a_sample_that_kills_its_worker_is_not_skipped_silently(num_workers: int) -> None:
    if not num_workers:
        pytest.skip("it would kill this process")
    loader = skipping(Failing(12, {5}, datasets.kill_self), num_workers)
    with pytest.raises(RuntimeError, match="is killed by signal"):
        list(loader)


def test_nothing_bad_changes_nothing(num_workers: int) -> None:
    loader = skipping(Numbers(23), num_workers)
    assert numbers(loader) == counted(23, 4)
    assert loader.stats().skipped == 0
