"""A worker that is a process: its sockets, seeds, signals and memory."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import random
import signal
import socket
import sys
from typing import Any

import numpy as np
import numpy.random  # lazy in numpy 2: not to be imported by every worker anew (12 ms)
import torch
from torch.utils.data._utils import worker as torch_worker

from stoker.loader import wire
from stoker.loader.arena import Bytes, map_memory, memory_file
from stoker.loader.datapipes import apply_shared_seed
from stoker.loader.extents import page_ceil
from stoker.loader.fetch import Job, position_seed, seed_everything
from stoker.loader.wire import Kind
from stoker.loader.worker import OpenJob, Report, Worker

STACK_SIGNAL: int | None = signal.SIGRTMIN + 3 if hasattr(signal, "SIGRTMIN") else None
"""A worker that gets this signal writes the stacks of its threads to stderr."""
_OOM_SCORE = 500
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_KEPT_BYTES = 1 << 29


class _Watched(torch_worker.WorkerInfo):
    """torch's WorkerInfo that notices whether anybody reads who this worker is.

    Only then does it matter which worker gets which batch; otherwise a batch may move.
    """

    __slots__ = ()
    looked_at = False

    def __getattribute__(self, name: str) -> Any:
        if name in ("id", "seed"):
            _Watched.looked_at = True
        return super().__getattribute__(name)


class ProcessWorker(Worker):
    """The worker's side of one process."""

    def __init__(
        self, worker_id: int, sock: socket.socket, arena: Bytes, open_job: OpenJob
    ) -> None:
        super().__init__(worker_id, f"process {worker_id}", arena)
        self._sock = sock
        self._open_job = open_job
        self._own = -1
        self._base_rss, self._base_shared = _rss()

    def introduce(self) -> Job:
        """Seed, tell torch who we are, run the user's init function: as torch does."""
        job = self._open_job()
        seed = job.base_seed + self.id
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        if torch.accelerator.current_accelerator() is not None:  # built in, if not present
            torch.manual_seed(seed)  # its generators too: 2 ms
        np.random.seed(torch_worker._generate_state(job.base_seed, self.id))
        apply_shared_seed(job.dataset, job.shared_seed)
        torch_worker._worker_info = _Watched(
            id=self.id, num_workers=job.num_workers, seed=seed, dataset=job.dataset
        )
        if job.worker_init_fn is not None:
            job.worker_init_fn(self.id)
        _Watched.looked_at = False
        if not job.tight:
            _keep_freed_memory()
        return job

    def begin_batch(self, epoch: int, position: int) -> None:
        """Seed by position, unless the user's init function or the stream itself is in charge."""
        job = self.job
        if not job.iterable and job.worker_init_fn is None:
            seed_everything(position_seed(job.base_seed, epoch, position))

    def begin_sample(self, epoch: int, position: int, row: int) -> None:
        """Seed by position and row, also with an init function: any worker may load any row."""
        batch_seed = position_seed(self.job.base_seed, epoch, position)
        seed_everything(position_seed(batch_seed, row, 0))

    def begin_epoch(self, shared_seed: int | None) -> None:
        """Let DataPipes shuffle alike."""
        apply_shared_seed(self.job.dataset, shared_seed)

    def looked_at_id(self) -> bool:
        """Did the dataset ask who this worker is?"""
        return _Watched.looked_at

    def send(self, *message: Any) -> None:
        """One datagram to the trainer."""
        self._send(message, ())

    def send_done(self, seq: int, report: Report) -> None:
        """With the descriptor of our own memory, if the batch lies there."""
        if self._own < 0:
            self._send((Kind.DONE, seq, tuple(report)), ())
            return
        try:
            self._send((Kind.DONE, seq, tuple(report)), (self._own,))
        finally:
            self.drop_own()

    def _send(self, message: tuple[Any, ...], fds: tuple[int, ...]) -> None:
        try:
            wire.send(self._sock, *message, fds=fds)
        except (BrokenPipeError, ConnectionError):
            raise SystemExit(0) from None  # the trainer is gone

    def receive(self) -> tuple[Any, ...]:
        """Blocks: a worker without work waits in the kernel."""
        try:
            message, _ = wire.receive(self._sock)
        except (EOFError, ConnectionError):
            raise SystemExit(0) from None
        return message

    def own_memory(self, nbytes: int) -> Bytes:
        """A memory file for this batch alone."""
        self.drop_own()
        size = page_ceil(nbytes)
        self._own = memory_file("stoker-batch", size)
        return map_memory(self._own, size)[1]

    def drop_own(self) -> None:
        """Close the descriptor; the mapping goes with the last view of it."""
        if self._own >= 0:
            os.close(self._own)
            self._own = -1

    def measure_private(self) -> int:
        """How far resident memory has grown since the fork, at its peak, without the arena.

        What was inherited is shared with the zygote until it is written to, so growth is what
        this worker costs (copies of written pages excepted: only smaps knows, at a high price).
        """
        import resource  # Windows has none

        _, shared = _rss()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return max(0, peak - self._base_rss - max(0, shared - self._base_shared))


def _rss() -> tuple[int, int]:
    """Resident and shared (file and arena) bytes of this process, from the cheap counter."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            fields = statm.read().split()
    except OSError:
        return 0, 0
    page = os.sysconf("SC_PAGE_SIZE")
    return int(fields[1]) * page, int(fields[2]) * page


def _keep_freed_memory() -> None:
    """Have malloc recycle large blocks instead of returning them to the system every time.

    A dataset that makes a 46 MB tensor pays 30 ms for fresh pages and 5 ms for warm ones. glibc
    maps blocks above 32 MB afresh however often they come; in a worker they come for every batch.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def _settle_in(worker_id: int, parent: int) -> None:
    """Make a freshly forked process a good worker: signals, threads, place in the OOM queue."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    if STACK_SIGNAL is not None and sys.__stderr__ is not None:
        faulthandler.register(STACK_SIGNAL, file=sys.__stderr__, all_threads=True)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        # The zygote has one thread, so "the forking thread ended" is "the zygote ended".
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(_PR_SET_NAME, f"stoker-w{worker_id}".encode(), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(0)  # it ended before we asked to be told
        try:
            with open("/proc/self/oom_score_adj", "w") as score:
                score.write(str(_OOM_SCORE))
        except OSError:
            pass
    torch.set_num_threads(1)


def serve(
    worker_id: int,
    sock: socket.socket,
    arena_fd: int,
    arena_bytes: int,
    open_job: OpenJob,
    parent: int,
) -> None:
    """Entry point of a worker process."""
    _settle_in(worker_id, parent)
    _, arena = map_memory(arena_fd, arena_bytes)
    os.close(arena_fd)
    ProcessWorker(worker_id, sock, arena, open_job).run()
