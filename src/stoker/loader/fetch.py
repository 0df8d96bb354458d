"""Runs the user's dataset for one batch: fetch, collate, time, name the index that failed.

Used by every kind of worker and by the trainer itself (``num_workers=0``). It knows nothing of
processes, sockets or who decides.
"""

from __future__ import annotations

import _random
import contextlib
import pickle
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper

from stoker.loader.collate import Collator
from stoker.loader.costs import Usual
from stoker.loader.room import Room
from stoker.loader.streams import Saved, Stand, is_stateful, reopen, save

_MASK64 = (1 << 64) - 1
_BRISK_SECONDS = 20e-6
"""A dataset that takes less a sample is timed by the batch."""


@dataclass(frozen=True, slots=True)
class Job:
    """What every worker of one iterator needs. Pickled at most once, then inherited."""

    dataset: Any
    iterable: bool
    batched: bool
    collate_fn: Callable[[Any], Any]
    drop_last: bool
    base_seed: int
    worker_init_fn: Callable[[int], None] | None
    num_workers: int
    shared_seed: int | None
    skip_errors: bool
    tight: bool
    """Memory is scarce: announce the size of the first sample, give freed memory back at once."""
    stands: dict[int, Stand] | None = None
    """From where each worker goes on with an iterable dataset, if not from its beginning."""
    share: bool = False
    """Workers fill batches together: what a sample draws is seeded by its row."""


def position_seed(base_seed: int, epoch: int, position: int) -> int:
    """The seed of a batch: of its place in the run, not of the worker it lands on.

    Two rounds of the splitmix64 finalizer, so that neighbours share no bits; 63 bits, because
    datasets put ``torch.initial_seed()`` into int64 tensors.
    """
    value = base_seed & _MASK64
    for part in (epoch, position):
        value = (value + 0x9E3779B97F4A7C15 * (part + 1)) & _MASK64
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
        value ^= value >> 31
    return value >> 1


_python_generator: random.Random = random.seed.__self__  # type: ignore[attr-defined]
_seed_python = _random.Random.seed


def seed_everything(seed: int) -> None:
    """Seed torch's, Python's and numpy's global generators (the quick way: 10 us)."""
    torch.default_generator.manual_seed(seed)
    # What random.seed(int) does, without asking what else the seed might be (a third of its time).
    _seed_python(_python_generator, seed)
    _python_generator.gauss_next = None  # type: ignore[attr-defined]
    np.random.seed(seed & 0xFFFFFFFF)


