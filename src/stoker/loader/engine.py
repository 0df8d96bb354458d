"""Runs one iterator's loading: carries out what ``dispatch`` decides, with a pool and an arena.

The engine owns arena, pool and state machine; it knows batches by number and payload, not
samplers, epochs of a framework, or torch's DataLoader (see ``iterator``).
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import time
from collections import Counter, deque
from dataclasses import replace
from typing import Any

from torch._utils import ExceptionWrapper

from stoker.errors import WorkerError, WorkerLost
from stoker.loader.arena import Arena
from stoker.loader.codec import decode
from stoker.loader.dispatch import MAX_STRIKES, Dispatch
from stoker.loader.extents import Extent
from stoker.loader.mishaps import (
    LOST_POSITION,
    could_not_start,
    end_of_worker,
    how_it_ended,
    process_state,
)
from stoker.loader.pool import Event, HostDied
from stoker.loader.requests import Request
from stoker.loader.stats import Counters
from stoker.loader.streams import Saved
from stoker.loader.tasks import (
    Assign,
    Command,
    Delivery,
    GiveBack,
    Grant,
    How,
    Recall,
    Retire,
    Spawn,
    State,
    Task,
)
from stoker.loader.terms import Crew, Nothing, Taken, Terms, Timed, Unsendable
from stoker.loader.wire import Kind
from stoker.loader.worker import Report
from stoker.machine.limits import oom_kills
from stoker.plan.knobs import Knobs
from stoker.timeline import TRAINER, worker_lane
from stoker.units import format_bytes

log = logging.getLogger("stoker.loader")

POLL_SECONDS = 0.5
BRISK_SECONDS = 1e-3
"""Batches that load in less are given out several at once: being woken for each takes longer."""
CHECK_SECONDS = 2.0
REPORT_AFTER_SECONDS = 30.0
"""Without a ``timeout`` a worker that keeps the trainer waiting this long is reported."""
CAUTIOUS_SECONDS = 2.0
MAX_HOST_DEATHS = 3
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
"""What the system says when it has no descriptors, processes or memory left."""
_PRIVATE_SHARE = 0.85
_TASK, _DONE = int(Kind.TASK), int(Kind.DONE)
"""Of every batch: an enum's member takes longer to look up, and to pickle."""


