"""What goes wrong inside the dataset reaches the caller with its own name; the rest goes on."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stoker import DataLoader
from stoker.errors import WorkerDied
from tests.process import datasets
from tests.process.datasets import (
    Failing,
    FailingIter,
    FailingMany,
    Numbers,
    OddConstructor,
    WithMessage,
)
from tests.process.epochs import counted, going_on, numbers

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

KILLED = r"DataLoader worker \(pid \d+\) is killed by signal: "
EXITED = r"DataLoader worker \(pid\(s\) \d+\) exited unexpectedly|exit code 3"


def failing(act: Callable[[], None], **more: Any) -> DataLoader[Any]:
    return DataLoader(Failing(48, {17}, act), batch_size=4, num_workers=2, **more)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_bad_sample_is_its_own_error_names_its_index_and_costs_one_batch(context: str) -> None:
    loader = failing(datasets.raise_value_error, multiprocessing_context=context)
    batches, errors = going_on(iter(loader))
    assert [type(error) for error in errors] == [ValueError]
    assert re.search(
        r"Caught ValueError in DataLoader worker process \d, index 17\b", str(errors[0])
    )
    assert "this sample is bad" in str(errors[0])
    assert "in raise_value_error" in str(errors[0]), "the worker's traceback"
    assert numbers(batches) == counted(48, 4, without=[4])


def test_an_error_comes_at_its_place_in_the_order() -> None:
    iterator = iter(failing(datasets.raise_value_error))
    assert numbers(next(iterator) for _ in range(4)) == counted(16, 4)
    with pytest.raises(ValueError, match="index 17"):
        next(iterator)
    assert numbers([next(iterator)]) == [[20, 21, 22, 23]]


def test_an_exception_whose_constructor_is_odd_arrives_with_its_text() -> None:
    batches, errors = going_on(iter(failing(datasets.raise_odd_constructor)))
    assert [type(error) for error in errors] == [RuntimeError]
    assert OddConstructor.__name__ in str(errors[0])
    assert "7 at here" in str(errors[0])
    assert "index 17" in str(errors[0])
    assert len(batches) == 11


def test_an_exception_with_a_message_on_its_class_arrives() -> None:
    batches, errors = going_on(iter(failing(datasets.raise_with_message)))
    assert [type(error) for error in errors] == [WithMessage]
    assert "index 17" in str(errors[0])
    assert len(batches) == 11


def test_an_exception_class_that_can_not_be_pickled_arrives_as_text() -> None:
    batches, errors = going_on(iter(failing(datasets.raise_local_class)))
    assert [type(error) for error in errors] == [RuntimeError]
    assert "a class that can't be pickled" in str(errors[0])
    assert len(batches) == 11


def test_an_exception_that_holds_a_lock_arrives() -> None:
    batches, errors = going_on(iter(failing(datasets.raise_holding_a_lock)))
    assert [type(error) for error in errors] == [ValueError]
    assert len(batches) == 11


def test_an_error_of_a_whole_batch_names_its_indices() -> None:
    dataset = FailingMany(48, {17}, datasets.raise_value_error)
    batches, errors = going_on(iter(DataLoader(dataset, batch_size=4, num_workers=2)))
    assert [type(error) for error in errors] == [ValueError]
    assert "index [16, 17, 18, 19]" in str(errors[0])
    assert numbers(batches) == counted(48, 4, without=[4])


class BadCollate:
    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        if samples[0][0] == 16:
            raise KeyError("no such key in collate")
        return torch.stack(samples)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_an_error_in_collate_fn_costs_one_batch(context: str) -> None:
    loader = DataLoader(
        Numbers(48),
        batch_size=4,
        num_workers=2,
        collate_fn=BadCollate(),
        multiprocessing_context=context,
    )
    batches, errors = going_on(iter(loader))
    assert [type(error) for error in errors] == [KeyError]
    assert "no such key in collate" in str(errors[0])
    assert numbers(batches) == counted(48, 4, without=[4])


class Unequal(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(9 if index == 17 else 8)


def test_samples_that_do_not_stack_cost_one_batch() -> None:
    batches, errors = going_on(iter(DataLoader(Unequal(48), batch_size=4, num_workers=2)))
    assert [type(error) for error in errors] == [RuntimeError]
    assert "stack expects each tensor to be equal size" in str(errors[0])
    assert len(batches) == 11


def bad_init(worker: int) -> None:
    raise ValueError(f"worker {worker} does not want to begin")


def test_an_error_in_worker_init_fn_reaches_the_caller() -> None:
    loader = DataLoader(Numbers(16), batch_size=4, num_workers=2, worker_init_fn=bad_init)
    with pytest.raises(ValueError, match="does not want to begin"):
        next(iter(loader))


def deadly_init(worker: int) -> None:
    datasets.kill_self()


def test_a_worker_init_fn_that_kills_is_an_error_and_no_endless_respawn() -> None:
    loader = DataLoader(Numbers(16), batch_size=4, num_workers=2, worker_init_fn=deadly_init)
    with pytest.raises(WorkerDied, match=KILLED):
        next(iter(loader))
    assert loader.stats().deaths <= 6


def test_an_error_in_iter_of_a_stream_reaches_the_caller() -> None:
    with pytest.raises(ValueError, match="no stream today"):
        next(iter(DataLoader(FailingIter(), batch_size=4, num_workers=2)))


DEADLY = {
    "segfault": (datasets.segfault, KILLED + "Segmentation fault"),
    "sigkill": (datasets.kill_self, KILLED + "Killed"),
    "os._exit": (datasets.exit_at_once, "exited unexpectedly with exit code 3"),
    "sys.exit": (datasets.exit_politely, "exited unexpectedly with exit code 3"),
}


@pytest.mark.parametrize("how", DEADLY)
def test_a_sample_that_kills_is_an_error_after_three_deaths_and_the_rest_comes(how: str) -> None:
    act, words = DEADLY[how]
    loader = failing(act)
    batches, errors = going_on(iter(loader))
    assert [type(error) for error in errors] == [WorkerDied]
    error = errors[0]
    assert isinstance(error, WorkerDied)
    assert re.search(words, str(error))
    assert "[16, 17, 18, 19]" in str(error)
    assert error.indices == (16, 17, 18, 19)
    assert error.attempts == 3
    assert loader.stats().deaths == 3
    assert numbers(batches) == counted(48, 4, without=[4])


def test_several_samples_that_kill_are_as_many_errors() -> None:
    dataset = Failing(48, {1, 17, 18, 40}, datasets.kill_self)
    batches, errors = going_on(iter(DataLoader(dataset, batch_size=4, num_workers=3)))
    assert [error.indices[0] for error in errors if isinstance(error, WorkerDied)] == [0, 16, 40]
    assert numbers(batches) == counted(48, 4, without=[0, 4, 10])


def test_a_sample_that_kills_does_so_under_spawn_too() -> None:
    loader = failing(datasets.kill_self, multiprocessing_context="spawn")
    batches, errors = going_on(iter(loader))
    assert [type(error) for error in errors] == [WorkerDied]
    assert numbers(batches) == counted(48, 4, without=[4])


class Refuses:
    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("can't be put together again")


class SendsRefusal(Numbers):
    def __getitem__(self, index: int) -> Any:
        return Refuses() if index == 17 else super().__getitem__(index)


def first_of(samples: list[Any]) -> Any:
    return next((s for s in samples if isinstance(s, Refuses)), None) or torch.stack(samples)


def test_a_batch_that_does_not_unpickle_in_the_trainer_is_one_error() -> None:
    loader = DataLoader(SendsRefusal(48), batch_size=4, num_workers=2, collate_fn=first_of)
    batches, errors = going_on(iter(loader))
    assert [type(error) for error in errors] == [ValueError]
    assert "can't be put together again" in str(errors[0])
    assert numbers(batches) == counted(48, 4, without=[4])
