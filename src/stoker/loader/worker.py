"""The worker's loop, the same for processes and threads: fetch, fill the extent, report.

It commands nothing: which batch, which bytes and when to stop are decided by the trainer. How
messages travel and where memory of one's own comes from is left to the two kinds of worker
(``process_worker``, ``threads``).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from torch._utils import ExceptionWrapper

from stoker.loader.arena import Bytes
from stoker.loader.codec import encode
from stoker.loader.fetch import Fetcher, Job, NothingLeft, wrap_exception
from stoker.loader.parts import PartFiller, RowByRow, not_begun
from stoker.loader.room import Room
from stoker.loader.streams import Saved
from stoker.loader.wire import Kind

_PRIVATE_EVERY_SECONDS = 0.25


class Report(NamedTuple):
    """What became of one batch. No skeleton and no error: every sample was skipped.

    Travels as a bare tuple: naming its class takes 5 us of a message that takes 2.
    """

    used: int
    skeleton: bytes | None
    error: ExceptionWrapper | None
    unsendable: bool
    """The dataset delivered, but what it delivered can't be sent (``error`` says why)."""
    fetch_seconds: float
    collate_seconds: float
    slowest: tuple[Any, float] | None
    skips: tuple[tuple[Any, str], ...]
    private_bytes: int
    looked_at_id: bool
    stand: Saved
    """Where an iterable dataset stands after this batch, if it keeps a state."""
    began_ns: int = 0
    """When the worker began with the batch, on the clock that all processes share."""
    slow: tuple[tuple[Any, float], ...] = ()
    """Index and seconds of the samples that took far longer than usual; rarely any."""


def failure(error: ExceptionWrapper) -> Report:
    """A batch that was not even begun."""
    return Report(0, None, error, False, 0.0, 0.0, None, (), 0, False, None)