class Engine:
    """Submit payloads, take batches. Belongs to one thread at a time."""

    def __init__(self, terms: Terms, arena: Arena, crew: Crew, counters: Counters) -> None:
        self._terms = terms
        self._arena = arena
        self._crew = crew
        self._counters = counters
        self._timeline = counters.timeline
        self._known_slow = counters.costs.known
        self._dispatch = self._new_dispatch()
        self.requests: deque[Request] = deque()
        """What other threads ask for; they append and call ``wake``."""
        self.wished: int | None = None
        """A number of workers that can't be had now, but perhaps later."""
        self.waiting = False
        """A thread waits in ``take``."""
        self.widened = False
        """The window has grown: it can be filled, by who draws."""
        self._added: set[int] = set()
        self._epoch: tuple[int | None] | None = None
        self.suspect = False
        """An exception (Ctrl-C) came in the middle of a change of state: start afresh.

        Set before anything changes, taken back when all is well: an interruption may come between
        any two steps.
        """
        self._private: dict[int, int] = {}
        self._ends: dict[int, tuple[int, int, int | None]] = {}  # seq -> worker, pid, status
        self._timed_out: set[int] = set()
        self._unready_deaths: Counter[int] = Counter()
        self._host_deaths = 0
        self._oom_kills = oom_kills()
        self._opened_at = time.monotonic()
        self._fatal: WorkerError | ExceptionWrapper | None = None
        self._closed = False
        # Of an iterable dataset, in this epoch:
        self._origins: dict[int, tuple[int, Saved]] = {}  # by batch
        self._finished: Counter[int] = Counter()  # batches by worker
        self.ended: dict[int, tuple[int, Saved]] = {}
        """By worker whose share is over: after how many batches, and where it stood then."""

    def _new_dispatch(self) -> Dispatch:
        terms = self._terms
        return Dispatch(
            workers=terms.workers,
            budget=self._arena.nbytes,
            window=terms.window,
            ahead=terms.ahead,
            in_order=terms.in_order,
            pinned=terms.pinned,
            cautious=terms.cautious,
            region=self._arena.region_bytes,
        )

    def start(self) -> None:
        """Start the workers."""
        self.suspect = True
        try:
            self._crew.start()
            for worker in range(self._terms.workers):
                self._crew.spawn(worker)
        except OSError as error:
            if error.errno in _SCARCE:
                raise could_not_start(str(error)) from error
            raise
        self.suspect = False

    # ---- what the iterator does

    @property
    def outstanding(self) -> int:
        """Batches submitted and not yet taken."""
        return self._dispatch.outstanding

    @property
    def accepting(self) -> bool:
        """May another batch be submitted now?"""
        dispatch = self._dispatch
        return (dispatch.outstanding < self._terms.window or self.headless) and dispatch.any_active

    @property
    def headless(self) -> bool:
        """Is it nobody's turn: were all that are outstanding started early, or are there none?"""
        return self._dispatch.head_task() is None

    @property
    def early_room(self) -> bool:
        """May a batch be submitted before its turn?"""
        return self._dispatch.early_room

    def submit(self, epoch: int, position: int, payload: object, ahead: int = 0) -> None:
        """Queue a batch of indices; its random draws are those of its epoch and position.

        With ``ahead`` it is not the next in line but so many places further on.
        """
        self.suspect = True
        self._counters.early_batches += ahead > 0
        commands = self._dispatch.submit((epoch, position, payload), ahead)
        if commands:
            self._act(commands)
        self.suspect = False

    def take(self) -> Taken:
        """The next batch. Raises StopIteration when nothing is outstanding."""
        self.suspect = True
        try:
            taken = self._take()
        except (StopIteration, WorkerError):
            self.suspect = False
            raise
        self.suspect = False
        return taken

    def _take(self) -> Taken:
        self._raise_fatal()
        asked_ns = time.monotonic_ns()
        waited_from = asked_ns / 1e9
        report_at = waited_from + REPORT_AFTER_SECONDS
        check_at = waited_from + CHECK_SECONDS
        self._collect()
        while True:
            delivery = self._dispatch.deliver()
            if delivery is not None:
                return self._hand_over(delivery, asked_ns)
            if not self._dispatch.outstanding:
                raise StopIteration
            now = time.monotonic()
            timeout = POLL_SECONDS
            if self._terms.timeout > 0:
                left = waited_from + self._terms.timeout - now
                if left <= 0:
                    self._on_timeout()
                    waited_from = now
                    continue
                timeout = min(timeout, left)
            elif now >= report_at:
                self._report_stuck(now - waited_from)
                report_at = now + REPORT_AFTER_SECONDS
            if now >= check_at:
                self._crew.check()
                check_at = now + CHECK_SECONDS
            if self._dispatch.cautious:
                timeout = min(timeout, 0.05)
                if now - self._opened_at > CAUTIOUS_SECONDS:
                    self._act(self._dispatch.open_up())
            self._act(self._dispatch.starved())
            self.suspect = False  # nothing changes while we wait: Ctrl-C is welcome
            self.waiting = True
            try:
                self._crew.wait(timeout)
            finally:
                self.waiting = False
            self.suspect = True
            self._collect()
            self._raise_fatal()

    def _raise_fatal(self) -> None:
        if isinstance(self._fatal, ExceptionWrapper):
            self.suspect = False
            self._fatal.reraise()
        elif self._fatal is not None:
            raise self._fatal

    # ---- resizing

    @property
    def terms(self) -> Terms:
        """The present ones: what another engine would have to start with to go on."""
        return self._terms

    @property
    def knobs(self) -> Knobs:
        """The present ones; from any thread."""
        return Knobs(self._dispatch.active_limit, self._dispatch.budget)

    def wake(self) -> None:
        """Have a thread that waits in ``take`` look at ``requests``; from any thread."""
        self._crew.wake()

    def _answer_requests(self) -> None:
        while self.requests:
            request = self.requests[0]
            began_ns = time.monotonic_ns()
            achieved = self._resize(request.knobs)
            now_ns = time.monotonic_ns()
            self._timeline.add("resize", TRAINER, -1, began_ns, now_ns, self._dispatch.budget)
            self.requests.popleft()
            request.answer(achieved)

    def _resize(self, knobs: Knobs) -> Knobs:
        if self._fatal is not None or self._closed:
            return self.knobs
        if knobs.in_flight_bytes is not None:
            budget = self._arena.resize(knobs.in_flight_bytes)
            self._terms = replace(self._terms, budget_bytes=budget)
            self._act(self._dispatch.set_budget(budget))
            self._honour_private()
        if knobs.workers is not None:
            self.wished = knobs.workers
            self._grant_wish()
        return self.knobs

    def _grant_wish(self) -> None:
        """Change the number of workers, where no batch depends on who loads it."""
        terms, dispatch = self._terms, self._dispatch
        if self.wished is None or terms.pinned or dispatch.pinned:
            if self.wished == dispatch.active_limit:
                self.wished = None
            return
        workers = min(self.wished, self._fitting())
        if workers < self.wished:
            log.warning(
                "%d workers were asked for, but their private memory leaves room for %d",
                self.wished,
                workers,
            )
        self.wished = None
        window = terms.window // terms.workers * workers
        ahead = terms.ahead // terms.workers * workers
        self.widened = window > terms.window
        self._terms = replace(terms, workers=workers, window=window, ahead=ahead)
        self._added.update(range(dispatch.active_limit, workers))
        self._act(dispatch.set_active(workers, window, ahead))

    def _not_started(self, worker: int, cause: str) -> list[Command]:
        """A worker that was added later is done without; any other is an error."""
        dispatch = self._dispatch
        if dispatch.workers[worker].retired:  # nobody misses it; or was it wanted again?
            self._crew.forget(worker)
            return dispatch.left(worker)
        if worker < dispatch.active_limit:
            if worker not in self._added:
                self._fatal = could_not_start(f"worker {worker}: {cause}")
                return []
            log.warning("worker %d could not be started (%s): going on without", worker, cause)
        lowered = dispatch.limit_active(worker)
        return lowered + dispatch.died(worker, strike=False, respawn=False)

    def has_next(self) -> bool:
        """Can a batch be taken without waiting?"""
        self.suspect = True
        self._collect()
        self.suspect = False
        return self._dispatch.deliverable

    @property
    def failed(self) -> bool:
        """Is this the end: would every ``take`` raise?"""
        return self._fatal is not None

    def new_epoch(self, shared_seed: int | None) -> None:
        """Forget what was not taken; the workers go on with the next epoch."""
        self.suspect = True
        self._collect()
        self._act(self._dispatch.abandon())
        for state in self._dispatch.workers:
            if not state.retired:  # one that is started later is told then
                self._crew.send(state.id, Kind.EPOCH, shared_seed)
        self._dispatch.begin_epoch()
        self._origins.clear()
        self._finished.clear()
        self.ended.clear()
        self._epoch = (shared_seed,)
        self.suspect = False

    def go_on_at(self, turn: int, exhausted: frozenset[int] = frozenset()) -> None:
        """Before the first ``submit``: whose turn it is, and whose share is over already."""
        self._dispatch.go_on_at(turn, exhausted)

    def close(self) -> None:
        """End workers and give back all memory that the caller does not hold."""
        if self._closed:
            return
        self._note_peak()
        self._crew.close()
        self._arena.close()
        self._closed = True

    # ---- figures

    def _note_peak(self) -> None:
        counters = self._counters
        counters.arena_bytes = self._arena.nbytes
        counters.in_flight_peak_bytes = max(
            counters.in_flight_peak_bytes, self._dispatch.peak_bytes
        )

    @property
    def handles(self) -> list[Any]:
        """One handle per worker id."""
        return [handle for _, handle in sorted(self._crew.handles.copy().items())]

    @property
    def dispatch(self) -> Dispatch:
        """For figures only."""
        return self._dispatch

    @property
    def private_bytes(self) -> int:
        """Private memory of all workers, as last reported."""
        return sum(self._private.values())

    @property
    def arena(self) -> Arena:
        """For figures only."""
        return self._arena

    # ---- commands

    def _act(self, commands: list[Command]) -> None:
        while commands:
            more: list[Command] = []
            for command in commands:
                if type(command) is Assign:  # all but always
                    self._send_task(command.worker, command.task)
                elif isinstance(command, Grant):
                    start, size = _place(command.task.extent)
                    self._crew.send(command.worker, Kind.GRANT, command.task.seq, start, size)
                elif isinstance(command, Recall):
                    message = self._crew.recall(command.worker)
                    seq = None if message is None else message[1]
                    more += self._dispatch.recalled(command.worker, seq)
                elif isinstance(command, Spawn):
                    try:
                        self._crew.spawn(command.worker)
                    except (OSError, RuntimeError) as error:  # of processes, of threads
                        more += self._not_started(command.worker, str(error))
                        if self._fatal is not None:
                            return
                        continue
                    if self._epoch is not None:
                        self._crew.send(command.worker, Kind.EPOCH, *self._epoch)
                elif isinstance(command, Retire):
                    if self._dispatch.workers[command.worker].gone:
                        self._crew.forget(command.worker)
                    else:
                        self._crew.send(command.worker, Kind.EXIT)
                elif isinstance(command, GiveBack):
                    self._arena.give_back(command.extents)
            commands = more

    def _send_task(self, worker: int, task: Task) -> None:
        start, size = (0, 0) if task.asks else _place(task.extent)
        self._crew.send(worker, _TASK, task.seq, start, size, *_content(task))

    # ---- events

    def _collect(self) -> None:
        if self.requests:
            self._answer_requests()
        for start in self._arena.ended():
            commands = self._dispatch.release(start)
            if commands:
                self._act(commands)
        try:
            events = self._crew.collect()
        except HostDied as death:
            for event in death.events:
                self._handle(event)
            self._on_host_death(str(death))
            return
        for event in events:
            self._handle(event)

    def _handle(self, event: Event) -> None:
        kind = event.kind
        worker = event.worker
        if kind == _DONE:
            self._on_done(worker, event)
        elif kind == Kind.READY:
            self._unready_deaths.clear()
            self._act(self._dispatch.worker_ready(worker))
        elif kind == Kind.NEED:
            self._act(self._dispatch.need(worker, event.message[1], event.message[2]))
        elif kind == Kind.SIZED:
            self._note_private(worker, event.message[2])
            self._act(self._dispatch.sized(event.message[1]))
        elif kind == Kind.END:
            seq = event.message[1]
            if seq in self._dispatch.tasks:  # else it is an answer to a batch that is void
                self.ended.setdefault(worker, (self._finished[worker], event.message[2]))
            self._act(self._dispatch.exhausted(worker, seq))
        elif kind == Kind.EXITED:
            self._on_death(worker, event.message[2], event.message[3])
        elif kind == Kind.BROKEN:
            self._fatal = event.message[1]
        elif kind == Kind.SPAWN_FAILED:
            self._act(self._not_started(worker, event.message[2]))

    def _on_done(self, worker: int, event: Event) -> None:
        _, seq, values = event.message
        report = Report._make(values)
        if self._terms.iterable and seq in self._dispatch.tasks:
            self._finished[worker] += 1
            self._origins[seq] = (worker, report.stand)
        if report.private_bytes:
            self._note_private(worker, report.private_bytes)
        if report.looked_at_id:
            self._dispatch.pin()
        lease = None
        if event.fds:
            lease = self._arena.adopt(event.fds[0], report.used)
        elif event.memory is not None:
            lease = self._arena.adopt_memory(event.memory, report.used)
        if lease is not None:
            self._counters.overdraft_batches += 1
        self._host_deaths = 0
        if self._unready_deaths:
            self._unready_deaths.clear()  # loading gets on
        task = self._dispatch.tasks.get(seq)
        if task is not None and report.began_ns:  # else nobody's any more, or not even begun
            self._note_spans(worker, _content(task)[1], report, report.used)
        self._dispatch.brisk = report.fetch_seconds + report.collate_seconds < BRISK_SECONDS
        commands = self._dispatch.done(worker, seq, report.used, (report, lease))
        if commands:
            self._act(commands)
        if self.wished is not None:
            self._grant_wish()

    def _note_spans(self, worker: int, position: int, report: Timed, used: int) -> None:
        began_ns = report.began_ns
        fetched_ns = began_ns + int(report.fetch_seconds * 1e9)
        ended_ns = fetched_ns + int(report.collate_seconds * 1e9)
        lane = worker_lane(worker)
        self._timeline.add_loading(lane, position, began_ns, fetched_ns, ended_ns, used)

    def _note_private(self, worker: int, private: int) -> None:
        self._private[worker] = private
        self._honour_private()

    def _private_room(self) -> int:
        """What is left for workers' private memory beside the arena."""
        return int(self._terms.available_bytes * _PRIVATE_SHARE) - self._arena.nbytes

    def _fitting(self) -> int:
        """How many workers have room for their private memory."""
        largest = max(self._private.values(), default=0)
        return max(1, self._private_room() // largest) if largest > 0 else sys.maxsize

    def _honour_private(self) -> None:
        """Work with fewer workers where their private memory would not fit beside the arena."""
        fitting = self._fitting()
        if fitting < self._dispatch.active_limit and not self._dispatch.pinned:
            log.warning(
                "workers hold %s each of their own and %s are left for them: "
                "working with %d of %d workers",
                format_bytes(max(self._private.values())),
                format_bytes(max(0, self._private_room())),
                fitting,
                self._terms.workers,
            )
            self._act(self._dispatch.limit_active(fitting))

    def _on_death(self, worker: int, pid: int, status: int) -> None:
        state = self._dispatch.workers[worker]
        private = self._private.pop(worker, 0)
        if state.retired:
            self._crew.forget(worker)
            self._act(self._dispatch.left(worker))
            return
        self._counters.deaths += 1
        current = state.queue[0] if state.queue else None
        step = -1 if current is None or current.abandoned else _content(current)[1]
        now_ns = time.monotonic_ns()
        self._timeline.add("death", worker_lane(worker), step, now_ns, now_ns, private)
        if current is not None:
            self._ends[current.seq] = (worker, pid, status)
        if self._terms.iterable:
            timed_out = current is not None and current.seq in self._timed_out
            self._fatal = self._end_of(worker, pid, status, current, 1, timed_out=timed_out)
            self._dispatch.died(worker, respawn=False)
            return
        if not state.ready:
            self._unready_deaths[worker] += 1
            if self._unready_deaths[worker] >= MAX_STRIKES:
                self._fatal = self._end_of(worker, pid, status, None, MAX_STRIKES)
                self._dispatch.died(worker, respawn=False)
                return
        strike = current is not None and self._was_begun(worker, current)
        if status == -signal.SIGKILL and self._was_oom() and self._dispatch.active_limit > 1:
            strike = False  # too many workers, not a bad batch
            fitting = self._dispatch.active_limit - 1
            log.warning(
                "worker %d (pid %d) was killed for lack of memory: going on with %d workers",
                worker,
                pid,
                fitting,
            )
            self._act(self._dispatch.limit_active(fitting))
        else:
            log.warning(
                "worker %d (pid %d) %s: replaced, its batches are loaded again",
                worker,
                pid,
                how_it_ended(status),
            )
        respawn = worker < self._dispatch.active_limit or self._dispatch.pinned
        self._act(self._dispatch.died(worker, strike=strike, respawn=respawn))
        if self._dispatch.workers[worker].retired:
            self._crew.forget(worker)

    def _was_begun(self, worker: int, task: Task) -> bool:
        """Had the worker read of this batch? One it never saw has not killed it."""
        while (message := self._crew.recall(worker)) is not None:
            if message[0] in (Kind.TASK, Kind.PART):
                return bool(message[1] != task.seq)
        return True

    def _was_oom(self) -> bool:
        now = oom_kills()
        before, self._oom_kills = self._oom_kills, now
        return now is not None and before is not None and now > before

    def _on_host_death(self, words: str) -> None:
        self._host_deaths += 1
        if self._terms.iterable or self._host_deaths > MAX_HOST_DEATHS:
            self._fatal = WorkerLost(cause=words)
            return
        log.warning("%s: started again, undelivered batches are loaded again", words)
        self._counters.deaths += 1
        self._crew.restart()
        for state in self._dispatch.workers:
            if state.retired:
                self._crew.forget(state.id)
        self._act(self._dispatch.all_died())

    # ---- waiting too long

    def _on_timeout(self) -> None:
        task = self._dispatch.stuck_task()
        if task is None or task.worker < 0:
            return
        handle = self._crew.handles[task.worker]
        if handle.pid is None:  # a thread, or a process that never started
            self._fatal = self._end_of(task.worker, 0, None, task, 1, timed_out=True)
            return
        self._timed_out.add(task.seq)
        log.warning(
            "no batch within %g s: worker %d (pid %s, %s) is stuck; its stack follows, "
            "then it is replaced",
            self._terms.timeout,
            task.worker,
            handle.pid,
            process_state(handle.pid),
        )
        handle.dump_stack()
        handle.wait(0.1)
        handle.kill()

    def _report_stuck(self, seconds: float) -> None:
        task = self._dispatch.stuck_task()
        if task is None or task.worker < 0:
            return
        pid = self._crew.handles[task.worker].pid
        log.warning(
            "waiting for %.0f s: worker %d (pid %s, %s) has not finished indices %.200s; "
            "set timeout= to have such a worker replaced",
            seconds,
            task.worker,
            pid,
            process_state(pid),
            _content(task)[2],
        )

    # ---- delivery

    def _hand_over(self, delivery: Delivery, asked_ns: int) -> Taken:
        found_ns = time.monotonic_ns()
        self._counters.wait_seconds += (found_ns - asked_ns) / 1e9
        task = delivery.task
        position = _content(task)[1]
        result = task.result
        origin = self._origins.pop(task.seq, None) if self._origins else None
        taken = Taken(position, self._content_of(delivery), origin)
        nbytes = result[0].used if isinstance(result, tuple) else 0
        self._timeline.add_delivery(
            TRAINER, position, asked_ns, found_ns, time.monotonic_ns(), nbytes
        )
        return taken

    def _content_of(self, delivery: Delivery) -> object:
        task = delivery.task
        try:
            if task.state is State.FAILED:
                return self._failure_of(task)
            return self._batch_of(delivery)
        finally:
            if self._ends or self._timed_out:
                self._forget(task)
            commands = self._dispatch.pump()
            if commands:
                self._act(commands)

    def _failure_of(self, task: Task) -> WorkerError:
        worker, pid, status = self._ends.get(task.seq, (-1, 0, None))
        timed_out = task.seq in self._timed_out
        return self._end_of(worker, pid, status, task, task.strikes, timed_out=timed_out)

    def _forget(self, task: Task) -> None:
        self._ends.pop(task.seq, None)
        self._timed_out.discard(task.seq)

    def _batch_of(self, delivery: Delivery) -> object:
        assert isinstance(delivery.task.result, tuple)
        return self._batch(delivery, *delivery.task.result)

    def _batch(self, delivery: Delivery, report: Report, lease: Any) -> object:
        counters = self._counters
        counters.batch(report.fetch_seconds, report.collate_seconds)
        if report.slowest is not None:
            counters.slow_sample(*report.slowest)
        if report.slow or self._known_slow:
            counters.costs.note(_content(delivery.task)[2], report.slow)
        for index, error in report.skips:
            counters.skip(index, error)
        extent = delivery.task.extent
        if report.unsendable and report.error is not None and not self._terms.iterable:
            return Unsendable(_content(delivery.task)[2], report.error)
        if report.error is not None:
            return report.error
        if report.skeleton is None:
            return Nothing
        if lease is None and extent is None and report.used:
            return self._not_received(delivery.task)
        memory = self._memory_of(delivery, report.used, lease)
        try:
            return decode(report.skeleton, memory)
        except Exception:  # noqa: BLE001 - the user's own classes are put together here
            return ExceptionWrapper(where="while a batch of a DataLoader worker was unpickled")

    def _memory_of(self, delivery: Delivery, used: int, own: Any = None) -> Any:
        """A batch's bytes in the form in which it is to be delivered, or memory of its own."""
        extent = delivery.task.extent
        if delivery.how is How.PLAIN or extent is None:
            return own if own is not None else self._no_memory()
        if delivery.how is How.LEASE:
            return self._arena.lease(extent, used)
        self._counters.copied_batches += 1
        memory = self._arena.private_copy(extent, used)
        self._act(self._dispatch.release(extent.start))
        return memory

    def _not_received(self, task: Task) -> object:
        """A batch in memory of its own whose descriptor the kernel dropped on the way."""
        lost = OSError(
            errno.EMFILE,
            f"{os.strerror(errno.EMFILE)}; raise the limit (ulimit -n) or give a larger memory=",
        )
        error = ExceptionWrapper((OSError, lost, None), where="while a batch was received")
        return error if self._terms.iterable else Unsendable(_content(task)[2], error)

    def _no_memory(self) -> Any:
        return self._arena.view(Extent(0, 0), 0)

    def _end_of(
        self,
        worker: int,
        pid: int,
        status: int | None,
        task: Task | None,
        attempts: int,
        *,
        timed_out: bool = False,
    ) -> WorkerError:
        iterable = self._terms.iterable
        return end_of_worker(
            worker,
            pid,
            status,
            None if task is None or iterable else _content(task)[2],
            attempts=attempts,
            timeout=self._terms.timeout if timed_out else None,
            private_bytes=self._private.get(worker),
            hint=LOST_POSITION if iterable else "",
        )


def _content(task: Task) -> tuple[int, int, Any]:
    """Epoch, position and indices of a batch, as submitted."""
    assert isinstance(task.payload, tuple)
    return task.payload


def _place(extent: Extent | None) -> tuple[int, int]:
    return (-1, 0) if extent is None else (extent.start, extent.size)
