"""Workers that are threads: same dispatch, same arena, no transport, no protection.

They share one dataset object and the process' global random generators, so a dataset that keeps
a file handle or draws from those generators is not safe here; nothing can be killed, so a stuck
thread is an error; and what does not release the GIL does not run in parallel. torch's
``get_worker_info()`` knows processes only and returns None here.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np

from stoker.loader.arena import Arena, Bytes
from stoker.loader.fetch import Job
from stoker.loader.pool import Event
from stoker.loader.wire import Kind
from stoker.loader.worker import Report, Worker

_GRACE_SECONDS = 5.0


class ThreadHandle:
    """A worker thread as clients of torch's ``_workers`` know a process. It has no pid."""

    daemon = True
    pid: int | None = None
    exitcode: int | None = None

    def __init__(self, worker: int, thread: threading.Thread) -> None:
        self.id = worker
        self.name = thread.name
        self._thread = thread

    def is_alive(self) -> bool:
        """Does the thread still run?"""
        return self._thread.is_alive()

    def is_current(self) -> bool:
        """Is this the thread that asks?"""
        return self._thread is threading.current_thread()

    def wait(self, timeout: float | None) -> bool:
        """Wait for the end of the thread; True if it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the thread."""
        self.wait(timeout)

    def terminate(self) -> None:
        """Threads can't be ended from outside."""

    kill = dump_stack = terminate


class _Inbox:
    """Messages to one thread; unread ones can be taken back."""

    def __init__(self) -> None:
        self._messages: deque[tuple[Any, ...]] = deque()
        self._changed = threading.Condition()

    def put(self, message: tuple[Any, ...]) -> None:
        with self._changed:
            self._messages.append(message)
            self._changed.notify()

    def get(self) -> tuple[Any, ...]:
        with self._changed:
            while not self._messages:
                self._changed.wait()
            return self._messages.popleft()

    def take_back(self) -> tuple[Any, ...] | None:
        with self._changed:
            return self._messages.popleft() if self._messages else None


class ThreadWorker(Worker):
    """The worker's side of one thread."""

    def __init__(self, worker_id: int, inbox: _Inbox, crew: ThreadCrew, arena: Bytes) -> None:
        super().__init__(worker_id, f"thread {worker_id}", arena)
        self._inbox = inbox
        self._crew = crew
        self._own: Bytes | None = None

    def run(self) -> None:
        """Serve; an end is reported, unless the whole crew ends."""
        try:
            super().run()
            if not self._crew.closing:
                self._crew.post(Event(Kind.EXITED, self.id, (Kind.EXITED, self.id, 0, 0)))
        except SystemExit as end:
            if not self._crew.closing:
                self._crew.post(Event(Kind.EXITED, self.id, (Kind.EXITED, self.id, 0, _code(end))))
        except BaseException:
            self._crew.post(Event(Kind.EXITED, self.id, (Kind.EXITED, self.id, 0, 1)))
            raise

    def introduce(self) -> Job:
        """Run the user's init function."""
        job = self._crew.job
        if job.worker_init_fn is not None:
            job.worker_init_fn(self.id)
        return job

    def send(self, *message: Any) -> None:
        """Straight into the trainer's list of events."""
        self._crew.post(Event(message[0], self.id, message))

    def send_done(self, seq: int, report: Report) -> None:
        """With our own memory, if the batch lies there."""
        own, self._own = self._own, None
        self._crew.post(Event(Kind.DONE, self.id, (Kind.DONE, seq, report), memory=own))

    def receive(self) -> tuple[Any, ...]:
        """Waits without the GIL."""
        return self._inbox.get()

    def own_memory(self, nbytes: int) -> Bytes:
        """Plain memory of the process."""
        self._own = np.empty(nbytes, dtype=np.uint8)
        return self._own

    def drop_own(self) -> None:
        """Let it go."""
        self._own = None

    def begin_batch(self, epoch: int, position: int) -> None:
        """The global generators belong to everybody: they are left alone."""

    def begin_sample(self, epoch: int, position: int, row: int) -> None:
        """As for batches."""

    def begin_epoch(self, shared_seed: int | None) -> None:
        """Nothing to tell."""

    def measure_private(self) -> int:
        """A thread's memory is the trainer's."""
        return 0

    def looked_at_id(self) -> bool:
        """Threads have no worker info to look at."""
        return False


def _code(end: SystemExit) -> int:
    """The exit code that a process would have."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    return 1


class ThreadCrew:
    """A pool of threads, with the interface of the pool of processes."""

    def __init__(self, job: Job, arena: Arena) -> None:
        self.job = job
        self.handles: dict[int, Any] = {}
        self._bytes = arena.all_bytes()
        self._inboxes: dict[int, _Inbox] = {}
        self._events: deque[Event] = deque()
        self._happened = threading.Condition()
        self._owner = os.getpid()
        self._woken = False
        self.closing = False
        _crews.add(self)

    def start(self) -> None:
        """Threads start one by one, in ``spawn``."""

    def spawn(self, worker: int) -> None:
        """Start a thread."""
        inbox = _Inbox()
        loop = ThreadWorker(worker, inbox, self, self._bytes)
        thread = threading.Thread(target=loop.run, name=f"stoker-worker-{worker}", daemon=True)
        thread.start()
        self._inboxes[worker] = inbox
        self.handles[worker] = ThreadHandle(worker, thread)

    def send(self, worker: int, *message: Any) -> None:
        """Queue a message for a thread."""
        inbox = self._inboxes.get(worker)
        if inbox is not None:  # else it could not be started
            inbox.put(message)

    def recall(self, worker: int) -> tuple[Any, ...] | None:
        """Take back the next message that the thread has not read yet."""
        return self._inboxes[worker].take_back()

    def forget(self, worker: int) -> None:
        """Drop what is left of a thread that has said its last."""
        self._inboxes.pop(worker, None)
        handle = self.handles.pop(worker, None)
        if handle is not None and not handle.is_current():
            handle.join(_GRACE_SECONDS)

    def wake(self) -> None:
        """Let ``wait`` return now; from any thread."""
        with self._happened:
            self._woken = True
            self._happened.notify()

    def post(self, event: Event) -> None:
        """Called by the threads."""
        with self._happened:
            self._events.append(event)
            self._happened.notify()

    def wait(self, timeout: float) -> None:
        """Wait for something to collect."""
        with self._happened:
            if not self._events and not self._woken:
                self._happened.wait(timeout)
            self._woken = False

    def collect(self) -> list[Event]:
        """What has happened by now."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def restart(self) -> None:
        """There is no host that could die."""

    def check(self) -> None:
        """Nor one that could be stuck."""

    def close(self) -> None:
        """Ask the threads to end; one that is stuck in the dataset is left behind."""
        if self._owner != os.getpid():
            return  # a forked child has none of them, and perhaps locks that they held
        self.closing = True
        for inbox in self._inboxes.values():
            while inbox.take_back() is not None:
                pass
            inbox.put((Kind.EXIT,))
        for handle in self.handles.values():
            if not handle.is_current():
                handle.join(_GRACE_SECONDS)
        self._bytes = np.empty(0, dtype=np.uint8)


_crews: weakref.WeakSet[ThreadCrew] = weakref.WeakSet()


def _close_all() -> None:
    """Python stops threads at its end wherever they are; inside torch that aborts the process."""
    for crew in list(_crews):
        crew.close()


atexit.register(_close_all)
