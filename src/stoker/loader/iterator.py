"""Iterators that torch's DataLoader machinery knows: draws indices as torch does, delivers ours.

``EngineIter`` feeds an ``Engine`` and hands out its batches; ``MainIter`` is ``num_workers=0``.
Order of random draws, warnings and attribute names are torch's: clients depend on them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

from stoker.errors import WorkerError
from stoker.loader.datapipes import sharding_init_fn
from stoker.loader.draws import Draws, draws_own_stream
from stoker.loader.engine import Engine, Nothing, Terms, Unsendable, log
from stoker.loader.fetch import (
    Fetcher,
    Job,
    NothingLeft,
    heap_room,
    own_random_state,
    position_seed,
    wrap_exception,
)
from stoker.loader.lookahead import REACH, LookAhead
from stoker.loader.pin import AHEAD, Pinner
from stoker.loader.pool import WorkerHandle
from stoker.loader.requests import Request
from stoker.loader.stats import Counters
from stoker.plan.knobs import Knobs
from stoker.timeline import TRAINER

if TYPE_CHECKING:
    from stoker.loader.dataloader import DataLoader

_PID_SECONDS = 10.0
_ASK_AGAIN_SECONDS = 0.02


def _job_of(iterator: _BaseDataLoaderIter, loader: DataLoader[Any]) -> Job:
    """What torch's base class has read out of the loader, for whoever loads."""
    return Job(
        dataset=iterator._dataset,
        iterable=bool(iterator._dataset_kind),
        batched=iterator._auto_collation,
        collate_fn=iterator._collate_fn,
        drop_last=iterator._drop_last,
        base_seed=int(iterator._base_seed),
        worker_init_fn=sharding_init_fn(
            iterator._dataset, loader.worker_init_fn, iterator._world_size, iterator._rank
        ),
        num_workers=iterator._num_workers,
        shared_seed=iterator._shared_seed,
        skip_errors=loader.on_error == "skip",
        tight=False,
    )


