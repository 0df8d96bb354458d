"""Which worker fills which batch, and with how much space: the loader's one state machine.

Pure: events come in as method calls, commands go out as a list; no clock, process, socket or
memory is touched here. The promise of the whole engine is kept in this file:

    reserved + filled + leased bytes <= budget, and the head of the line always gets on.

The progress rule behind the second half. Granting space greedily deadlocks: later batches fill
the budget, then the head needs more than is left. So a batch that the caller does not wait for
is granted space only while the largest batch seen would still fit beside it, a batch is leased
to the caller only while the largest batch would still fit beside all leases (otherwise it is
copied out), and a head that still can't be placed goes to memory of its own, counted as
overdraft. A batch that stands before the head in its worker's queue has the head's rights: the
head waits for it.

How far ahead. Every worker may have a batch at hand, and one more is kept ready; beyond that,
batches are loaded ahead (up to ``ahead``) while they are small together, or once the caller had
to wait for a batch that was held back for thrift. Prefetching what nobody waits for costs memory
and gains nothing. Where a batch takes less time than waking a worker is worth (``brisk``),
nothing is given out while half of the window is finished, and then several at once.

Who gets a batch. Batches go to workers in turn, as in torch. Unless identity matters
(``pinned``: iterable datasets, a ``worker_init_fn``, a dataset that looked at its worker id), a
worker that has less to do is preferred, and a batch that waits behind a slow one is recalled
and given to an idle worker.

Resizing. Workers and budget may change at any moment. A worker too many finishes what it has begun
and retires; one that is wanted again before that simply stays, one that is wanted after it was told
to exit is started anew once it is gone. A smaller budget binds every new grant at once; what was
taken before stays until it is let go, and what becomes free beyond the bound is given back.

Known slow ones start early. A batch may be submitted out of its turn, numbered by its place: it
is given to a worker at once, and what it fills is kept until its turn comes. The caller never
waits for one of these (``head_task`` does not know them before their turn), so they have no
rights of a head. They may take up half of the workers, a quarter of the window and a quarter of the
budget (``early_room``); thrift counts the others only.

Who may write. An extent stays reserved until the worker it was given to has finished the batch,
never read it (recalled) or is dead: also when the batch was abandoned meanwhile.
"""

from __future__ import annotations

import sys
from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter

from stoker.loader.extents import Extent, ExtentMap, page_ceil, page_floor
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

SMALL_BYTES = 64 << 20
"""While all that is in flight takes no more than this, loading ahead is not held back."""

MAX_STRIKES = 3
"""A batch that has brought down this many workers is an error, not bad luck."""

ALL_BATCHES = -1
_by_seq = attrgetter("seq")


@dataclass(slots=True, eq=False)
class _Worker:
    """What is known of one worker. ``queue`` is what it was sent and has not finished.

    ``proof``: the last message that was no batch (an epoch, a grant) is certain to be read once
    the worker has spoken of a batch with at least this number. Until then nothing can be
    recalled, since the oldest unread message may be that one.
    """

    id: int
    ready: bool = False
    retired: bool = False
    gone: bool = False  # retired or not: there is no such process
    exhausted: bool = False
    missed: bool = False  # a recall found nothing unread, and no batch was finished since
    proof: int = ALL_BATCHES
    queue: deque[Task] = field(default_factory=deque)


def _load(worker: _Worker) -> int:
    return len(worker.queue) + (not worker.ready)


