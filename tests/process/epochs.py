"""Reading epochs and comparing them; reaching the processes behind an iterator."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from stoker import DataLoader


def seeded(loader: DataLoader[Any], seed: int = 1) -> Iterator[Any]:
    """An iterator whose base seed and shuffles are those of `seed`."""
    torch.manual_seed(seed)
    return iter(loader)


def epoch(loader: DataLoader[Any], seed: int = 1) -> list[Any]:
    return list(seeded(loader, seed))


def same(left: Any, right: Any) -> bool:
    """Equal in structure, dtype and every bit."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def numbers(batches: Iterable[Any]) -> list[list[int]]:
    """Of batches of `Numbers`: the numbers, after a look at every element."""
    found = []
    for batch in batches:
        assert torch.equal(batch, batch[:, :1].expand_as(batch)), "a sample is not of one piece"
        found.append(batch[:, 0].int().tolist())
    return found


def counted(samples: int, batch_size: int, without: Iterable[int] = ()) -> list[list[int]]:
    """What `numbers` gives for an undisturbed sequential epoch, batches in `without` left out."""
    batches = [
        list(range(start, min(start + batch_size, samples)))
        for start in range(0, samples, batch_size)
    ]
    return [batch for number, batch in enumerate(batches) if number not in set(without)]


def worker_pids(iterator: Any) -> list[int]:
    """Pids of all workers, once all of them are ready for work."""
    deadline = time.monotonic() + 20
    while True:
        iterator._engine.has_next()
        pids = [handle.pid for handle in iterator._workers if handle.is_alive()]
        workers = iterator._engine.dispatch.workers
        ready = all(worker.ready for worker in workers if not worker.retired)
        if ready and len(pids) == len(iterator._workers):
            return pids
        assert time.monotonic() < deadline, "workers do not start"
        time.sleep(0.005)


def host_pid(iterator: Any) -> int:
    """Pid of the process that workers are forked from."""
    pid: int = iterator._engine._crew._process.pid
    return pid


def wait_until_idle(iterator: Any) -> None:
    """Until everything that was asked for is loaded."""
    dispatch = iterator._engine.dispatch
    deadline = time.monotonic() + 20
    while dispatch.ready < dispatch.outstanding:
        iterator._engine.has_next()
        assert time.monotonic() < deadline, "workers do not get done"
        time.sleep(0.005)


def kill(pid: int) -> None:
    """SIGKILL, and wait until it has taken effect: on a busy machine that takes a moment."""
    os.kill(pid, signal.SIGKILL)
    while True:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] in "ZX":
                    return
        except OSError:
            return
        time.sleep(0.001)


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def going_on(iterator: Iterator[Any]) -> tuple[list[Any], list[Exception]]:
    """The rest of an epoch in which some batches are errors."""
    batches: list[Any] = []
    errors: list[Exception] = []
    while True:
        try:
            batches.append(next(iterator))
        except StopIteration:
            return batches, errors
        except Exception as error:  # noqa: BLE001 - whatever the dataset raised
            errors.append(error)
            assert len(errors) < 100, "the same error again and again"
