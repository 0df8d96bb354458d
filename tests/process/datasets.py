"""Datasets that misbehave on purpose. Importable by name, so that spawned workers find them."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset


class Numbers(Dataset[torch.Tensor]):
    """Sample i is `width` times the number i: a wrong or recycled byte shows at once."""

    def __init__(self, samples: int, width: int = 8) -> None:
        self.samples = samples
        self.width = width

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.width,), float(index))


class Augmented(Dataset[dict[str, Any]]):
    """Draws from all three global generators, as augmentation code does."""

    def __init__(self, samples: int, width: int = 64, seconds: float = 0.0) -> None:
        self.samples = samples
        self.width = width
        self.seconds = seconds

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.seconds:
            time.sleep(self.seconds)
        return {
            "index": index,
            "torch": torch.rand(self.width),
            "numpy": np.random.rand(3),
            "random": random.random(),
        }


class Gated(Augmented):
    """Waits at one index until a file appears, and says there who waits."""

    def __init__(self, samples: int, at: int, folder: Path) -> None:
        super().__init__(samples)
        self.at = at
        self.folder = folder

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.at and not (self.folder / "open").exists():
            (self.folder / "waiting").write_text(str(os.getpid()))
            while not (self.folder / "open").exists():
                time.sleep(0.005)
        return super().__getitem__(index)

    def who_waits(self) -> int:
        while not (self.folder / "waiting").exists() or not (self.folder / "waiting").read_text():
            time.sleep(0.005)
        return int((self.folder / "waiting").read_text())

    def open_gate(self) -> None:
        (self.folder / "open").touch()


class OddConstructor(Exception):
    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"{code} at {where}")


class WithMessage(Exception):
    message = "set on the class, as some libraries do"

    def __init__(self, message: str = "") -> None:
        super().__init__(message)


def raise_value_error() -> None:
    raise ValueError("this sample is bad")


def raise_odd_constructor() -> None:
    raise OddConstructor(7, where="here")


def raise_with_message() -> None:
    raise WithMessage("bad")


def raise_local_class() -> None:
    class Local(Exception):
        pass

    raise Local("a class that can't be pickled")


def raise_holding_a_lock() -> None:
    error = ValueError("holds what can't be pickled")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    raise error


def exit_at_once() -> None:
    os._exit(3)


def exit_politely() -> None:
    sys.exit(3)


def segfault() -> None:
    ctypes.string_at(0)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Failing(Numbers):
    """Does something bad at some indices, every time."""

    def __init__(self, samples: int, bad: set[int], act: Callable[[], None]) -> None:
        super().__init__(samples)
        self.bad = bad
        self.act = act

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.bad:
            self.act()
        return super().__getitem__(index)


class FailingMany(Failing):
    """The same, asked for whole batches; `__getitem__` is never to be used."""

    def __getitem__(self, index: int) -> torch.Tensor:
        raise AssertionError("a dataset with __getitems__ is asked through it")

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [Failing.__getitem__(self, index) for index in indices]


class FailingIter(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        raise ValueError("no stream today")


class Stream(IterableDataset[torch.Tensor]):
    """Each worker delivers its share; one number may be deadly, while a file does not exist."""

    def __init__(self, samples: int, deadly: int = -1, antidote: Path | None = None) -> None:
        self.samples = samples
        self.deadly = deadly
        self.antidote = antidote

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(start, self.samples, step):
            if number == self.deadly and not (self.antidote and self.antidote.exists()):
                kill_self()
            yield torch.full((8,), float(number))


class BadSetstate(Numbers):
    def __setstate__(self, state: dict[str, Any]) -> None:
        raise ValueError("this dataset does not unpickle")


class ThreadInSetstate(Numbers):
    """A dataset that starts a thread when it is unpickled: a host with it must not fork."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.ballast = np.arange(1 << 18)
        self.unpickled_in = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.unpickled_in = os.getpid()
        threading.Thread(target=threading.Event().wait, daemon=True).start()

    def __getitem__(self, index: int) -> torch.Tensor:
        assert self.unpickled_in == os.getpid(), "unpickled elsewhere: its thread is not here"
        assert int(self.ballast.sum()) == (1 << 18) * ((1 << 18) - 1) // 2
        return super().__getitem__(index)


class Changing(Numbers):
    """What it delivers depends on an attribute that the trainer changes between epochs."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.offset = 0.0

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + self.offset


class Sleepy(Numbers):
    """Slow at some indices."""

    def __init__(self, samples: int, slow: set[int], seconds: float) -> None:
        super().__init__(samples)
        self.slow = slow
        self.seconds = seconds

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.slow:
            time.sleep(self.seconds)
        return super().__getitem__(index)


class Heavy(Numbers):
    """48 MB a sample."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3, 4_000_000), float(index))
