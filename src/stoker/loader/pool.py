"""The trainer's hold on its worker processes: start, talk, notice ends, let go.

Turns what happens to processes into events. It decides nothing (see ``dispatch``) and keeps no
batches.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import select
import signal
import socket
import time
import weakref
from collections import deque
from collections.abc import Sequence
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple

from stoker.loader import wire, zygote
from stoker.loader.arena import Arena, Bytes
from stoker.loader.fetch import Job
from stoker.loader.handle import WorkerHandle
from stoker.loader.mishaps import how_it_ended
from stoker.loader.requests import Bell
from stoker.loader.threads_cap import find_pools
from stoker.loader.wire import Kind

log = logging.getLogger("stoker.loader")

_GRACE_SECONDS = 5.0
_KILL_SECONDS = 2.0
_BELL = -1
"""In place of a worker's number: not a worker, somebody rang."""


class Event(NamedTuple):
    """Something a worker said, or its end (EXITED). A batch may come in memory of its own."""

    kind: int
    worker: int
    message: tuple[Any, ...] = ()
    fds: Sequence[int] = ()
    memory: Bytes | None = None


class HostDied(Exception):
    """The zygote is gone, and all its workers with it. ``events`` came before that."""

    def __init__(self, words: str, events: list[Event]) -> None:
        super().__init__(words)
        self.events = events


_sockets: set[socket.socket] = set()
"""Every open socket of a pool. The garbage collector finalizes a cycle in any order; what is held
here is still open when the pool's turn to close comes."""


def _pair() -> tuple[socket.socket, socket.socket]:
    ends = wire.pair()
    _sockets.update(ends)
    return ends


def _close(sock: socket.socket) -> None:
    _sockets.discard(sock)
    sock.close()


class _Line:
    """The socket to one worker. ``theirs`` is kept: reading it takes back unread messages."""

    def __init__(self) -> None:
        self.ours, self.theirs = _pair()
        self.ours.setblocking(False)
        self.outbox: deque[tuple[bytes, int | None]] = deque()

    def send(self, *message: Any) -> None:
        packed = wire.pack(*message)
        if packed[1] is None and not self.outbox:
            try:
                self.ours.send(packed[0])
                return
            except OSError:
                pass  # full or gone: see there
        self.outbox.append(packed)
        self.flush()

    def flush(self) -> None:
        while self.outbox:
            body, bulk = self.outbox[0]
            try:
                wire.send_packed(self.ours, body, [] if bulk is None else [bulk])
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionError):
                pass  # the worker is gone: its end is on its way to us
            self.outbox.popleft()
            if bulk is not None:
                os.close(bulk)

    def recall(self) -> tuple[Any, ...] | None:
        """Take back the oldest message that the worker has not read, if there is one."""
        self.flush()
        try:
            # Not setblocking(): that would make the worker's own end non-blocking too.
            message, fds = wire.receive(self.theirs, wire.DONT_WAIT)
        except (BlockingIOError, EOFError, ConnectionError):
            return None
        for fd in fds:
            os.close(fd)
        return message

    def close(self) -> None:
        while self.outbox:
            _, bulk = self.outbox.popleft()
            if bulk is not None:
                os.close(bulk)
        _close(self.ours)
        _close(self.theirs)