class EngineIter(_BaseDataLoaderIter):
    """One pass (or, with persistent workers, several) over the dataset, by workers."""

    _warned = False
    _ending = False
    # Held here: when the last iterators go, at the very end, this module's names are gone already.
    _is_finalizing = staticmethod(sys.is_finalizing)

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._shutdown = True  # until there is something to shut down: __del__ may come early
        super().__init__(loader)
        if loader.prefetch_factor is None or loader.prefetch_factor <= 0:
            raise AssertionError("prefetch_factor must be greater than 0 to load with workers")
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self._pinner: Pinner | None = None
        self._epoch = 0
        self._position = 0
        self._pending: dict[int, Any] = {}
        self._exhausted = False
        self._torn = False
        """``_start_afresh`` was begun and not finished."""
        self._held: dict[int, Any] = {}
        """By thread, a batch between engine and caller: an interruption must not lose it."""
        self._requests: deque[Request] = deque()
        self._resizing = threading.RLock()
        """Held by a thread that resizes by itself, and to shut down: __del__ runs beside it, as a
        weak reference still gives out an object whose __del__ runs."""
        job = _job_of(self, loader)
        terms = loader._terms(job)
        self._job = replace(job, tight=terms.cautious)
        self._builder = loader._builder()
        self._known_slow = self._builder.counters.costs.known
        self._any_early = False
        self._engine = self._build(terms)
        self._shutdown = False
        try:
            self._engine.start()
            if self._pin_memory:
                self._pinner = Pinner(self._pin_memory_device)
            # As torch: with workers the sampler is asked for an iterator twice, and the first is
            # dropped. A sampler that draws when it is asked shows the difference.
            super()._reset(loader, first_iter=True)
            self._draw_first()
        except BaseException:
            self._shutdown_workers()
            raise

    def _build(self, terms: Terms) -> Engine:
        engine = self._builder.build(terms, self._job)
        engine.requests = self._requests  # asked of the iterator, whichever engine it has
        return engine

    # ---- drawing, on torch's schedule: a window at the start, then one a batch

    def _draw_first(self) -> None:
        draws = Draws(self._index_sampler, self._sampler_iter)
        reach = REACH if draws_own_stream(self._index_sampler) else 0
        self._look = LookAhead(draws.draw, self._builder.counters.costs, reach)
        self._fill_window()

    def _fill_window(self) -> None:
        self._engine.widened = False
        while self._draw():
            pass

    def _draw(self) -> bool:
        if self._exhausted or not self._engine.accepting:
            return False
        position = self._position
        if self._any_early:
            while position in self._pending:  # what was started early is passed over
                position += 1
        if self._known_slow and self._draw_early(position):
            return True
        try:
            index = self._look.index(position)
        except StopIteration:
            self._exhausted = True
            return False
        self._engine.suspect = True  # until it is submitted
        self._pending[position] = index
        self._position = position + 1
        self._engine.submit(position, index)
        return True

    def _draw_early(self, position: int) -> bool:
        """Submit a batch that is known to be slow before the next in line, if it is time."""
        engine = self._engine
        room = engine.early_room and not engine.headless
        found = self._look.slow_one(position, self._pending, time.monotonic(), room=room)
        if found is None:
            return False
        early, index = found
        engine.suspect = self._any_early = True  # suspect until it is submitted
        self._pending[early] = index
        engine.submit(early, index, early - position)
        return True

    # ---- torch's interface

    def __next__(self) -> Any:
        thread = threading.get_ident()
        if not self._dataset_kind and not torch._C._autograd._profiler_enabled():
            batch = self._next_data()
            self._num_yielded += 1
        else:  # with torch's mark for its profiler (12 us), and its warning on lengths
            batch = super().__next__()
        del self._held[thread]  # no call: from here to the caller's loop Python handles no signal
        return batch

    def _next_data(self) -> Any:
        if self._owner != os.getpid():
            raise RuntimeError(
                "this iterator belongs to the process that made it, not to a forked child: "
                "iterate over the loader anew"
            )
        with self._lock:
            if self._shutdown:
                raise StopIteration
            if self._torn or self._engine.suspect:
                self._go_on_after_interruption()
            try:
                return self._next_batch()
            except StopIteration:
                pass
            if not self._persistent_workers:
                self._shutdown_workers()
            raise StopIteration

    def _next_batch(self) -> Any:
        thread = threading.get_ident()
        while True:
            if self._engine.widened:
                self._fill_window()
            batch = self._held[thread] if thread in self._held else self._take(thread)
            self._draw()
            if batch is Nothing:
                del self._held[thread]
                continue
            if isinstance(batch, ExceptionWrapper):
                del self._held[thread]
                batch.reraise()
            if isinstance(batch, WorkerError):
                del self._held[thread]
                raise batch
            self._builder.counters.delivered += 1
            return batch

    def _take(self, thread: int) -> Any:
        if self._pinner is None:
            position, batch = self._take_one()
            self._held[thread] = batch  # from here on no call: see __next__
            if position >= self._position:  # started early: it must not be drawn again
                self._position = position + 1
            del self._pending[position]
            return batch
        if not self._pinner.pending:
            self._pin_one()
        while self._pinner.pending < AHEAD and self._engine.has_next():
            self._pin_one()
        batch = self._held[thread] = self._pinner.get()
        return batch

    def _pin_one(self) -> None:
        assert self._pinner is not None
        position, batch = self._take_one()
        self._pinner.put(batch)
        if position >= self._position:
            self._position = position + 1
        del self._pending[position]

    def _take_one(self) -> tuple[int, Any]:
        if self._any_early and self._engine.headless:
            self._draw()
        taken = self._engine.take()
        if isinstance(taken.batch, Unsendable):
            return taken.position, self._load_here(taken.position, taken.batch)
        return taken.position, taken.batch

    def _load_here(self, position: int, unsendable: Unsendable) -> Any:
        """Load a batch that can't be sent between processes; slow, but training goes on."""
        if not self._warned:
            self._warned = True
            log.warning(
                "batches of this loader can't be sent between processes, so they are loaded in "
                "the trainer (num_workers=0 would save the detour): %s",
                unsendable.error.exc_msg.strip().splitlines()[-1],
            )
        with own_random_state(position_seed(self._job.base_seed, self._epoch, position)):
            try:
                return Fetcher(self._job).fetch(unsendable.payload, heap_room())
            except Exception as error:
                return wrap_exception(error, "fallback in the main process")

    def _go_on_after_interruption(self) -> None:
        if self._job.iterable:
            raise RuntimeError(
                "iterating over an IterableDataset was interrupted and its position is lost: "
                "start a new iteration"
            )
        self._start_afresh()

    def _start_afresh(self, terms: Terms | None = None) -> None:
        """New workers, on the terms that were applied last; the same undelivered batches."""
        self._torn = True
        former = self._engine
        former.close()
        self._engine = self._build(former.terms if terms is None else terms)
        self._engine.wished = former.wished if terms is None else None
        self._engine.start()
        if self._epoch:
            self._engine.new_epoch(self._epoch, self._shared_seed)
        line = self._position
        for position, index in sorted(self._pending.items()):
            self._engine.submit(position, index, max(0, position - line))
            if position == line:
                line += 1
        self._torn = False

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        """A new epoch with the same workers, if they are ours and can go on."""
        forked = self._owner != os.getpid()
        if forked:
            self._lock = threading.RLock()  # the old one may be held by a thread we don't have
            self._resizing = threading.RLock()
            self._owner = os.getpid()
        with self._lock:
            super()._reset(loader, first_iter)
            self._epoch += 1
            self._position = 0
            self._pending = {}
            self._held = {}
            self._exhausted = False
            if self._pinner is not None:
                self._pinner.clear()
            wished = self._engine.wished
            if wished is not None:
                # Workers have identities here, which could not be changed in mid-epoch.
                self._job = replace(self._job, num_workers=loader.num_workers)
                self._num_workers = loader.num_workers
                self._start_afresh(loader._terms(self._job))
            elif forked or self._torn or self._engine.suspect or self._engine.failed:
                self._start_afresh()
            self._engine.new_epoch(self._epoch, self._shared_seed)
            self._draw_first()

    def _is_over(self) -> bool:
        return self._shutdown or self._ending or self._owner != os.getpid()

    def _apply(self, knobs: Knobs) -> Knobs | None:
        """Change the knobs in mid-epoch, from any thread; what was achieved, None if it is over.

        Whoever waits in ``next()`` has the lock, but nothing else to do: it is woken and carries
        out what is asked. If nobody does, this thread has the lock and does it itself.
        """
        request = Request(knobs)
        self._requests.append(request)
        while request.achieved is None:
            if self._is_over():
                return None
            if not self._lock.acquire(blocking=False):
                self._engine.wake()
                request.wait(_ASK_AGAIN_SECONDS)
                continue
            try:
                with self._resizing:
                    if self._is_over():
                        return None
                    if self._torn or self._engine.suspect or self._engine.waiting:
                        # Interrupted in the middle of a change, or asked from inside next() by a
                        # signal handler: next() carries it out when it gets on.
                        self._engine.wake()
                        return self._engine.knobs
                    self._engine.has_next()  # answers requests
            finally:
                self._lock.release()
        return request.achieved

    @property
    def _workers(self) -> list[Any]:
        """Handles with a pid, as torch has them at once: here the zygote says it a moment later."""
        deadline = time.monotonic() + _PID_SECONDS
        while (
            any(isinstance(h, WorkerHandle) and h.pid is None for h in self._engine.handles)
            and not self._shutdown
            and self._owner == os.getpid()
            and time.monotonic() < deadline
        ):
            with self._lock:
                self._engine.has_next()  # collects what the zygote has said
            time.sleep(0.001)
        return self._engine.handles

    @property
    def _pin_memory_thread(self) -> threading.Thread:
        if self._pinner is None:
            raise AttributeError("_pin_memory_thread")
        return self._pinner.thread

    def _shutdown_workers(self) -> None:
        if self._shutdown or self._is_finalizing():
            return  # at exit multiprocessing ends the host process, and that its workers
        mine = self._owner == os.getpid()
        self._ending = True  # nobody begins to resize any more
        try:
            if self._pinner is not None and mine:
                self._pinner.close()
        finally:
            with self._resizing if mine else contextlib.nullcontext():
                self._engine.close()
        self._shutdown = True  # at last: what was interrupted can be called again

    def __del__(self) -> None:
        self._shutdown_workers()


