"""``worker_kind="thread"``: same batches, same errors, same bounds; nothing can be killed."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch

from stoker import DataLoader
from stoker.errors import WorkerDied, WorkerTimeout
from tests.process import datasets
from tests.process.datasets import Failing, Numbers, Stream
from tests.process.epochs import counted, flat, going_on, numbers

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def threads(dataset: Any, **more: Any) -> DataLoader[Any]:
    settings = {"batch_size": 4, "num_workers": 3, "worker_kind": "thread", **more}
    return DataLoader(dataset, **settings)


def test_batches_are_those_of_processes() -> None:
    torch.manual_seed(2)
    expected = numbers(DataLoader(Numbers(200), batch_size=4, shuffle=True, num_workers=2))
    torch.manual_seed(2)
    loader = threads(Numbers(200), shuffle=True)
    assert numbers(loader) == expected
    assert loader.stats().worker_kind == "thread"


def test_a_bad_sample_names_its_index_and_costs_one_batch() -> None:
    batches, errors = going_on(iter(threads(Failing(48, {17}, datasets.raise_value_error))))
    assert [type(error) for error in errors] == [ValueError]
    assert "index 17" in str(errors[0])
    assert numbers(batches) == counted(48, 4, without=[4])


@pytest.mark.parametrize("code", [None, 0, 3, "words"])
def test_sys_exit_in_the_dataset_ends_neither_trainer_nor_epoch(code: Any) -> None:
    dataset = Failing(48, {17}, lambda: sys.exit(code))
    batches, errors = going_on(iter(threads(dataset)))
    assert [type(error) for error in errors] == [WorkerDied]
    assert "[16, 17, 18, 19]" in str(errors[0])
    assert numbers(batches) == counted(48, 4, without=[4])


def test_leaving_early_ends_the_threads() -> None:
    before = threading.active_count()
    for batch in threads(Numbers(4000)):
        assert numbers([batch]) == [[0, 1, 2, 3]]
        break
    del batch
    assert threading.active_count() == before


def test_persistent_threads_load_several_epochs_also_after_leaving_early() -> None:
    loader = threads(Numbers(100), persistent_workers=True)
    for leave_after in (3, 100, 1, 100):
        found = []
        for batch in loader:
            found.append(batch)
            if len(found) == leave_after:
                break
        assert numbers(found) == counted(100, 4)[:leave_after]


def test_batches_that_are_kept_are_not_overwritten() -> None:
    loader = threads(Numbers(800, width=2000), memory=6 * 4 * 2000 * 4)
    held = list(loader)
    del loader
    assert numbers(held) == counted(800, 4)


class Patient(Numbers):
    """Waits at one index until it is let go."""

    def __init__(self, samples: int, at: int) -> None:
        super().__init__(samples)
        self.at = at
        self.gate = threading.Event()

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.at:
            self.gate.wait()
        return super().__getitem__(index)


def test_a_stuck_thread_is_an_error_after_the_timeout() -> None:
    dataset = Patient(48, at=9)
    iterator = iter(threads(dataset, timeout=0.3))
    assert numbers(next(iterator) for _ in range(2)) == counted(8, 4)
    with pytest.raises(WorkerTimeout, match=r"DataLoader timed out after 0\.3 seconds"):
        next(iterator)
    dataset.gate.set()


def test_threads_overlap_what_waits() -> None:
    meeting = threading.Barrier(2)

    class Meets(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index in (0, 4):  # of two batches: neither gets on before the other is there
                meeting.wait(20)
            return super().__getitem__(index)

    assert numbers(threads(Meets(96), num_workers=2)) == counted(96, 4)


def test_a_stream_is_not_repeated_by_threads() -> None:
    assert flat(numbers(threads(Stream(40)))) == list(range(40))


def test_skipping_works_in_threads() -> None:
    loader = threads(Failing(23, {3, 8}, datasets.raise_value_error), on_error="skip")
    assert flat(numbers(loader)) == [n for n in range(23) if n not in {3, 8}]
    assert loader.stats().skipped == 2
