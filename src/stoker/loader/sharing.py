"""Which worker fills which rows of which batch: the state machine of ``share_batches=True``.

Pure, as ``dispatch`` is, of which it is a variety: bounds, leases, deaths and recalls are those
of ``Dispatch``. What differs is that a batch is cut into *parts*, runs of rows, which go to all
workers at once. Keeping W workers busy then takes the memory of a few batches, not of W.

The layout. How many bytes a batch takes, and where each row goes, is learned from one sample: the
first batch begins with a *probe* of its first row. From then on the extent of a batch is granted
exactly, before anybody fills it. This module knows of a layout only how large a batch becomes.

How far ahead. All parts of a batch are sent at once, since nobody is there to send more while the
caller is away. The next batch is begun while all that is in flight, batches that the caller holds
included, would be no more than ``lead`` batches and one (or is small). A caller who holds more
still gets one batch ahead.

What does not fit. A sample of another type, dtype or shape than the layout's spoils its batch:
once every part of it has come back, it is loaded whole, by one worker, as ``Dispatch`` does it,
and the next batch is probed again. Where that happens again and again sharing is given up. If
samples raise, the lowest row's exception is the batch's, as if they had been loaded in order.

Who may write. A part in a worker's hands may be written to; the extent of its batch is free only
when no part is, whatever became of the batch.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from operator import attrgetter
from typing import Any, Protocol

from stoker.loader import dispatch as rules
from stoker.loader.dispatch import ALL_BATCHES, Dispatch
from stoker.loader.tasks import Assign, Command, Grant, Recall, State, Task

MAX_MISFITS = 3.0
"""Sharing is given up after so many layouts (or raising samples to be skipped) in a row in vain.

A batch that could be shared, beyond the one its layout was learned from, makes up for half of one.
"""

_WORTH_IT = 3
"""A layout that served so many batches was not learned in vain."""

PARTS_A_WORKER = 2
"""So that an idle worker can take over half of what a slow one has."""

_by_seq = attrgetter("seq")


class Layout(Protocol):
    """Where the rows of a batch lie. Compared by identity: another layout is another object."""

    def nbytes(self, rows: int) -> int:
        """How many bytes a batch of so many rows takes."""
        ...


class Verdict(IntEnum):
    """What became of a part."""

    PROBED = 1  # the layout was learned; the sample is kept by its worker
    FILLED = 2
    MISFIT = 3  # a sample does not fit the layout
    RAISED = 4  # a sample raised


@dataclass(slots=True, eq=False)
class Batch(Task):
    """A batch that workers fill together, or one of them ``whole``."""

    rows: int = 0
    layout: Layout | None = None
    parts: list[Part] = field(default_factory=list)
    writers: int = 0
    """Parts in workers' hands."""
    left: int = 0
    """Parts not finished: in workers' hands, or given back by them."""
    keeper: int = -1
    """The worker that keeps the probed sample."""
    whole: bool = False
    spoiled: str | None = None
    """Why it can't be filled in parts."""
    outdated: bool = False
    """Its layout is not the samples' any more."""
    errors: list[tuple[int, Any]] = field(default_factory=list)
    """Row and exception of samples that raised."""
    filled: dict[int, Any] = field(default_factory=dict)
    """What workers reported of the finished parts, by first row: the result of a filled batch."""
    culprit: Part | None = None
    """The part that brought down too many workers."""


@dataclass(slots=True, eq=False)
class Part(Task):
    """Rows ``first`` to ``first + count`` of a batch; a probe is the first row, without a place.

    A task like others in its worker's queue; its number is taken from the same sequence.
    """

    batch: Batch = field(default=None)  # type: ignore[assignment]
    first: int = 0
    count: int = 1
    probe: bool = False