class MainIter(_SingleProcessDataLoaderIter):
    """``num_workers=0``: torch's own iterator, with figures and ``on_error``."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        self._counters: Counters = loader._counters
        self._skipping = Fetcher(_job_of(self, loader)) if loader.on_error == "skip" else None

    def _next_data(self) -> Any:
        while True:
            index = next(self._sampler_iter)
            began_ns = time.monotonic_ns()
            try:
                data = self._load(index)
            except NothingLeft:
                continue
            ended_ns = time.monotonic_ns()
            took = (ended_ns - began_ns) / 1e9
            self._counters.timeline.add("fetch", TRAINER, self._num_yielded, began_ns, ended_ns)
            self._counters.delivered += 1
            self._counters.wait_seconds += took
            self._counters.batch(took, 0.0)
            return self._pinned(data)

    def _load(self, index: Any) -> Any:
        if self._skipping is None:
            return self._dataset_fetcher.fetch(index)
        try:
            return self._skipping.fetch(index, heap_room())
        finally:
            for skipped in self._skipping.skips:
                self._counters.skip(*skipped)

    def _pinned(self, data: Any) -> Any:
        if not self._pin_memory:
            return data
        from torch.utils.data._utils.pin_memory import pin_memory

        return pin_memory(data, self._pin_memory_device)