class Pool:
    """A zygote and its workers."""

    def __init__(self, context: BaseContext | None, job: Job, arena: Arena) -> None:
        self._context: BaseContext = context or multiprocessing.get_context()
        self._job = job
        self._arena = arena
        self._owner = os.getpid()
        self._lines: dict[int, _Line] = {}
        self._by_fd: dict[int, int] = {}
        self._poll = select.poll()
        self._control: socket.socket | None = None
        self._process: Any = None
        self._lazy = False
        self._unreported: set[int] = set()
        self._bell: Bell | None = None
        self.handles: dict[int, WorkerHandle] = {}
        _pools.add(self)

    def start(self) -> None:
        """Start the zygote. Raises what pickling the dataset raises."""
        find_pools()
        if self._bell is None:
            self._bell = Bell()
            self._by_fd[self._bell.fileno()] = _BELL
            self._poll.register(self._bell, select.POLLIN)
        ours, theirs = _pair()
        self._control = ours
        parcel = zygote.Parcel(self._job)
        self._process = self._context.Process(  # type: ignore[attr-defined]
            target=zygote.main,
            args=(theirs, parcel, self._lazy, self._owner),
            name="stoker-zygote",
            daemon=True,
        )
        # Blocked until the zygote has chosen to ignore it: Ctrl-C gives one traceback, ours.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        except BaseException:
            self._control = None
            _close(ours)
            self._process = None
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            _close(theirs)
            parcel.close()
        ours.setblocking(False)
        self._poll.register(ours, select.POLLIN)
        self._tell(Kind.ARENA, self._arena.region_bytes, fds=(self._arena.fd,))

    def spawn(self, worker: int) -> None:
        """Have a worker started; messages can be sent to it at once."""
        self._drop_line(worker)
        line = _Line()
        self._lines[worker] = line
        self.handles[worker] = WorkerHandle(worker)
        self._by_fd[line.ours.fileno()] = worker
        self._poll.register(line.ours, select.POLLIN)
        self._tell(Kind.SPAWN, worker, fds=(line.theirs.fileno(),))

    def send(self, worker: int, *message: Any) -> None:
        """Queue a message for a worker; never blocks."""
        line = self._lines.get(worker)
        if line is not None:
            line.send(*message)

    def forget(self, worker: int) -> None:
        """Drop what is left of a worker that is gone."""
        self._drop_line(worker)
        handle = self.handles.pop(worker, None)
        if handle is not None:
            handle.ended(None)

    def wake(self) -> None:
        """Let ``wait`` return now; from any thread."""
        bell = self._bell
        if bell is not None:
            bell.ring()

    def recall(self, worker: int) -> tuple[Any, ...] | None:
        """Take back the next message that the worker has not read yet."""
        line = self._lines.get(worker)
        try:
            return line.recall() if line is not None else None
        except wire.Lost as lost:
            self._replace(worker, lost)
            return None

    def wait(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for something to collect. Changes nothing."""
        if any(line.outbox for line in self._lines.values()):
            timeout = min(timeout, 0.005)
        self._poll.poll(timeout * 1000)

    def collect(self) -> list[Event]:
        """What has happened by now. Raises HostDied."""
        for line in self._lines.values():
            if line.outbox:
                line.flush()
        events: list[Event] = []
        by_fd = self._by_fd
        while ready := self._poll.poll(0):
            host = False
            for fd, _ in ready:
                worker = by_fd.get(fd)
                if worker is None:
                    host = True
                    continue
                event = self._hear(worker)
                if event is not None:
                    events.append(event)
            # After the lines: a worker's last words come before the news of its end.
            if host:
                self._hear_host(events)
                break
        return events

    def check(self) -> None:
        """Called now and then while a batch is waited for: does the zygote still do its work?

        A worker whose end it does not report from one call to the next shows that it is stuck
        (stopped, or in disk wait). It is killed, and then there is a HostDied to recover from.
        """
        ended = {
            handle.pid
            for handle in self.handles.values()
            if handle.pid is not None and handle.exitcode is None and not handle.is_alive()
        }
        if ended & self._unreported and self._process is not None:
            log.warning("the host process (pid %s) does not answer: ended", self._process.pid)
            self._process.kill()
        self._unreported = ended

    def close(self) -> None:
        """Let workers finish, then end whatever is left.

        Safe to call twice, also if the first call was interrupted, and after a fork.
        """
        if self._owner != os.getpid():
            self._disown()
            return
        control = self._control
        if control is not None and control.fileno() >= 0:  # else that far we were before
            for line in self._lines.values():
                while line.recall() is not None:
                    pass
                line.send(Kind.EXIT)
            self._await_ends(control, time.monotonic() + _GRACE_SECONDS)
            for handle in self.handles.values():
                if handle.is_alive():
                    handle.kill()
            self._await_ends(control, time.monotonic() + _KILL_SECONDS)
            with contextlib.suppress(OSError):
                wire.send(control, Kind.EXIT)
        self._end_host()
        self._drop_all()
        if self._bell is not None and self._bell.fileno() >= 0:
            self._by_fd.pop(self._bell.fileno(), None)
            with contextlib.suppress(KeyError):  # else whoever polls again hears of it for ever
                self._poll.unregister(self._bell)
            self._bell.close()

    # ---- inside

    def _tell(self, *message: Any, fds: tuple[int, ...] = ()) -> None:
        """Tell the zygote; its queue is read promptly, so a short wait is enough."""
        assert self._control is not None
        body, _ = wire.pack(*message)
        deadline = time.monotonic() + 60.0
        while True:
            try:
                wire.send_packed(self._control, body, list(fds))
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise HostDied("the host process does not answer", []) from None
                time.sleep(0.002)
            except (BrokenPipeError, ConnectionError):
                return  # noticed where we listen

    def _replace(self, worker: int, lost: wire.Lost) -> None:
        """What the message was about only the worker knows: its end puts all of it right."""
        log.warning("worker %d is replaced: %s; raise the limit (ulimit -n)", worker, lost)
        self.handles[worker].kill()

    def _hear(self, worker: int) -> Event | None:
        if worker == _BELL:
            assert self._bell is not None
            self._bell.heard()
            return None
        line = self._lines[worker]
        try:
            message, fds = wire.receive(line.ours)
        except wire.Lost as lost:
            self._replace(worker, lost)
            return None
        except (BlockingIOError, EOFError, ConnectionError):
            return None
        return Event(message[0], worker, message, fds)

    def _hear_out(self, worker: int, events: list[Event]) -> None:
        """Everything a dead worker said before it died."""
        if worker in self._lines:
            while (event := self._hear(worker)) is not None:
                events.append(event)

    def _hear_host(self, events: list[Event]) -> None:
        assert self._control is not None
        while True:
            try:
                message, fds = wire.receive(self._control)
            except BlockingIOError:
                return
            except (EOFError, ConnectionError):
                self._bury_all(events)
                raise HostDied(self._last_words(), events) from None
            kind = message[0]
            if kind == Kind.SPAWNED:
                self.handles[message[1]].started(message[2], fds[0] if fds else -1)
            elif kind == Kind.EXITED:
                worker, pid, status = message[1:]
                handle = self.handles.get(worker)
                if handle is None or handle.pid != pid:
                    continue
                self._hear_out(worker, events)
                handle.ended(status)
                events.append(Event(Kind.EXITED, worker, message))
            elif kind == Kind.SPAWN_FAILED:
                events.append(Event(Kind.SPAWN_FAILED, message[1], message))
            elif kind == Kind.BROKEN:
                events.append(Event(Kind.BROKEN, -1, message))
                return  # its end, which comes next, is no news
            elif kind == Kind.TAINTED:
                self._restart_lazy()
                return

    def _restart_lazy(self) -> None:
        """Unpickling left threads behind, so each worker unpickles for itself."""
        self._lazy = True
        workers = list(self._lines)
        unread = {w: self._unread(w) for w in workers}
        self._end_host()
        self.start()
        for worker in workers:
            self.spawn(worker)
            for message in unread[worker]:
                self.send(worker, *message)

    def _unread(self, worker: int) -> list[tuple[Any, ...]]:
        messages = []
        while (message := self._lines[worker].recall()) is not None:
            messages.append(message)
        return messages

    def _end_host(self) -> None:
        if self._control is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._poll.unregister(self._control)
            _close(self._control)
            self._control = None
        if self._process is not None:
            with contextlib.suppress(ValueError):  # closed before, then interrupted
                self._process.join(_KILL_SECONDS)
                if self._process.is_alive():
                    self._process.kill()
                    self._process.join()
                self._process.close()
            self._process = None

    def restart(self) -> None:
        """Start another zygote after HostDied; workers must be spawned again."""
        self._end_host()
        self.start()

    def _last_words(self) -> str:
        if self._process is None:
            return "the host process is gone"
        self._process.join(_KILL_SECONDS)
        code = self._process.exitcode
        return (
            "the host process is gone" if code is None else f"the host process {how_it_ended(code)}"
        )

    def _bury_all(self, events: list[Event]) -> None:
        """The zygote is gone; the kernel kills its workers. Wait until that is certain."""
        for worker, handle in self.handles.items():
            handle.kill()
            handle.wait(_GRACE_SECONDS)
            self._hear_out(worker, events)
            handle.ended(None)

    def _await_ends(self, control: socket.socket, deadline: float) -> None:
        poll = select.poll()
        poll.register(control, select.POLLIN)
        while any(h.pid is None or h.exitcode is None for h in self.handles.values()):
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                return
            try:
                message, fds = wire.receive(control)
            except BlockingIOError:
                continue
            except (EOFError, ConnectionError):
                for handle in self.handles.values():
                    handle.kill()
                    handle.wait(_KILL_SECONDS)
                    handle.ended(None)
                return
            if message[0] == Kind.SPAWNED:
                self.handles[message[1]].started(message[2], fds[0] if fds else -1)
            elif message[0] == Kind.EXITED:
                self.handles[message[1]].ended(message[3])
            elif message[0] in (Kind.BROKEN, Kind.TAINTED, Kind.SPAWN_FAILED):
                return
            else:
                for fd in fds:
                    os.close(fd)

    def _drop_line(self, worker: int) -> None:
        line = self._lines.pop(worker, None)
        if line is not None:
            fd = line.ours.fileno()
            self._by_fd.pop(fd, None)
            with contextlib.suppress(KeyError, ValueError):
                self._poll.unregister(fd)
            line.close()

    def _drop_all(self) -> None:
        for worker in list(self._lines):
            self._drop_line(worker)
        for handle in self.handles.values():
            handle.ended(None)

    def _disown(self) -> None:
        """In a forked child: close our copies of the sockets; the pool belongs to the parent."""
        if self._control is not None:
            _close(self._control)
            self._control = None
        for line in self._lines.values():
            line.close()
        for handle in self.handles.values():
            handle.disown()
        if self._bell is not None:
            self._bell.disown()
        self._lines = {}
        self._by_fd = {}


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _disown_all() -> None:
    for pool in list(_pools):
        pool._disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_all)