class Dispatch:
    """The state machine. Every event method returns the commands it leads to."""

    def __init__(
        self,
        *,
        workers: int,
        budget: int,
        window: int,
        ahead: int | None = None,
        in_order: bool = True,
        pinned: bool = False,
        cautious: bool = False,
        region: int | None = None,
    ) -> None:
        """``region`` (default: the budget) is the most that the budget may ever become.

        ``window`` is how many batches are outstanding at most (the caller submits no more).

        ``ahead`` (default: the same) bounds those loaded ahead where they are not small.
        ``cautious``: give out only the head until the size of a batch is known.
        """
        self.extents = ExtentMap(max(page_floor(budget), 0), region)
        self.budget = self.extents.capacity
        self.in_order = in_order
        self.pinned = True
        self._trial = not pinned  # until the first batch shows whether identity matters
        self.cautious = cautious
        self.brisk = False
        """Batches take less time than waking a worker is worth: give out several at once."""
        self.workers = [_Worker(i) for i in range(workers)]
        self.tasks: dict[int, Task] = {}  # outstanding, by number
        self.largest = 0
        self.leased_bytes = 0
        self.peak_bytes = 0
        self._wanted = workers
        self._active = self.workers.copy()  # those of the wanted that are there
        self._leaving: list[_Worker] = []  # beyond the active limit, with batches to finish
        self._reserve = 0
        self._varied = False
        self._next_seq = 0  # of the next batch in line
        self._early: set[int] = set()  # numbers given out beyond it
        self._oldest = 0  # no batch before this number is outstanding
        self._turn = 0
        self._depth = max(1, -(-window // max(1, workers)))
        self._window = window
        self._ahead = window if ahead is None else ahead
        self._lead = min(self._ahead, workers + 1)
        self._sized = False
        self._waiting: deque[Task] = deque()  # by number
        self._parked: list[Task] = []  # by number
        self._filled: dict[int, Task] = {}  # by time
        self._leases: dict[int, Extent] = {}

    # ---- what a caller may ask

    @property
    def active_limit(self) -> int:
        """How many workers there are to be: those with a lower id, but for one still leaving."""
        return self._wanted

    @property
    def used_bytes(self) -> int:
        """Reserved, filled and leased bytes; more than the budget only after it was lowered."""
        return self.budget - self.extents.free_bytes

    @property
    def outstanding(self) -> int:
        """Batches submitted and not yet delivered."""
        return len(self.tasks)

    @property
    def ready(self) -> int:
        """Batches finished and not yet delivered."""
        return len(self._filled)

    @property
    def any_active(self) -> bool:
        """Is there a worker that can still produce?"""
        # The first says it all but always, and this is asked of every batch.
        return not self._active[0].exhausted or any(not w.exhausted for w in self._active)

    @property
    def deliverable(self) -> bool:
        """Would ``deliver`` return a batch now?"""
        return self._next_delivery() is not None

    def head_task(self) -> Task | None:
        """The batch that the caller waits for (in order), or the oldest one."""
        tasks = self.tasks
        if not tasks:
            return None
        while self._oldest not in tasks:  # every number passed over is gone for good
            if self._oldest >= self._next_seq:
                return None  # what is outstanding was started early, and it is not its turn
            self._oldest += 1
        return tasks[self._oldest]

    @property
    def early_room(self) -> bool:
        """May another batch be started before its turn?

        Only in order (else nobody waits for a slow one), where any worker may load it (and more
        than one is there), and once the size of a batch is known.
        """
        count = len(self._early) + 1
        return (
            self.in_order
            and not self.pinned
            and not self.cautious
            and self._sized
            and 2 * count <= len(self._active)
            and 4 * count <= self._window
            and 4 * count * self._reserve <= self.budget
        )

    def stuck_task(self) -> Task | None:
        """What its worker should be asked about when the caller waits too long."""
        return self.head_task()

    # ---- events

    def submit(self, payload: object, ahead: int = 0) -> list[Command]:
        """A batch of indices was drawn: the next in line, or one so many places ahead of it.

        The places between are filled by later calls; that of an early one is passed over then.
        """
        if ahead:
            return self._submit_early(payload, ahead)
        task = Task(self._next_seq, payload, self._next_home())
        self._next_seq += 1
        self.tasks[task.seq] = task
        if self._early:
            self._pass_over_early()
            self._queue_up(task)
        else:
            self._waiting.append(task)
        return self._pump()

    def worker_ready(self, worker: int) -> list[Command]:
        """A worker has started and reads its queue."""
        self.workers[worker].ready = True
        return self._pump_and_steal()

    def sized(self, nbytes: int) -> list[Command]:
        """The first sample of a batch says how large batches will be."""
        self._see(nbytes)
        return self._pump()

    def open_up(self) -> list[Command]:
        """Stop being cautious: the size could not be learned in time."""
        self.cautious = False
        self._sized = True
        return self._pump()

    def done(self, worker: int, seq: int, used: int, result: object) -> list[Command]:
        """A worker finished a batch that takes ``used`` bytes of its extent."""
        task = self._finish(worker, seq)
        if task is None:
            return []
        if self._trial:
            self._trial = self.pinned = False
        self._see(used)
        if used > 0 and task.extent is not None and not task.abandoned:
            task.extent = self.extents.trim(task.extent, used)
            if task.outgrown:
                self._free_outgrown(task)
        else:
            self._free(task)
        if not task.abandoned:
            task.state = State.FILLED
            task.result = result
            self._filled[seq] = task
        return self._pump_and_steal()

    def need(self, worker: int, seq: int, nbytes: int) -> list[Command]:
        """A worker found its batch larger than its extent, and waits for a larger one."""
        task = self._spoke_of(worker, seq)
        if task is None:
            return []
        self._see(nbytes)
        task.need = nbytes
        if task.extent is not None:
            task.outgrown += (task.extent,)
            task.extent = None
        task.state = State.PARKED
        insort(self._parked, task, key=_by_seq)
        return self._pump()

    def exhausted(self, worker: int, seq: int) -> list[Command]:
        """A worker's share of an iterable dataset has ended: what it was sent is void.

        It answers every void batch too, and so its extent comes back: hence also the answers
        of an epoch that is over, which say nothing about this one.
        """
        task = self._finish(worker, seq)
        if task is None:
            return []
        self._free(task)
        if not task.abandoned:
            del self.tasks[seq]
            state = self.workers[worker]
            state.exhausted = True
            for queued in state.queue:
                self._abandon(queued)
            self._rehome(worker)
        return self._pump()

    def recalled(self, worker: int, seq: int | None) -> list[Command]:
        """The answer to ``Recall``: the batch that was taken back, or None."""
        state = self.workers[worker]
        if seq is None:
            state.missed = True
            return self._pump_and_steal()
        task = next(task for task in state.queue if task.seq == seq)
        state.queue.remove(task)
        self._free(task)
        if not task.abandoned:
            self._requeue(task)
        elif state.queue:
            return [Recall(worker), *self._pump()]
        if worker >= self._wanted and len(state.queue) > 1:
            return [Recall(worker), *self._pump_and_steal()]
        return self._pump_and_steal()

    def died(self, worker: int, *, strike: bool = True, respawn: bool = True) -> list[Command]:
        """A worker is confirmed dead: its extents are free, its batches go to others."""
        state = self.workers[worker]
        self._bury(state, strike)
        out: list[Command] = []
        if respawn and worker < self._wanted:
            out.append(Spawn(worker))
        else:
            state.gone = True
        return out + self._pump_and_steal()

    def left(self, worker: int) -> list[Command]:
        """A retired worker is gone. It may be wanted again by now."""
        state = self.workers[worker]
        self._bury(state, strike=False)
        state.gone = True
        return self._staff([])

    def all_died(self) -> list[Command]:
        """Every worker is confirmed dead, through no fault of a batch: start them again."""
        for state in self.workers:
            self._bury(state, strike=False)
            if state.retired or state.id >= self._wanted:
                state.gone = True
        out: list[Command] = [Spawn(state.id) for state in self._active]
        return self._staff(out)

    def starved(self) -> list[Command]:
        """The caller waits. For a batch that was held back: be less thrifty from now on."""
        head = self.head_task()
        if head is None or not head.held or self._lead >= self._ahead:
            return []
        head.held = False
        self._lead = min(self._ahead, self._lead + len(self._active))
        return self._pump()

    def release(self, start: int) -> list[Command]:
        """The caller let go of a leased (or copied) extent."""
        extent = self._leases.pop(start)
        self.leased_bytes -= extent.size
        self.extents.free(extent)
        return self._pump()

    def deliver(self) -> Delivery | None:
        """Hand out the next finished batch, if there is one. Call ``pump`` afterwards."""
        task = self._next_delivery()
        if task is None:
            return None
        del self._filled[task.seq]
        del self.tasks[task.seq]
        extent = task.extent
        if extent is None:
            return Delivery(task, How.PLAIN)
        self._leases[extent.start] = extent
        self.leased_bytes += extent.size
        fits = self.leased_bytes + self._reserve <= self.budget
        return Delivery(task, How.LEASE if fits else How.COPY)

    def pump(self) -> list[Command]:
        """Give out whatever can be given out now."""
        return self._pump()

    def limit_active(self, workers: int) -> list[Command]:
        """Work with this many workers at most (never below one); the others retire.

        Also where batches are pinned: they move to the workers that are left, in turn.
        """
        self._wanted = max(1, min(self._wanted, workers))
        return self._staff([])

    def set_active(self, workers: int, window: int, ahead: int) -> list[Command]:
        """Work with this many workers from now on, and as many batches ahead.

        Not where batches are pinned: who adds or takes workers there changes what they load.
        """
        self._wanted = max(1, workers)
        while len(self.workers) < self._wanted:
            self.workers.append(_Worker(len(self.workers), retired=True, gone=True))
        self._depth = max(1, -(-window // self._wanted))
        self._window = window
        self._ahead = ahead
        self._lead = min(ahead, max(self._lead, self._wanted + 1))
        return self._staff([])

    def set_budget(self, nbytes: int) -> list[Command]:
        """Bound what is in flight by this many bytes from now on (the region at most)."""
        self.extents.resize(max(page_floor(nbytes), 0))
        self.budget = self.extents.capacity
        return self._pump()

    def pin(self) -> None:
        """From now on every batch stays with its worker: somebody looked at worker ids."""
        self.pinned = True
        self._trial = False

    def abandon(self) -> list[Command]:
        """Forget what was not delivered; workers and leases stay. Unread batches are recalled."""
        for task in list(self.tasks.values()):
            if task.worker >= 0:
                self._abandon(task)
            else:
                self._free(task)
        self.tasks.clear()
        self._next_seq = max(self._early, default=self._next_seq - 1) + 1
        self._early.clear()
        self._waiting.clear()
        self._filled.clear()
        out = self._pump()
        out += [Recall(w.id) for w in self.workers if w.queue and w.proof == ALL_BATCHES]
        return out

    def begin_epoch(self) -> None:
        """Every worker was sent word of a new epoch, which no recall may take away."""
        self._turn = 0
        for state in self.workers:
            state.exhausted = False
            state.proof = self._next_seq

    def go_on_at(self, turn: int, exhausted: frozenset[int]) -> None:
        """The next batch is this worker's (in turn); shares of some workers are over already."""
        self._turn = turn
        for worker in exhausted:
            self.workers[worker].exhausted = True

    # ---- what happens to a batch

    def _spoke_of(self, worker: int, seq: int) -> Task | None:
        """The batch that a worker speaks of; None if it is not among those it was sent."""
        state = self.workers[worker]
        if state.proof <= seq:
            state.proof = ALL_BATCHES
        for task in state.queue:
            if task.seq == seq:
                return task
        return None

    def _finish(self, worker: int, seq: int) -> Task | None:
        task = self._spoke_of(worker, seq)
        if task is not None:
            state = self.workers[worker]
            state.missed = False
            state.queue.remove(task)
            task.worker = -1
            if task.state is State.PARKED:
                self._parked.remove(task)
        return task

    def _bury(self, state: _Worker, strike: bool) -> None:
        victims, state.queue = state.queue, deque()
        if victims and strike and state.ready:  # it had begun the first
            victims[0].strikes += 1
        state.ready = False
        state.missed = False
        state.proof = 0  # its successor may be told the epoch first
        for task in victims:
            if task.state is State.PARKED:
                self._parked.remove(task)
            self._free(task)
            if task.abandoned:
                continue
            if task.strikes >= MAX_STRIKES:
                self._fail(task)
            else:
                self._requeue(task)

    def _fail(self, task: Task) -> None:
        task.worker = -1
        task.state = State.FAILED
        self._filled[task.seq] = task

    def _abandon(self, task: Task) -> None:
        """Nobody wants it any more; its space comes back when its worker is done with it."""
        task.abandoned = True
        self.tasks.pop(task.seq, None)

    def _rehome(self, worker: int) -> None:
        """Batches that wait for an exhausted worker: void in order, another's out of order."""
        kept: deque[Task] = deque()
        for task in self._waiting:
            if task.home != worker:
                kept.append(task)
            elif self.in_order or not self.any_active:
                del self.tasks[task.seq]
            else:
                task.home = self._next_home()
                kept.append(task)
        self._waiting = kept

    def _requeue(self, task: Task) -> None:
        task.state = State.WAITING
        task.worker = -1
        self._queue_up(task)

    def _queue_up(self, task: Task) -> None:
        if self._waiting and self._waiting[-1].seq > task.seq:
            insort(self._waiting, task, key=_by_seq)
        else:
            self._waiting.append(task)

    def _free_outgrown(self, task: Task) -> None:
        for extent in task.outgrown:
            self.extents.free(extent)
        task.outgrown = ()

    def _free(self, task: Task) -> None:
        self._free_outgrown(task)
        if task.extent is not None:
            self.extents.free(task.extent)
            task.extent = None

    def _next_delivery(self) -> Task | None:
        if not self._filled:
            return None
        if self.in_order:
            head = self.head_task()
            return head if head is not None and head.seq in self._filled else None
        return next(iter(self._filled.values()))

    # ---- space

    def _see(self, nbytes: int) -> None:
        self._sized = True
        if nbytes <= 0 or nbytes == self.largest:
            return
        self.cautious = False
        if self.largest:
            self._varied = True
        if nbytes > self.largest:
            self.largest = nbytes
            self._reserve = page_ceil(nbytes)

    def _awaited(self) -> Task | None:
        """The batch without which the caller can't get on, or None while he can.

        Out of order nothing waits for a particular batch, but one must always get on: the
        oldest, while none is finished.
        """
        if self._filled and not self.in_order:
            return None
        return self.head_task()

    def _place(self, task: Task, nbytes: int, urgent: bool) -> bool:
        """Reserve space for the task; an urgent one that finds none gets memory of its own."""
        # Bytes are compared, not gaps: in simulated runs with varied sizes, demanding one gap
        # for the largest batch led to no less overdraft here, and to more copies for leases.
        if urgent or self.extents.free_bytes - page_ceil(nbytes) >= self._reserve:
            task.extent = self.extents.allocate(nbytes)
        if task.extent is None:
            return urgent
        self.peak_bytes = max(self.peak_bytes, self.budget - self.extents.free_bytes)
        return True

    def _estimate(self, task: Task, urgent: bool) -> int:
        """How much to reserve before a batch's size is known."""
        if task.need:
            return task.need
        if self._varied and not urgent:
            # Asking again costs a worker a copy. The head is not padded: what is kept free
            # for it is the largest batch, and no more.
            return self.largest + (self.largest >> 3)
        return self.largest

    # ---- who gets what

    def _staff(self, out: list[Command]) -> list[Command]:
        """Start those that are wanted and gone; the others of the wanted go on, the rest leaves."""
        for state in self.workers[: self._wanted]:
            if state.retired and state.gone:
                state.retired = state.gone = state.exhausted = False
                state.proof = 0  # it may be told the epoch first
                out.append(Spawn(state.id))
        self._active = [state for state in self.workers[: self._wanted] if not state.retired]
        self._leaving = [state for state in self.workers[self._wanted :] if not state.retired]
        out += self._pump()
        if not self.pinned:  # what it has not read, it need not finish
            out += [
                Recall(state.id)
                for state in self._leaving
                if len(state.queue) > 1 and state.proof == ALL_BATCHES
            ]
        return out

    def _next_home(self) -> int:
        count = len(self._active)
        for _ in range(count):
            home = self._turn % count
            self._turn += 1
            if not self._active[home].exhausted:
                return home
        raise ValueError("submit() after every worker was exhausted")

    def _choose(self, task: Task, urgent: bool) -> _Worker | None:
        """A worker with room in its queue. An urgent batch does not wait for room."""
        active = self._active
        count = len(active)
        room = sys.maxsize if urgent else self._depth
        home = active[task.home % count]
        if self.pinned:
            if self.in_order:
                return home
            for step in range(count):  # as torch: the next in turn that has room in its queue
                worker = active[(home.id + step) % count]
                if not worker.exhausted and len(worker.queue) < room:
                    return worker
            return None
        chosen = None
        least = room
        load = len(home.queue)
        if load < room:
            chosen = home
            least = load + (not home.ready)
        if least:
            for worker in active:
                load = len(worker.queue)
                if load < room and load + (not worker.ready) < least:
                    chosen = worker
                    least = load + (not worker.ready)
        return chosen

    def _pump(self) -> list[Command]:
        out: list[Command] = []
        if self.extents.beyond:
            out.append(GiveBack(self.extents.beyond))
            self.extents.beyond = []
        if self._parked:
            self._grant_parked(out)
        if self._waiting:
            self._assign_waiting(out)
        if self._leaving:
            self._retire_idle(out)
        return out

    def _pump_and_steal(self) -> list[Command]:
        out = self._pump()
        if not self.pinned:
            self._steal(out)
        return out

    def _grant_parked(self, out: list[Command]) -> None:
        awaited = self._awaited()
        # A parked batch is the first of its worker: whatever else that one has stands behind.
        blocked = -1 if awaited is None else awaited.worker
        for task in self._parked.copy():
            if self._place(task, task.need, task.abandoned or task.worker == blocked):
                self._parked.remove(task)
                task.state = State.ASSIGNED
                self.workers[task.worker].proof = task.seq
                out.append(Grant(task.worker, task))

    def _assign_waiting(self, out: list[Command]) -> None:
        awaited = self._awaited()
        while self._waiting:
            task = self._waiting[0]
            urgent = task is awaited
            if not urgent and (self.cautious or (self.brisk and self._plenty)):
                return
            worker = self._choose(task, urgent)
            if worker is None or not (urgent or self._sized or not worker.queue):
                return  # before sizes are known one batch a worker has to ask, no more
            nbytes = self._estimate(task, urgent)
            if not urgent and self._hold_back(task, nbytes):
                return
            task.asks = not nbytes
            if nbytes and not self._place(task, nbytes, urgent):
                return
            self._waiting.popleft()
            task.state = State.ASSIGNED
            task.worker = worker.id
            worker.queue.append(task)
            if self.pinned and not self.in_order:
                self._turn = worker.id + 1
            out.append(Assign(worker.id, task))
            if urgent and self._parked:
                self._grant_parked(out)  # it may stand behind one of them now

    def _pass_over_early(self) -> None:
        while self._next_seq in self._early:
            self._early.remove(self._next_seq)
            self._next_seq += 1
            self._turn += 1

    def _submit_early(self, payload: object, ahead: int) -> list[Command]:
        """Give it to the worker with least to do; it queues up if there is no space.

        Or if identity may matter, or sizes are unknown: as after an interruption, when batches
        that were early before are submitted to workers that start anew.
        """
        home = (self._turn + ahead) % len(self._active)  # as if all before it had been submitted
        task = Task(self._next_seq + ahead, payload, home)
        self.tasks[task.seq] = task
        self._early.add(task.seq)
        nbytes = self._estimate(task, urgent=False)
        free = not (self.pinned or self.cautious) and self._sized
        if not free or (nbytes and not self._place(task, nbytes, urgent=False)):
            self._queue_up(task)
            return self._pump()
        worker = min(self._active, key=_load)
        task.asks = not nbytes
        task.state = State.ASSIGNED
        task.worker = worker.id
        worker.queue.append(task)
        return [Assign(worker.id, task)]

    @property
    def _plenty(self) -> bool:
        """Is half of what may be outstanding finished? Then a worker need not be woken yet."""
        return 2 * len(self._filled) > self._window

    def _hold_back(self, task: Task, nbytes: int) -> bool:
        """Is it thrifty to let this one wait until another was delivered?"""
        if len(self.tasks) - len(self._waiting) - len(self._early) < self._lead:
            return False
        used = self.budget - self.extents.free_bytes
        if used + nbytes <= SMALL_BYTES:
            return False
        task.held = True
        return True

    def _retire_idle(self, out: list[Command]) -> None:
        for worker in self._leaving:
            if not worker.queue:
                worker.retired = True
                out.append(Retire(worker.id))
        self._leaving = [worker for worker in self._leaving if not worker.retired]

    def _steal(self, out: list[Command]) -> None:
        """For each idle worker, recall one batch that waits behind another.

        This ends: a recall either gives an idle worker something to do or leaves one batch
        fewer in a queue, and one that finds nothing is repeated only after a finished batch.
        """
        idle = 0
        for worker in self._active:
            if not worker.queue and worker.ready:
                idle += 1
        if not idle:
            return
        rich = [
            worker
            for worker in self.workers
            if len(worker.queue) > 1 and worker.proof == ALL_BATCHES and not worker.missed
        ]
        rich.sort(key=lambda worker: worker.queue[1].seq)
        out.extend(Recall(worker.id) for worker in rich[:idle])
