"""The iterator that torch's DataLoader machinery knows: draws indices as torch does, delivers ours.

``EngineIter`` feeds an ``Engine`` and hands out its batches.
Order of random draws, warnings and attribute names are torch's: clients depend on them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data.dataloader import _BaseDataLoaderIter

from stoker.errors import WorkerError
from stoker.loader.ahead import Ahead
from stoker.loader.draws import Draws, draws_own_stream, foretells, inner_sampler
from stoker.loader.engine import Engine, log
from stoker.loader.fetch import (
    Fetcher,
    NothingLeft,
    heap_room,
    own_random_state,
    position_seed,
    wrap_exception,
)
from stoker.loader.handle import WorkerHandle
from stoker.loader.lookahead import REACH, LookAhead
from stoker.loader.outset import draw_again, job_of, progress_of, restore_dataset, stands_of
from stoker.loader.pin import AHEAD, Pinner
from stoker.loader.replay import (
    SAMPLER,
    SEED,
    Start,
    replaying,
    sampler_epochs,
    sampler_states,
    stateful_samplers,
)
from stoker.loader.requests import Request
from stoker.loader.state import LoaderState
from stoker.loader.terms import Nothing, Terms, Unsendable
from stoker.plan.knobs import Knobs

if TYPE_CHECKING:
    from stoker.loader.dataloader import DataLoader

_PID_SECONDS = 10.0
_ASK_AGAIN_SECONDS = 0.02
_DRAWS = (SAMPLER, SEED, SAMPLER)


class EngineIter(_BaseDataLoaderIter):
    """One pass (or, with persistent workers, several) over the dataset, by workers."""

    _warned = False
    _ending = False
    # Held here: when the last iterators go, at the very end, this module's names are gone already.
    _is_finalizing = staticmethod(sys.is_finalizing)

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._shutdown = True  # until there is something to shut down: __del__ may come early
        resumed = loader._loaded
        start = Start(loader)
        with replaying(resumed):
            self._begin(loader, resumed, start)
        loader._loaded = None  # not before: what could not start can be tried again

    def _begin(self, loader: DataLoader[Any], resumed: LoaderState | None, start: Start) -> None:
        super().__init__(loader)
        if loader.prefetch_factor is None or loader.prefetch_factor <= 0:
            raise AssertionError("prefetch_factor must be greater than 0 to load with workers")
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self._pinner: Pinner | None = None
        """Position and origin of what the pinner has, oldest first."""
        self._epoch = 0
        self._position = 0
        self._pending: dict[int, Any] = {}
        self._exhausted = False
        self._torn = False
        """``_start_afresh`` was begun and not finished."""
        self._held: dict[int, Any] = {}
        """By thread, a batch between engine and caller: an interruption must not lose it.

        With its position and, of an iterable dataset, its origin.
        """
        self._requests: deque[Request] = deque()
        self._resizing = threading.RLock()
        """Held by a thread that resizes by itself, and to shut down: __del__ runs beside it, as a
        weak reference still gives out an object whose __del__ runs."""
        self._stateful = stateful_samplers(loader)
        self._loader = weakref.ref(loader)
        self._looks_ahead = loader.prefetch_next_epoch and self._may_look_ahead()
        self._ahead: Ahead | None = None
        self._last_epochs: dict[str, int] = {}
        self._already: frozenset[int] = frozenset()
        """Positions ahead that were delivered before a resume."""
        if resumed is not None:
            restore_dataset(loader, resumed)  # first: it may set a global generator
            draw_again(self, loader, resumed, _DRAWS)
            self._epoch = resumed.epoch
            self._already = frozenset(resumed.beyond)
        lasting = self._persistent_workers or loader._actual_kind() == "thread"
        self._progress = progress_of(self, loader, resumed, start, _DRAWS, lasting=lasting)
        self._progress.held = self._held
        job = job_of(self, loader)
        if resumed is not None and job.iterable:
            job = replace(job, stands=stands_of(self._index_sampler, resumed))
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
            if resumed is None:
                super()._reset(loader, first_iter=True)
            self._progress.ended = self._engine.ended
            if resumed is not None:
                self._go_on(resumed)
            self._draw_first(resumed)
        except BaseException:
            self._shutdown_workers()
            raise

    def _build(self, terms: Terms) -> Engine:
        engine = self._builder.build(terms, self._job)
        engine.requests = self._requests  # asked of the iterator, whichever engine it has
        return engine

    # ---- drawing, on torch's schedule: a window at the start, then one a batch

    def _go_on(self, resumed: LoaderState) -> None:
        over = [int(worker) for worker, found in resumed.workers.items() if found.get("ended")]
        turn = resumed.turn if self._job.iterable else resumed.delivered
        self._engine.go_on_at(turn, frozenset(over))

    def _draw_first(self, resumed: LoaderState | None = None) -> None:
        done = resumed.delivered if resumed is not None else 0
        if resumed is not None and (self._job.iterable or resumed.sampler_states):
            self._position = done  # the sampler stands there already
            self._draws = Draws(self._index_sampler, self._sampler_iter, done)
        else:
            self._draws = Draws(self._index_sampler, self._sampler_iter)
            self._skip_to(done)
        self._look_out()
        self._fill_window()

    def _look_out(self) -> None:
        """For slow batches, from where the draws stand."""
        reach = REACH if draws_own_stream(self._index_sampler) and not self._already else 0
        self._look = LookAhead(self._draws.draw, self._builder.counters.costs, reach)
        self._any_early = False

    def _fill_window(self) -> None:
        self._engine.widened = False
        while self._draw():
            pass

    def _draw(self) -> bool:
        if self._exhausted:
            return self._looks_ahead and self._draw_ahead()
        if not self._engine.accepting:
            return False
        position = self._position
        if self._any_early:
            while position in self._pending:  # what was started early is passed over
                position += 1
        if self._known_slow and self._draw_early(position):
            return True
        try:
            index = self._look.index(position)
            if self._stateful:
                self._progress.drew(position, sampler_states(self._stateful))
            while position in self._already:
                position = self._position = position + 1
                index = self._look.index(position)
                if self._stateful:
                    self._progress.drew(position, sampler_states(self._stateful))
        except StopIteration:
            self._exhausted = True
            return False
        self._engine.suspect = True  # until it is submitted
        self._pending[position] = index
        self._position = position + 1
        self._engine.submit(self._epoch, position, index)
        return True

    def _may_look_ahead(self) -> bool:
        if foretells(self._index_sampler):
            return True
        log.warning(
            "prefetch_next_epoch has no effect: the order that %s gives next may depend on the "
            "trainer's random stream. Give it a generator of its own, or, if it draws from none, "
            "let its class say draws_own_stream = True",
            type(inner_sampler(self._index_sampler)).__name__,
        )
        return False

    def _draw_ahead(self) -> bool:
        """The same for the coming epoch, once this one has been drawn."""
        loader = self._loader()
        if loader is None or not self._engine.accepting:
            return False
        try:
            if self._ahead is None:
                self._ahead = self._progress.coming = Ahead(loader, self._last_epochs)
                self._engine.go_on_at(0)
            ahead = self._ahead
            if ahead.exhausted:
                return False
            position = ahead.position
            index = ahead.draw()
        except StopIteration:
            ahead.exhausted = True
            return False
        except Exception:
            # It is no business of this epoch: the next one draws anew, and will raise.
            if self._ahead is not None:
                self._ahead.failed = True
            self._looks_ahead = False
            return False
        if self._stateful:
            ahead.after[position] = sampler_states(self._stateful)
        self._engine.suspect = True
        ahead.pending[position] = index
        ahead.position = position + 1
        self._engine.submit(self._epoch + 1, position, index)
        return True

    def _adopt(self, loader: DataLoader[Any]) -> bool:
        """Begin the epoch that was drawn already; False if drawing it now would give another."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return False
        if not ahead.is_right(loader) or self._engine.wished is not None:
            ahead.take_back()
            return False
        left = bool(self._pending or self._held)
        if self._pinner is not None:
            left = left or self._pinner.pending > 0
            self._pinner.clear()
        self._last_epochs = self._progress.sampler_epochs
        self._progress.next_epoch(ahead.start, epochs=sampler_epochs(loader))
        for position, states in ahead.after.items():
            self._progress.drew(position, states)
        loader._progress = self._progress
        self._held = self._progress.held
        self._pending = ahead.pending
        self._sampler_iter = ahead.drawing
        self._draws = ahead.draws
        self._position = ahead.position
        self._exhausted = ahead.exhausted
        self._already = frozenset()
        self._look_out()
        self._epoch += 1
        self._num_yielded = 0
        if self._torn or self._engine.suspect or self._engine.failed:
            self._start_afresh()
        elif left:  # the epoch before was left early: what it had under way goes first
            self._engine.new_epoch(self._shared_seed)
            for position, index in self._pending.items():
                self._engine.submit(self._epoch, position, index)
        self._fill_window()
        return True

    def _skip_to(self, position: int) -> None:
        """Draw what was delivered before a resume: indices, not data."""
        try:
            for self._position in range(position):
                self._draws.draw(self._position)
        except StopIteration:
            self._exhausted = True
        self._position = position

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
        engine.submit(self._epoch, early, index, early - position)
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
            if self._ending:  # and was interrupted
                self._shutdown_workers()
                raise StopIteration
            if self._torn or self._engine.suspect:
                self._go_on_after_interruption()
            try:
                return self._next_batch()
            except StopIteration:
                pass
            self._progress.finish()
            if not self._persistent_workers:
                self._shutdown_workers()
            raise StopIteration

    def _next_batch(self) -> Any:
        thread = threading.get_ident()
        while True:
            if self._engine.widened:
                self._fill_window()
            position, batch, origin = self._held.get(thread) or self._take(thread)
            self._draw()
            self._progress.mark(position, origin)
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

    def _take(self, thread: int) -> tuple[int, Any, Any]:
        if self._pinner is None:
            taken = self._held[thread] = self._take_one()  # from here on no call: see __next__
            if taken[0] >= self._position:  # started early: it must not be drawn again
                self._position = taken[0] + 1
            del self._pending[taken[0]]
            return taken
        return self._take_pinned(thread, self._pinner)

    def _take_pinned(self, thread: int, pinner: Pinner) -> tuple[int, Any, Any]:
        """The next batch, by way of the pinner.

        Between engine, pinner and caller an interruption could lose a batch, or count it twice.
        So a batch is pending until the caller has it, and what was torn is loaded again.
        """
        self._torn = True
        try:
            if not pinner.pending:
                self._pin_one(pinner)
            while pinner.pending < AHEAD and self._engine.has_next():
                if self._ahead is not None and len(self._pending) <= pinner.pending:
                    break  # what the engine has belongs to the coming epoch
                self._pin_one(pinner)
            position, origin, batch = pinner.get()
            while position not in self._pending:  # the caller has it: put twice
                position, origin, batch = pinner.get()
        except (StopIteration, WorkerError):
            self._torn = False
            raise
        except Exception:
            self._torn = not self._engine.failed  # then it will raise again, and rightly so
            raise
        taken = self._held[thread] = (position, batch, origin)  # no call until the end
        del self._pending[position]
        self._torn = False
        return taken

    def _pin_one(self, pinner: Pinner) -> None:
        position, batch, origin = self._take_one()
        if position >= self._position:
            self._position = position + 1
        pinner.put(position, origin, batch)

    def _take_one(self) -> tuple[int, Any, Any]:
        if self._ahead is not None and not self._pending:
            raise StopIteration  # what is left belongs to the coming epoch
        if self._any_early and self._engine.headless:
            self._draw()
        taken = self._engine.take()
        if taken.batch.__class__ is Unsendable:  # no call: nobody has the batch yet
            self._engine.suspect = True  # nobody has it until it is loaded
            batch = self._load_here(taken.position, taken.batch)
            self._engine.suspect = False
            return taken.position, batch, taken.origin
        return taken

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
            except NothingLeft:
                return Nothing
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
        if self._pinner is not None:
            self._pinner.clear()  # what is in it is pending still
        former = self._engine
        former.close()
        self._engine = self._build(former.terms if terms is None else terms)
        self._engine.wished = former.wished if terms is None else None
        self._engine.start()
        self._progress.ended = self._engine.ended
        if self._epoch:
            self._engine.new_epoch(self._shared_seed)
        line = self._position
        for position, index in sorted(self._pending.items()):
            self._engine.submit(self._epoch, position, index, max(0, position - line))
            if position == line:
                line += 1
        if self._ahead is not None:
            self._engine.go_on_at(0)
            for position, index in self._ahead.pending.items():
                self._engine.submit(self._epoch + 1, position, index)
        self._torn = False

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        """A new epoch with the same workers, if they are ours and can go on."""
        forked = self._owner != os.getpid()
        if forked:
            self._lock = threading.RLock()  # the old one may be held by a thread we don't have
            self._resizing = threading.RLock()
            self._owner = os.getpid()
        with self._lock:
            if forked and self._ahead is not None:
                self._ahead.take_back()
                self._ahead = None
            if self._adopt(loader):
                return
            start = Start(loader)
            super()._reset(loader, first_iter)
            self._last_epochs = self._progress.sampler_epochs
            self._progress.next_epoch(start)
            loader._progress = self._progress
            self._epoch += 1
            self._position = 0
            self._pending = {}
            self._held = self._progress.held
            self._already = frozenset()
            self._exhausted = False
            self._job = replace(self._job, stands=None)  # those of a resumed epoch
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
            self._engine.new_epoch(self._shared_seed)
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
                if self._torn or self._engine.suspect:
                    break  # next() will start afresh
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