@contextlib.contextmanager
def own_random_state(seed: int) -> Iterator[None]:
    """Seed the global generators for a while, then put them back as they were."""
    with torch.random.fork_rng(devices=[]):
        python, numpy = random.getstate(), np.random.get_state()
        seed_everything(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def heap_room() -> Room:
    """A room for batches that stay in this process."""
    return Room(np.empty(0, dtype=np.uint8), lambda nbytes: np.empty(nbytes, dtype=np.uint8))


class Fetcher:
    """Runs the dataset for one batch at a time and notes what each sample cost."""

    def __init__(self, job: Job, worker: int = 0) -> None:
        self._job = job
        self._collator = Collator(job.collate_fn, job.batched)
        self.announce: Callable[[Room], None] | None = None
        self.skips: list[tuple[Any, str]] = []
        self.slowest: tuple[Any, float] | None = None
        self.slow: list[tuple[Any, float]] = []
        """The samples of the last batch that took far longer than usual (see ``costs.Usual``)."""
        self.fetch_seconds = 0.0
        self._usual = Usual()
        self._brisk = False
        stand = job.stands.get(worker) if job.stands is not None else None
        if stand is None:
            self.restart()
        else:
            self._go_on(stand)

    def restart(self) -> None:
        """Begin an epoch."""
        self._ended = False
        self._iterator = iter(self._job.dataset) if self._job.iterable else None
        self._note_stateful()

    def _note_stateful(self) -> None:
        self._stateful = self._job.iterable and (
            is_stateful(self._iterator) or is_stateful(self._job.dataset)
        )

    def _go_on(self, stand: Stand) -> None:
        """Begin where an earlier run has stopped."""
        self._ended = False
        self._iterator = reopen(self._job.dataset, stand)
        self._note_stateful()
        if stand.state:
            self._ended = bool(stand.state.get("ended")) and not stand.fresh
            return
        for number in range(stand.batches):
            try:
                self.fetch(stand.payload, heap_room())
            except StopIteration:
                raise RuntimeError(
                    f"the iterable dataset ended after {number} batches while it was replayed to "
                    f"resume after batch {stand.batches}: it is not the one that was saved"
                ) from None
            except Exception:  # the caller has seen it in its time
                continue

    def state(self) -> Saved:
        """Where an iterable dataset with a state of its own stands now."""
        if not self._stateful:
            return None
        return save(self._job.dataset, self._iterator, self._ended)

    def fetch(self, index: Any, room: Room) -> object:
        """The batch for an index (or list of indices); raises StopIteration at the end."""
        self.skips = []
        self.slowest = None
        self.slow = []
        self.fetch_seconds = 0.0
        if self._job.iterable:
            return self._fetch_iterable(index, room)
        if not self._job.batched:
            return self._fetch_one(index, room)
        many = getattr(self._job.dataset, "__getitems__", None)
        if many and not self._job.share:  # shared batches are loaded row by row
            return self._fetch_many(many, index, room)
        return self._fetch_each(index, room)

    def _fetch_one(self, index: Any, room: Room) -> object:
        try:
            sample = self._timed(self._one, index)
            if self.fetch_seconds > self._usual.limit:
                self.slow.append((index, self.fetch_seconds))
            self._usual.batch(self.fetch_seconds, self.fetch_seconds, 1)
        except At as failed:
            if not self._job.skip_errors or failed.__cause__ is None:
                raise
            self.skips.append((index, one_line(failed.__cause__)))
            raise NothingLeft from None
        return self._collator.collate_all(sample, room)

    def _fetch_each(self, indices: Sequence[Any], room: Room) -> object:
        self._collator.begin(room, len(indices))
        began = time.perf_counter()
        brisk = self._brisk and self.announce is None and not self._job.skip_errors
        if brisk:
            self._add_all(indices)
        else:
            self._add_each(indices, room)
        took = time.perf_counter() - began
        self._brisk = took < _BRISK_SECONDS * len(indices)
        if brisk:
            self.fetch_seconds = took
        return self._collator.finish()

    def _add_all(self, indices: Sequence[Any]) -> None:
        """Samples that take microseconds are not timed one by one: that would take as long."""
        dataset = self._job.dataset
        collator = self._collator
        todo = iter(indices)
        index = None
        try:
            for index in islice(todo, 1):
                collator.add(dataset[index])
            add = collator.add  # another one, once the first sample was seen
            for index in todo:
                add(dataset[index])
        except Exception as error:
            raise At(index) from error

    def _add_each(self, indices: Sequence[Any], room: Room) -> None:
        dataset = self._job.dataset
        clock = time.perf_counter
        limit = self._usual.limit
        worst = total = 0.0
        worst_index: Any = None
        count = 0
        for index in indices:
            began = clock()
            try:
                sample = dataset[index]
            except Exception as error:
                if not self._job.skip_errors:
                    raise At(index) from error
                self.skips.append((index, one_line(error)))
                continue
            took = clock() - began
            total += took
            if took > worst:
                worst, worst_index = took, index
                if took > limit:
                    self.slow.append((index, took))
            elif took > limit:
                self.slow.append((index, took))
            self._collator.add(sample)
            count += 1
            if self.announce is not None:
                self.announce(room)
                self.announce = None
        self.fetch_seconds = total
        self.slowest = (worst_index, worst)
        self._usual.batch(total, worst, count)
        if not count and self.skips:
            raise NothingLeft

    def _fetch_many(self, many: Callable[[Any], Any], indices: Any, room: Room) -> object:
        try:
            samples = self._timed(many, indices)
        except At as failed:
            if not self._job.skip_errors:
                raise
            del failed
            samples = []
            for index in indices:
                try:
                    samples.extend(many([index]))
                except Exception as error:
                    self.skips.append((index, one_line(error)))
            if not samples:
                raise NothingLeft from None
        return self._collator.collate_all(samples, room)

    def _fetch_iterable(self, index: Any, room: Room) -> object:
        if self._ended:
            raise StopIteration
        if not self._job.batched:
            return self._collator.collate_all(self._next_sample(), room)
        wanted = len(index)
        count = 0
        self._collator.begin(room, wanted)
        for _ in range(wanted):
            try:
                self._collator.add(self._next_sample())
            except StopIteration:
                self._ended = True
                break
            count += 1
        if not count or (self._job.drop_last and count < wanted):
            raise StopIteration
        return self._collator.finish()

    def _next_sample(self) -> object:
        assert self._iterator is not None
        while True:
            began = time.perf_counter()
            try:
                return next(self._iterator)
            except StopIteration:
                raise
            except Exception as error:
                if not self._job.skip_errors:
                    raise
                self.skips.append((None, one_line(error)))
            finally:
                self.fetch_seconds += time.perf_counter() - began

    def _one(self, index: Any) -> Any:
        return self._job.dataset[index]

    def _timed(self, call: Callable[[Any], Any], index: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(index)
        except Exception as error:
            raise At(index) from error
        finally:
            self.fetch_seconds = time.perf_counter() - began
            self.slowest = (index, self.fetch_seconds)


class At(Exception):
    """Carries the index beside the dataset's own exception (its ``__cause__``)."""

    def __init__(self, index: Any) -> None:
        self.index = index


class NothingLeft(Exception):
    """Every sample of the batch was skipped."""


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def wrap_exception(error: Exception, worker: str) -> ExceptionWrapper:
    """torch's own wrapper (type and traceback kept), with the index that failed named."""
    where = f"in DataLoader worker {worker}"
    if isinstance(error, At) and error.__cause__ is not None:
        shown = repr(error.index)
        where += f", index {shown if len(shown) <= 200 else shown[:200] + '...'}"
        error = error.__cause__  # type: ignore[assignment]
    wrapper = ExceptionWrapper((type(error), error, error.__traceback__), where=where)
    try:
        pickle.dumps(wrapper)
    except Exception:  # a class that can't travel: keep its text
        wrapper.exc_msg = f"{type(error).__name__} (not picklable): {wrapper.exc_msg}"
        wrapper.exc_type = RuntimeError
    return wrapper
