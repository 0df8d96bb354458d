"""Pinning, with a stand-in for the accelerator that this machine lacks.

The stand-in's ``pin_memory`` returns a marked copy. That real pinned memory is used by real streams
can't be shown here.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset

import stoker
from stoker.loader.pin import Pinner

Torch = torch.utils.data.DataLoader
MEGABYTE = 1 << 20


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch believes that there is one; `threads` are those that pinned something."""
    told = SimpleNamespace(threads=set(), devices=[])

    def pin(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        told.threads.add(threading.current_thread().name)
        copy = torch.Tensor.clone(tensor)
        copy.marked = True
        return copy

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "set_device_index", told.devices.append)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    return told


class Point(NamedTuple):
    x: torch.Tensor
    name: str


class Points(Dataset[Any]):
    def __init__(self, length: int = 12, nbytes: int = 8) -> None:
        self.length = length
        self.nbytes = nbytes

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        value = torch.full((self.nbytes // 8,), index)
        return {"p": Point(value, f"n{index}"), "l": [value, index]}


class Custom:
    """A batch that knows how to pin itself."""

    def __init__(self, samples: list[Any]) -> None:
        self.values = torch.stack([sample["l"][0] for sample in samples])
        self.pinned = False

    def pin_memory(self) -> Custom:
        if int(self.values[0, 0]) == 4:
            raise ValueError("can't pin this one")
        self.pinned = True
        return self


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def is_marked(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "marked", False)


def drain(loader: Any, marked: bool = True) -> list[int]:
    """First values of all batches, each of which must be pinned throughout."""
    found = []
    for batch in loader:
        assert type(batch["p"]) is Point
        for tensor in (batch["p"].x, *batch["l"]):
            assert is_marked(tensor) is marked
        assert batch["p"].name[0] == f"n{int(batch['p'].x[0, 0])}"
        found.append(int(batch["l"][1][0]))
    return found


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_arrive_pinned_and_in_order(workers: int, accelerator: SimpleNamespace) -> None:
    loader = stoker.DataLoader(Points(), 2, num_workers=workers, pin_memory=True)
    assert drain(loader) == [0, 2, 4, 6, 8, 10]
    assert loader.stats().delivered == 6


def test_workers_batches_are_pinned_on_a_thread_of_its_own_for_the_callers_device(
    accelerator: SimpleNamespace,
) -> None:
    drain(stoker.DataLoader(Points(), 2, num_workers=1, pin_memory=True))
    assert accelerator.threads == {"stoker-pin"}
    assert accelerator.devices == [3]


@pytest.mark.usefixtures("accelerator")
def test_an_iterable_dataset_is_pinned_too() -> None:
    loader = stoker.DataLoader(Stream(), 2, num_workers=1, pin_memory=True)
    batches = list(loader)
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5]]
    assert all(is_marked(batch) for batch in batches)


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("workers", [0, 2])
def test_custom_types_and_errors_in_pinning_reach_the_caller_as_in_torch(workers: int) -> None:
    seen = []
    for cls in (Torch, stoker.DataLoader):
        loader = cls(Points(), 2, num_workers=workers, pin_memory=True, collate_fn=Custom)
        iterator = iter(loader)
        found: list[Any] = []
        for _ in range(6):
            try:
                batch = next(iterator)
            except ValueError as error:
                found.append((type(error), str(error).splitlines()[0]))
            else:
                assert batch.pinned
                found.append(batch.values.tolist())
        assert next(iterator, None) is None
        seen.append(found)
    assert seen[0] == seen[1]
    words = "in pin memory thread for device 3" if workers else "can't pin this one"
    assert words in seen[1][2][1]


class Fails(Points):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise KeyError("gone")
        return super().__getitem__(index)


@pytest.mark.usefixtures("accelerator")
def test_an_exception_of_the_dataset_passes_and_the_iteration_goes_on() -> None:
    iterator = iter(stoker.DataLoader(Fails(), 2, num_workers=1, pin_memory=True))
    next(iterator)
    next(iterator)
    with pytest.raises(KeyError, match="gone"):
        next(iterator)
    assert drain(iterator) == [6, 8, 10]