class Sharing(Dispatch):
    """``Dispatch`` for batches that are filled in parts."""

    def __init__(
        self,
        *,
        workers: int,
        budget: int,
        window: int,
        ahead: int | None = None,
        lead: int = 2,
        in_order: bool = True,
        skips: bool = False,
        region: int | None = None,
    ) -> None:
        """``lead``: how many batches beyond the caller's are begun where they are not small.

        ``skips``: a sample that raises is dropped, which only loading whole can do.
        """
        super().__init__(
            workers=workers,
            budget=budget,
            window=window,
            ahead=ahead,
            in_order=in_order,
            region=region,
        )
        self.pinned = self._trial = False  # any worker may load any sample
        self.given_up: str | None = None
        """Why batches are no longer shared, or None."""
        self._share_lead = max(1, lead)
        self._skips = skips
        self._layout: Layout | None = None
        self._probing: Batch | None = None
        self._served = 0  # batches filled with this layout
        self._misfits = 0.0
        self._loose: list[Part] = []  # neither with a worker nor finished

    # ---- what a caller may ask

    def stuck_task(self) -> Task | None:
        """What the caller waits for: of a shared batch the first part that was begun."""
        head = self.head_task()
        if not isinstance(head, Batch) or head.worker >= 0:
            return head
        held = [part for part in head.parts if part.worker >= 0]
        begun = [part for part in held if self.workers[part.worker].queue[0] is part]
        # Where no worker has any of it, they are busy with something older.
        older = [worker.queue[0] for worker in self._active if worker.queue]
        return next(iter(begun or held or older), head)

    # ---- events

    @property
    def early_room(self) -> bool:
        """Never: a slow sample holds up its part only, and the others are filled meanwhile."""
        return False

    def submit(self, payload: object, ahead: int = 0) -> list[Command]:
        """A batch of indices was drawn: ``(epoch, position, indices)``, the next in line."""
        assert isinstance(payload, tuple)
        assert not ahead
        indices = payload[2]
        rows = len(indices) if isinstance(indices, (list, tuple)) else 0
        batch = Batch(self._next_seq, payload, self._next_home(), rows=rows, whole=not rows)
        self._next_seq += 1
        self.tasks[batch.seq] = batch
        self._waiting.append(batch)
        return self._pump()

    def part_done(
        self, worker: int, seq: int, verdict: Verdict, value: Any, row: int = 0
    ) -> list[Command]:
        """A worker is done with a part and writes no more of it.

        ``value``: the layout (PROBED), the worker's report (FILLED), words (MISFIT), or the
        exception (RAISED, with its row).
        """
        part = self._finish(worker, seq)
        if part is None:
            return []
        assert isinstance(part, Part)
        self._free(part)
        batch = part.batch
        if not batch.abandoned:
            batch.left -= 1
            if verdict is Verdict.PROBED:
                self._probed(batch, worker, value)
            elif verdict is Verdict.FILLED:
                batch.filled[part.first] = value
            elif verdict is Verdict.MISFIT:
                batch.spoiled = value
                batch.outdated = True
            elif self._skips:
                batch.spoiled = "samples that raise"
            else:
                batch.errors.append((row, value))
            if verdict is not Verdict.PROBED:
                self._settle(batch)
        return self._pump_and_steal()

    def starved(self) -> list[Command]:
        """The caller waits. How much is begun does not depend on that, unless sharing is over."""
        return super().starved() if self.given_up is not None else []

    def pin(self) -> None:
        """Somebody looked at worker ids; where batches are shared no sample has a worker."""

    def abandon(self) -> list[Command]:
        """Forget what was not delivered; workers and leases stay. Unread parts are recalled."""
        for batch in self.tasks.values():
            assert isinstance(batch, Batch)
            if batch.writers:
                batch.abandoned = True
                for part in batch.parts:
                    part.abandoned = True
        self._loose.clear()
        self._probing = None
        shared = {batch.seq for batch in self.tasks.values() if batch.abandoned}
        for seq in shared:  # their space comes back with their last writer
            del self.tasks[seq]
        return super().abandon()

    # ---- what happens to a batch

    def _free(self, task: Task) -> None:
        if isinstance(task, Part):
            batch = task.batch
            batch.writers -= 1
            if batch.abandoned and not batch.writers:
                super()._free(batch)
        else:
            super()._free(task)

    def _requeue(self, task: Task) -> None:
        """A part that its worker will not finish; or a whole batch."""
        if not isinstance(task, Part):
            super()._requeue(task)
            return
        task.worker = -1
        task.state = State.WAITING
        insort(self._loose, task, key=_by_seq)
        self._settle(task.batch)

    def _fail(self, task: Task) -> None:
        if not isinstance(task, Part):
            super()._fail(task)
            return
        task.worker = -1
        task.state = State.FAILED
        task.batch.left -= 1
        task.batch.culprit = task
        self._settle(task.batch)

    def _probed(self, batch: Batch, worker: int, layout: Layout) -> None:
        self._probing = None
        self._layout = layout
        self._served = 0
        batch.keeper = worker
        batch.parts = []
        super()._requeue(batch)

    def _settle(self, batch: Batch) -> None:
        """Once nothing more is to come of a batch: finished, failed, or to be loaded whole."""
        culprit = batch.culprit
        lowest = min((row for row, _ in batch.errors), default=batch.rows)
        if batch.spoiled is not None:
            needed = 0
        elif culprit is not None:
            needed = min(lowest, culprit.first)
        else:
            needed = lowest
        if needed < batch.rows:  # what comes after does not matter any more
            for part in [part for part in self._loose if part.batch is batch]:
                if part.first >= needed:
                    self._loose.remove(part)
                    batch.left -= 1
        if batch.left:
            return
        if batch is self._probing:
            self._probing = None
        if batch.spoiled is not None:  # then also what it raises is to be found out
            self._load_whole(batch)
            return
        if culprit is not None and culprit.first <= lowest:
            super()._free(batch)
            batch.strikes = culprit.strikes
            batch.state = State.FAILED
        elif batch.errors:
            super()._free(batch)
            batch.culprit = None
            batch.state = State.FILLED
            batch.result = min(batch.errors, key=lambda error: error[0])[1]
        else:
            if batch.layout is self._layout:
                self._served += 1
                if self._served > 1:
                    self._misfits = max(0.0, self._misfits - 0.5)
            batch.state = State.FILLED
            batch.result = batch.filled
        self._filled[batch.seq] = batch

    def _load_whole(self, batch: Batch) -> None:
        super()._free(batch)
        batch.whole = True
        batch.parts = []
        batch.filled = {}
        batch.errors = []
        batch.culprit = None
        if not batch.outdated:
            self._misfits += 1
        elif batch.layout is self._layout:  # else it was begun before the change was known
            if self._served < _WORTH_IT:
                self._misfits += 1
            self._layout = None
            self._served = 0
        if self._misfits >= MAX_MISFITS and self.given_up is None:
            self.given_up = batch.spoiled
        super()._requeue(batch)

    # ---- who gets what

    def _pump(self) -> list[Command]:
        out: list[Command] = []
        if self._loose:
            self._assign_loose(out)
        out += super()._pump()
        return out

    def _grant_parked(self, out: list[Command]) -> None:
        """As ``Dispatch`` does it; a shared head waits for several workers."""
        awaited = self._awaited()
        blocked: set[int] = set()
        if isinstance(awaited, Batch):
            blocked = {part.worker for part in awaited.parts if part.worker >= 0}
            blocked.add(awaited.worker)
        for task in self._parked.copy():
            if self._place(task, task.need, task.abandoned or task.worker in blocked):
                self._parked.remove(task)
                task.state = State.ASSIGNED
                self.workers[task.worker].proof = task.seq
                out.append(Grant(task.worker, task))

    def _assign_waiting(self, out: list[Command]) -> None:
        begun = len(out)
        while self._waiting and not self._loose:
            if self.given_up is not None:
                for waiting in self._waiting:
                    assert isinstance(waiting, Batch)
                    waiting.whole = True
                super()._assign_waiting(out)
                break
            batch = self._waiting[0]
            assert isinstance(batch, Batch)
            urgent = batch is self._awaited()
            if batch.whole:
                if not self._assign_whole(batch, urgent, out):
                    break
            elif self._layout is None:
                if self._probing is not None:
                    break
                self._probe(batch)
                self._assign_loose(out)
            elif not self._open(batch, urgent):
                break
            else:
                self._assign_loose(out)
        if self._parked and len(out) > begun:
            self._grant_parked(out)  # the head may stand behind one of them now

    def _assign_whole(self, batch: Batch, urgent: bool, out: list[Command]) -> bool:
        worker = self._choose(batch, True)
        assert worker is not None
        nbytes = self._estimate(batch, urgent)
        batch.asks = not nbytes
        if nbytes and not self._place(batch, nbytes, urgent):
            return False
        self._waiting.popleft()
        batch.state = State.ASSIGNED
        batch.worker = worker.id
        worker.queue.append(batch)
        out.append(Assign(worker.id, batch))
        return True

    def _probe(self, batch: Batch) -> None:
        self._probing = batch
        self._begin(batch, [0, 1], probe=True)

    def _open(self, batch: Batch, urgent: bool) -> bool:
        """Reserve what the batch takes, and cut it into parts."""
        layout = self._layout
        assert layout is not None
        nbytes = layout.nbytes(batch.rows)
        if not urgent and self._too_many(nbytes):
            return False
        if nbytes > self.largest:
            self._see(nbytes)
        if nbytes:
            if not self._place(batch, nbytes, urgent):
                return False
            if batch.extent is None:  # memory of its own, which only one worker can have
                batch.whole = True
                return True
        batch.layout = layout
        count = min(batch.rows, PARTS_A_WORKER * len(self._active))
        self._begin(batch, [batch.rows * part // count for part in range(count + 1)])
        return True

    def _begin(self, batch: Batch, bounds: list[int], probe: bool = False) -> None:
        self._waiting.popleft()
        batch.state = State.ASSIGNED
        batch.left = len(bounds) - 1
        assert isinstance(batch.payload, tuple)
        epoch, position, indices = batch.payload
        for first, end in pairwise(bounds):
            payload = (epoch, position, indices[first:end])
            part = Part(self._next_seq, payload, -1, batch=batch, first=first, count=end - first)
            part.probe = probe
            self._next_seq += 1
            batch.parts.append(part)
        self._loose += batch.parts

    def _too_many(self, nbytes: int) -> bool:
        """Would another batch be more than is worth its memory?

        While workers start, one batch is enough: those that are up take parts of it over from
        those that are not.
        """
        begun = len(self.tasks) - len(self._waiting)
        if not begun:
            return False
        if not all(worker.ready for worker in self._active):
            return True
        if begun + min(len(self._leases), self._share_lead) <= self._share_lead:
            return False
        return begun >= self._ahead or self.used_bytes + nbytes > rules.SMALL_BYTES

    def _assign_loose(self, out: list[Command]) -> None:
        """To whoever has fewest rows before him, and can lose them again.

        What lies behind an unread message that is no batch can't be recalled. So a worker that is
        not done with an epoch that is over, or that is to be started anew, gets nothing before it
        has spoken: it may be stuck.
        """
        crew = [w for w in self._active if w.proof == ALL_BATCHES or (w.ready and not w.queue)]
        if not crew:
            return
        loads = [sum(map(_rows, w.queue)) + (0.0 if w.ready else 0.5) for w in crew]
        for part in self._loose:
            at = loads.index(min(loads))
            keeper = part.batch.keeper
            if part.first == 0 and keeper >= 0:
                at = next((n for n, worker in enumerate(crew) if worker.id == keeper), at)
                part.batch.keeper = -1
            worker = crew[at]
            loads[at] += part.count
            part.state = State.ASSIGNED
            part.worker = worker.id
            part.batch.writers += 1
            worker.queue.append(part)
            out.append(Assign(worker.id, part))
        self._loose.clear()

    def _steal(self, out: list[Command]) -> None:
        """As ``Dispatch`` does it, but from a worker that is not up also the only part."""
        idle = sum(worker.ready and not worker.queue for worker in self._active)
        if not idle:
            return
        unread = []
        for worker in self.workers:
            queue = worker.queue
            stands = worker.proof == ALL_BATCHES and not worker.missed
            if stands and len(queue) > worker.ready:
                unread.append((queue[int(worker.ready)].seq, worker.id))
        out.extend(Recall(worker) for _, worker in sorted(unread)[:idle])


def _rows(task: Task) -> int:
    return task.count if isinstance(task, Part) else task.rows if isinstance(task, Batch) else 0
