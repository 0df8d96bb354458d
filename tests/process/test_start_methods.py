"""How the dataset reaches its workers, and what becomes of one that can't travel."""

from __future__ import annotations

import logging
import pickle
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from stoker import DataLoader
from tests.process.datasets import Augmented, BadSetstate, Numbers, Stream, ThreadInSetstate
from tests.process.epochs import counted, epoch, flat, numbers, same

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_batches_are_the_same_under_every_start_method(context: str) -> None:
    settings: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": 2}
    expected = epoch(DataLoader(Augmented(40), **settings))
    assert same(
        epoch(DataLoader(Augmented(40), multiprocessing_context=context, **settings)), expected
    )


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_a_dataset_that_does_not_pickle_says_so_at_once(context: str) -> None:
    dataset = Numbers(8)
    dataset.hook = lambda: None  # type: ignore[attr-defined]
    loader = DataLoader(dataset, num_workers=2, multiprocessing_context=context)
    with pytest.raises((pickle.PicklingError, AttributeError), match="pickle"):
        iter(loader)
    del dataset.hook  # type: ignore[attr-defined]
    assert numbers(loader) == counted(8, 1)


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_a_dataset_that_does_not_unpickle_is_its_own_error(context: str) -> None:
    loader = DataLoader(BadSetstate(8), num_workers=2, multiprocessing_context=context)
    iterator = iter(loader)
    for _ in range(2):
        with pytest.raises(ValueError, match="this dataset does not unpickle"):
            next(iterator)


def test_a_dataset_that_starts_a_thread_is_unpickled_by_each_worker() -> None:
    loader = DataLoader(
        ThreadInSetstate(40), batch_size=4, num_workers=3, multiprocessing_context="spawn"
    )
    assert numbers(loader) == counted(40, 4)


def test_a_deep_queue_survives_the_restart_for_a_dataset_with_threads() -> None:
    loader = DataLoader(
        ThreadInSetstate(6000),
        batch_size=1000,
        num_workers=1,
        prefetch_factor=300,
        multiprocessing_context="spawn",
    )
    assert numbers(loader) == counted(6000, 1000)


def test_large_index_lists_get_through() -> None:
    loader = DataLoader(
        Numbers(200_000, width=1), batch_size=20_000, num_workers=2, prefetch_factor=8
    )
    assert numbers(loader) == counted(200_000, 20_000)


def test_leaving_early_with_a_full_queue_is_quick() -> None:
    loader = DataLoader(
        Numbers(400_000, width=1), batch_size=20_000, num_workers=1, prefetch_factor=20
    )
    for batch in loader:
        assert int(batch[0]) == 0
        break


class LocalTuples(Dataset[Any]):
    """Batches of a class that no other process can import, and with a lambda."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        value = torch.rand(3) + index
        if self.kind == "lambda":
            return {"value": value, "hook": lambda: index}
        point = namedtuple("point", "value index")  # noqa: PYI024 - the old way, as datasets do
        return point(value, index)


def as_list(samples: list[Any]) -> list[Any]:
    return samples


@pytest.mark.parametrize("kind", ["lambda", "namedtuple"])
def test_batches_that_can_not_be_sent_are_loaded_here_with_one_warning(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    loader = DataLoader(LocalTuples(kind), batch_size=4, num_workers=2, collate_fn=as_list)
    torch.manual_seed(5)
    with caplog.at_level(logging.WARNING):
        batches = list(loader)
    samples = flat(batches)
    assert len(batches) == 3
    if kind == "lambda":
        assert [sample["hook"]() for sample in samples] == list(range(12))
        values = [sample["value"] for sample in samples]
    else:
        assert [sample.index for sample in samples] == list(range(12))
        values = [sample.value for sample in samples]
    assert [int(value[0]) for value in values] == list(range(12))
    said = [record for record in caplog.records if "can't be sent" in record.getMessage()]
    assert len(said) == 1


def test_loading_here_leaves_the_random_stream_of_the_trainer_alone() -> None:
    def after(dataset: Dataset[Any]) -> torch.Tensor:
        torch.manual_seed(5)
        list(DataLoader(dataset, batch_size=4, num_workers=2, collate_fn=as_list))
        return torch.rand(4)

    assert torch.equal(after(LocalTuples("lambda")), after(Numbers(12)))


def test_a_stream_that_can_not_be_sent_is_an_error() -> None:
    def hooks(samples: list[Any]) -> Any:
        return lambda: samples

    loader = DataLoader(Stream(12), batch_size=4, num_workers=2, collate_fn=hooks)
    with pytest.raises((AttributeError, pickle.PicklingError, RuntimeError), match="pickle"):
        next(iter(loader))


def test_streams_load_under_spawn() -> None:
    loader = DataLoader(Stream(40), batch_size=4, num_workers=2, multiprocessing_context="spawn")
    assert sorted(flat(numbers(loader))) == list(range(40))