class Worker(ABC):
    """One worker's life."""

    def __init__(self, worker_id: int, label: str, arena: Bytes) -> None:
        self.id = worker_id
        self.label = label
        self.job: Job
        self._arena = arena
        self._tasks: deque[tuple[Any, ...]] = deque()
        self._seq = -1
        self._own_only = False
        self._private_at = 0.0
        self._filler: PartFiller | None = None
        self._broken: ExceptionWrapper | None = None
        """Why no batch can be loaded (this epoch)."""

    # ---- what differs between processes and threads

    @abstractmethod
    def introduce(self) -> Job:
        """Become worker ``id``: seeds, worker info, the user's init function."""

    @abstractmethod
    def send(self, *message: Any) -> None:
        """Tell the trainer. Raises SystemExit when there is none any more."""

    @abstractmethod
    def send_done(self, seq: int, report: Report) -> None:
        """Tell the trainer, handing over memory of one's own if the batch lies there."""

    @abstractmethod
    def receive(self) -> tuple[Any, ...]:
        """The next message. Raises SystemExit when there is no trainer any more."""

    @abstractmethod
    def own_memory(self, nbytes: int) -> Bytes:
        """Memory outside the arena, instead of any that was taken before."""

    @abstractmethod
    def drop_own(self) -> None:
        """Forget memory of one's own: the batch does not need it."""

    @abstractmethod
    def begin_batch(self, epoch: int, position: int) -> None:
        """Seed what the batch at this position of this epoch may draw from."""

    @abstractmethod
    def begin_sample(self, epoch: int, position: int, row: int) -> None:
        """Where batches are shared: seed what one sample of the batch may draw from."""

    @abstractmethod
    def begin_epoch(self, shared_seed: int | None) -> None:
        """Whatever the dataset must be told before it starts over."""

    @abstractmethod
    def measure_private(self) -> int:
        """Bytes this worker keeps for itself, at their peak."""

    @abstractmethod
    def looked_at_id(self) -> bool:
        """Did the dataset ask who this worker is?"""

    # ---- the loop

    def run(self) -> None:
        """Serve until told to exit or until the trainer is gone."""
        fetcher: Fetcher | None = None
        try:
            self.job = self.introduce()
            fetcher = Fetcher(self.job, self.id)
            if self.job.tight:
                fetcher.announce = self._announce
        except Exception as error:
            self._broken = wrap_exception(error, self.label)
        self.send(Kind.READY)
        while True:
            message = self._tasks.popleft() if self._tasks else self.receive()
            kind = message[0]
            if kind == Kind.TASK:
                if fetcher is None or self._broken is not None:
                    assert self._broken is not None
                    self.send_done(message[1], failure(self._broken))
                else:
                    self._serve(fetcher, message)
                del message
            elif kind == Kind.PART:
                self._serve_part(message)
                del message
            elif kind == Kind.EPOCH:
                if fetcher is not None:
                    self._new_epoch(fetcher, message[1])
            elif kind == Kind.EXIT:
                return

    def _new_epoch(self, fetcher: Fetcher, shared_seed: int | None) -> None:
        self._broken = None
        try:
            self.begin_epoch(shared_seed)
            fetcher.restart()
        except Exception as error:
            self._broken = wrap_exception(error, self.label)

    def _serve(self, fetcher: Fetcher, task: tuple[Any, ...]) -> None:
        _, seq, start, size, epoch, position, index = task
        self._seq = seq
        self._own_only = start < 0
        room = Room(
            self._arena[start : start + size] if start >= 0 else self._arena[:0], self._grow
        )
        began_ns = time.monotonic_ns()
        began = time.perf_counter()
        skeleton: bytes | None = None
        error: ExceptionWrapper | None = None
        fetched = False
        try:
            self.begin_batch(epoch, position)
            if self.job.share:
                index = RowByRow(index, epoch, position, self.begin_sample)
            batch = fetcher.fetch(index, room)
            fetched = True
            skeleton = encode(batch, room)
            del batch
        except NothingLeft:
            pass
        except StopIteration as stop:
            if self.job.iterable:
                self.drop_own()
                self.send(Kind.END, seq, fetcher.state())
                return
            error = wrap_exception(stop, self.label)
        except Exception as raised:
            error = wrap_exception(raised, self.label)
        if skeleton is None:
            self.drop_own()
        took = time.perf_counter() - began
        self.send_done(
            seq,
            Report(
                used=room.used if skeleton is not None else 0,
                skeleton=skeleton,
                error=error,
                unsendable=error is not None and fetched,
                fetch_seconds=fetcher.fetch_seconds,
                collate_seconds=took - fetcher.fetch_seconds,
                slowest=fetcher.slowest,
                skips=tuple(fetcher.skips),
                private_bytes=self._private_now_and_then(),
                looked_at_id=self.looked_at_id(),
                stand=fetcher.state(),
                began_ns=began_ns,
                slow=tuple(fetcher.slow),
            ),
        )

    def _serve_part(self, message: tuple[Any, ...]) -> None:
        """Some rows of a batch that several workers fill."""
        if self._broken is not None:
            report = not_begun(self._broken, first=message[8])
        else:
            if self._filler is None:
                self._filler = PartFiller(self.job, self._arena, self.label, self.begin_sample)
            report = self._filler.fill(message)
        report = report._replace(
            private_bytes=self._private_now_and_then(), looked_at_id=self.looked_at_id()
        )
        self.send(Kind.PART_DONE, message[1], tuple(report))

    def _grow(self, nbytes: int) -> Bytes:
        """A larger memory for the batch at hand: of the arena, or else of one's own."""
        if not self._own_only:
            self.send(Kind.NEED, self._seq, nbytes)
            while True:
                message = self.receive()
                if message[0] == Kind.GRANT and message[1] == self._seq:
                    break
                if message[0] == Kind.EXIT:
                    raise SystemExit(0)
                self._tasks.append(message)
            start, size = message[2], message[3]
            if start >= 0:
                return self._arena[start : start + size]
            self._own_only = True
        return self.own_memory(nbytes)

    def _announce(self, room: Room) -> None:
        """Say after the very first sample how large batches and this worker will be."""
        self.send(Kind.SIZED, room.used, self.measure_private())

    def _private_now_and_then(self) -> int:
        now = time.monotonic()
        if now - self._private_at < _PRIVATE_EVERY_SECONDS:
            return 0
        self._private_at = now
        return self.measure_private()


OpenJob = Callable[[], Job]
