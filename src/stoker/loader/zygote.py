"""The process that workers are forked from: single-threaded, quiet, holding the dataset.

One per iterator. The dataset reaches it by fork (not pickled at all) or is unpickled here once
(spawn, forkserver), so that a worker, also one that replaces a dead one in mid-epoch, is one
cheap fork of a quiet process and never a fork of a trainer with threads and a GPU. It starts
workers, reports their ends and outlives nobody: not the trainer (it watches a pidfd of it), and
its workers do not outlive it (they asked the kernel for that).
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
import threading
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from stoker.loader import wire
from stoker.loader.arena import memory_file
from stoker.loader.fetch import Job, wrap_exception
from stoker.loader.threads_cap import cap_threads
from stoker.loader.wire import Kind


class Parcel:
    """The job on its way to a spawned zygote: pickled once, into memory, not through a pipe.

    Pickling happens while the process is being spawned, the only moment at which locks, events
    and shared tensors of a dataset may be pickled.
    """

    def __init__(self, job: Job) -> None:
        self._job: Job | None = job
        self._fd = -1

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.reduction import DupFd  # Windows has none

        self.close()
        self._fd = memory_file("stoker-job", 0)
        with os.fdopen(os.dup(self._fd), "wb") as file:
            ForkingPickler(file, pickle.HIGHEST_PROTOCOL).dump(self._job)
        return _Delivered, (DupFd(self._fd),)

    def open(self) -> Job:
        """The job itself: under fork it was never pickled."""
        assert self._job is not None
        return self._job

    def close(self) -> None:
        """Drop the pickled bytes."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Delivered(Parcel):
    """A parcel that arrived: the bytes, opened once or by every worker for itself."""

    def __init__(self, descriptor: Any) -> None:
        self._fd = descriptor.detach()
        self._job = None

    def open(self) -> Job:
        if self._job is None:
            # Mapped, not read: a file's offset is one for all workers that open it at once.
            with mmap.mmap(self._fd, 0, prot=mmap.PROT_READ) as memory:
                job = pickle.loads(memory)
            assert isinstance(job, Job)
            self._job = job
        return self._job


def _census() -> tuple[int, int, bool]:
    """Threads, sockets, CUDA: what must not be there when a process forks."""
    sockets = 0
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                sockets += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    try:
        threads = len(os.listdir("/proc/self/task"))
    except OSError:
        threads = threading.active_count()
    return threads, sockets, torch.cuda.is_initialized()


class Zygote:
    """The serving loop."""

    def __init__(self, control: socket.socket, parcel: Parcel, *, lazy: bool) -> None:
        self._control = control
        self._parcel = parcel
        self._lazy = lazy
        self._arena: tuple[int, int] = (-1, 0)
        self._workers: dict[int, tuple[int, BaseProcess]] = {}
        self._fork: BaseContext = multiprocessing.get_context("fork")

    def run(self, trainer: int) -> None:
        """Serve the trainer until it lets go or is gone."""
        trainer_fd = _pidfd(trainer)
        child_read, child_write = socket.socketpair()
        child_read.setblocking(False)
        child_write.setblocking(False)
        signal.set_wakeup_fd(child_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._inherited = [child_read, child_write, self._control]
        self._trainer_fd = trainer_fd
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(child_read, select.POLLIN)
        if trainer_fd >= 0:
            poll.register(trainer_fd, select.POLLIN)
        wire.send(self._control, Kind.UP)
        while True:
            events = dict(poll.poll(None if trainer_fd >= 0 else 500))
            if trainer_fd in events or (trainer_fd < 0 and os.getppid() != trainer):
                return
            if child_read.fileno() in events:
                with contextlib.suppress(BlockingIOError):
                    child_read.recv(4096)
            self._report_exits()
            if self._control.fileno() in events and not self._obey():
                return

    def _obey(self) -> bool:
        message, fds = wire.receive(self._control)
        kind = message[0]
        if kind == Kind.ARENA:
            self._arena = (fds[0], message[1])
        elif kind == Kind.SPAWN:
            try:
                self._spawn(message[1], fds[0])
            except OSError as error:
                wire.send(self._control, Kind.SPAWN_FAILED, message[1], str(error))
        return bool(kind != Kind.EXIT)

    def _spawn(self, worker: int, fd: int) -> None:
        sock = socket.socket(fileno=fd)
        process = self._fork.Process(  # type: ignore[attr-defined]
            target=self._become_worker,
            args=(worker, sock, os.getpid()),
            name=f"stoker-worker-{worker}",
            daemon=True,
        )
        try:
            process.start()
        finally:
            sock.close()
        self._workers[process.pid] = (worker, process)
        pidfd = _pidfd(process.pid)
        wire.send(
            self._control, Kind.SPAWNED, worker, process.pid, fds=(pidfd,) if pidfd >= 0 else ()
        )
        if pidfd >= 0:
            os.close(pidfd)

    def _become_worker(self, worker: int, sock: socket.socket, parent: int) -> None:
        from stoker.loader.process_worker import serve

        for end in self._inherited:
            end.close()
        if self._trainer_fd >= 0:
            os.close(self._trainer_fd)
        serve(worker, sock, *self._arena, self._parcel.open, parent)

    def _report_exits(self) -> None:
        for pid, (worker, process) in list(self._workers.items()):
            status = process.exitcode
            if status is not None:
                del self._workers[pid]
                process.close()
                wire.send(self._control, Kind.EXITED, worker, pid, status)

    def end_workers(self) -> None:
        """Whatever still runs has nobody to serve."""
        for _, process in self._workers.values():
            with contextlib.suppress(OSError, ValueError):
                process.kill()


def _pidfd(pid: int) -> int:
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            return os.pidfd_open(pid)
    return -1


def main(control: socket.socket, parcel: Parcel, lazy: bool, trainer: int) -> None:
    """Entry point of the zygote process."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # blocked by the trainer until here
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # It has children of its own, unlike multiprocessing's idea of a daemon.
    multiprocessing.current_process().daemon = False
    zygote = Zygote(control, parcel, lazy=lazy)
    try:
        if not lazy:
            before = _census()
            try:
                parcel.open()
            except Exception as error:
                wire.send(control, Kind.BROKEN, wrap_exception(error, "host process"))
                return
            if _census() != before:
                wire.send(control, Kind.TAINTED)
                return
            parcel.close()
        cap_threads()
        gc.freeze()  # a collection in a worker would copy every page it looks at
        zygote.run(trainer)
    except (EOFError, ConnectionError):
        pass  # the trainer is gone
    finally:
        zygote.end_workers()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(0)  # exit handlers that came with the fork are the trainer's to run