@pytest.mark.usefixtures("accelerator")
def test_shared_memory_is_given_back_once_a_batch_is_pinned() -> None:
    loader = stoker.DataLoader(
        Points(40, MEGABYTE // 2),
        1,
        num_workers=1,
        pin_memory=True,
        persistent_workers=True,
        memory="12MiB",
    )
    kept = list(loader)  # five times what may be in flight
    assert [int(batch["l"][1]) for batch in kept] == list(range(40))
    assert [int(batch["p"].x[0, -1]) for batch in kept] == list(range(40))
    stats = loader.stats()
    assert stats.leased_bytes == 0
    assert (stats.copied_batches, stats.overdraft_batches) == (0, 0)
    assert stats.in_flight_peak_bytes <= stats.arena_bytes


@pytest.mark.usefixtures("accelerator")
def test_the_thread_ends_with_the_epoch_and_after_a_break() -> None:
    loader = stoker.DataLoader(Points(), 2, num_workers=1, pin_memory=True)
    iterator = iter(loader)
    thread = iterator._pin_memory_thread
    assert thread.is_alive()
    drain(iterator)
    assert not thread.is_alive()
    iterator = iter(loader)
    thread = iterator._pin_memory_thread
    next(iterator)
    del iterator
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.usefixtures("accelerator")
def test_persistent_workers_and_their_thread_serve_every_epoch() -> None:
    loader = stoker.DataLoader(Points(), 2, num_workers=2, pin_memory=True, persistent_workers=True)
    assert drain(loader) == [0, 2, 4, 6, 8, 10]
    thread = loader._iterator._pin_memory_thread
    for step, batch in enumerate(loader):
        assert is_marked(batch["p"].x)
        if step == 2:
            break
    assert drain(loader) == [0, 2, 4, 6, 8, 10]
    assert loader._iterator._pin_memory_thread is thread


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_is_an_error_and_not_a_hang(
    accelerator: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(index: int) -> None:
        raise OSError(f"no device {index}")

    monkeypatch.setattr(torch.accelerator, "set_device_index", refuse)
    monkeypatch.setattr("stoker.loader.pin._CHECK_SECONDS", 0.05)
    iterator = iter(stoker.DataLoader(Points(), 2, num_workers=1, pin_memory=True))
    with pytest.raises(RuntimeError, match="Pin memory thread exited unexpectedly"):
        next(iterator)


@pytest.mark.usefixtures("accelerator")
def test_nothing_is_pinned_that_was_not_asked_for() -> None:
    assert drain(stoker.DataLoader(Points(), 2, num_workers=1), marked=False)


@pytest.mark.parametrize("workers", [0, 1])
def test_without_an_accelerator_torchs_warning_and_plain_tensors(workers: int) -> None:
    loader = stoker.DataLoader(Points(), 2, num_workers=workers, pin_memory=True)
    with pytest.warns(UserWarning, match="no accelerator is found"):
        iterator = iter(loader)
    assert drain(iterator, marked=False) == [0, 2, 4, 6, 8, 10]
    assert not hasattr(iterator, "_pin_memory_thread")


@pytest.mark.usefixtures("accelerator")
def test_a_pinner_can_be_cleared_and_closed_twice() -> None:
    pinner = Pinner("cuda")
    for value in range(3):
        pinner.put(value, None, torch.tensor(value))
    pinner.clear()
    assert pinner.pending == 0
    pinner.put(7, None, torch.tensor(7))
    assert pinner.get() == (7, None, torch.tensor(7))
    pinner.close()
    pinner.close()
    assert not pinner.thread.is_alive()


@pytest.mark.may_leak("an interruption between receiving a descriptor and keeping it loses it")
def test_interruptions_at_any_moment_lose_no_batch_on_its_way_through_the_pinner(
    accelerator: SimpleNamespace,
) -> None:
    inside = False

    def interrupt(*_: Any) -> None:
        if inside:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    moments = random.Random(0)
    batches = iter(stoker.DataLoader(torch.arange(120), 2, num_workers=1, pin_memory=True))
    got: list[int] = []
    interruptions = 0
    try:
        while True:
            if interruptions < 60:
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(5e-6, 4e-4))
            inside = True
            try:
                for batch in batches:
                    inside = False
                    got.append(int(batch[0]))
                    break
                else:
                    inside = False
                    break
            except KeyboardInterrupt:
                interruptions += 1
            inside = False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert got == list(range(0, 120, 2))
    assert interruptions
