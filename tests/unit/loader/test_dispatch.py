"""Dispatch never deadlocks, never hands out bytes twice, and delivers every batch once.

Most of it is a simulation: `World` is a trainer and its workers without processes or memory. Its
trainer does what `engine` does, its pipes keep messages in order, its workers behave as `worker`
does (one that waits for a grant reads on and keeps the batches it meets). A list of numbers says
what happens next, so that a failure shrinks to a short story.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.loader import dispatch as dispatch_module
from stoker.loader.dispatch import MAX_STRIKES, SMALL_BYTES, Dispatch
from stoker.loader.extents import PAGE_BYTES, Extent
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

PAGE = PAGE_BYTES
REGION = 64 * PAGE
BUDGETS = [0, 1, 2, 3, 5, 8, 16, 64]


class Deadlock(AssertionError):
    """The caller waits, and nothing is left that could happen."""


@dataclass(frozen=True)
class Setup:
    """One loader, and what its batches are like."""

    workers: int = 2
    window: int = 4
    budget: int = 16 * PAGE
    in_order: bool = True
    pinned: bool = False
    iterable: bool = False
    cautious: bool = False
    batches: int = 12
    """In each epoch; for an iterable dataset, of each worker."""
    epochs: int = 1
    sizes: tuple[int, ...] = (PAGE,)
    """Bytes of the batch at each position, over and over."""
    deadly: frozenset[int] = frozenset()
    """Positions that kill every worker that begins them."""
    deaths: int = 0
    """Workers that die for no reason, at any moment."""
    limits: int = 0
    """How often the number of active workers is lowered by one."""
    looks: bool = False
    """The dataset looks at its worker id, from some batch on."""
    ahead: int | None = None
    """How many batches are loaded ahead at most where they are not small."""
    small: int = SMALL_BYTES
    """What is small."""
    resizes: int = 0
    """How often the number of workers and the budget are changed."""
    slow: frozenset[int] = frozenset()
    """Positions that may be submitted before their turn."""
    brisk: bool = False
    """Batches take next to no time: several are given out at once."""
    keeps: int = 0
    """Out of 4 delivered batches, how many the caller never lets go of."""

    def size(self, position: int) -> int:
        return self.sizes[position % len(self.sizes)]


@dataclass
class Worker:
    """One incarnation of a worker: reads its pipe, writes into extents, speaks."""

    id: int
    pipe: deque[tuple[Any, ...]] = field(default_factory=deque)
    said: deque[tuple[Any, ...]] = field(default_factory=deque)
    kept: deque[tuple[Any, ...]] = field(default_factory=deque)
    alive: bool = True
    ready: bool = False
    task: tuple[Any, ...] | None = None
    room: int = 0
    asks: int = 0  # bytes it waits for; 0 while it does not wait
    own: bool = False
    epoch: int = 0
    produced: int = 0


class World:
    """A trainer that does what `engine` does, with simulated workers."""

    def __init__(self, setup: Setup, dispatch: type[Dispatch] = Dispatch) -> None:
        self.setup = setup
        self.dispatch = dispatch(
            workers=setup.workers,
            budget=setup.budget,
            window=setup.window,
            in_order=setup.in_order,
            pinned=setup.pinned or setup.iterable,
            cautious=setup.cautious,
            ahead=setup.ahead,
            region=REGION,
        )
        self.dispatch.brisk = setup.brisk
        self.window = setup.window
        self.most_workers = setup.workers
        self.most_budget = self.dispatch.budget
        self.used_bytes = 0
        self.resizes_left = setup.resizes
        self.crew = [Worker(i) for i in range(setup.workers)]
        self.epoch = 0
        self.position = 0
        self.early: set[int] = set()
        self.deaths_left = setup.deaths
        self.limits_left = setup.limits
        self.held: list[int] = []
        self.got: list[Any] = []
        self.writers: dict[int, tuple[Worker, list[Extent]]] = {}  # seq -> who may write where
        self.deaths_of: Counter[tuple[int, int]] = Counter()
        self.recalls = 0
        self.chances = 0
        self.random = random.Random(0)

    # ---- the trainer

    def act(self, commands: list[Command]) -> None:
        waves = 0
        while commands:
            waves += 1
            assert waves <= self.most_waves, "recalls without end"
            more: list[Command] = []
            for command in commands:
                if isinstance(command, GiveBack):
                    self.give_back(command.extents)
                    continue
                while command.worker >= len(self.crew):
                    self.crew.append(Worker(len(self.crew), alive=False))
                worker = self.crew[command.worker]
                state = self.dispatch.workers[command.worker]
                if isinstance(command, Assign):
                    assert not state.retired, "a batch for a retired worker"
                    assert command.worker < self.dispatch.active_limit
                    self.may_write(worker, command.task)
                    self.send(worker, command.task)
                elif isinstance(command, Grant):
                    self.may_write(worker, command.task)
                    worker.pipe.append(("grant", command.task.seq, command.task.extent))
                elif isinstance(command, Recall):
                    self.recalls += 1
                    message = worker.pipe.popleft() if worker.pipe else None
                    assert message is None or message[0] == "task", f"recalled a {message}"
                    seq = None if message is None else message[1]
                    if seq is not None:
                        del self.writers[seq]
                    more += self.dispatch.recalled(command.worker, seq)
                    self.check()
                elif isinstance(command, Spawn):
                    assert not worker.alive, "spawned beside a living worker"
                    assert not worker.said, "spawned before the end of the last one was known"
                    assert not state.retired
                    fresh = self.crew[command.worker] = Worker(command.worker)
                    if self.epoch:
                        fresh.pipe.append(("epoch", self.epoch))
                else:
                    assert isinstance(command, Retire)
                    assert not worker.task or not worker.alive
                    worker.pipe.append(("exit",))
            commands = more

    @property
    def most_waves(self) -> int:
        return 2 * self.window + self.dispatch.outstanding + self.most_workers + 2

    def give_back(self, extents: list[Extent]) -> None:
        """Pages go back to the system: nobody may have any of them."""
        free = self.dispatch.extents.blocks()
        for extent in extents:
            assert extent.size > 0
            for _, taken in self.writers.values():
                for other in taken:
                    assert extent.end <= other.start or other.end <= extent.start
            for lease in self.dispatch._leases.values():
                assert extent.end <= lease.start or lease.end <= extent.start
            if extent.start >= self.dispatch.budget:
                assert any(b.start <= extent.start and extent.end <= b.end for b in free)

    def send(self, worker: Worker, task: Task) -> None:
        extent = Extent(0, 0) if task.asks else task.extent
        worker.pipe.append(("task", task.seq, extent, self.epoch, task.payload))

    def may_write(self, worker: Worker, task: Task) -> None:
        """A worker is told to use an extent: nobody else may be using any byte of it."""
        extent = task.extent
        if extent is not None:
            for other, extents in self.writers.values():
                for taken in extents:
                    assert extent.end <= taken.start or taken.end <= extent.start, (
                        f"{worker.id} was given {extent}, but {other.id} may write {taken}"
                    )
        extents = self.writers.setdefault(task.seq, (worker, []))[1]
        if extent is not None:
            extents.append(extent)

    def hear(self, worker: Worker) -> None:
        """Handle one thing that a worker said."""
        said = worker.said.popleft()
        dispatch = self.dispatch
        if said[0] == "done":
            _, seq, used, result, looked = said
            if looked:
                dispatch.pin()
            self.writers.pop(seq, None)
            self.chances += 1
            self.act(dispatch.done(worker.id, seq, used, result))
        elif said[0] == "need":
            self.act(dispatch.need(worker.id, said[1], said[2]))
        elif said[0] == "sized":
            self.act(dispatch.sized(said[1]))
        elif said[0] == "ready":
            self.chances += 1
            self.act(dispatch.worker_ready(worker.id))
        elif said[0] == "end":
            self.writers.pop(said[1], None)
            self.act(dispatch.exhausted(worker.id, said[1]))
        else:
            assert said[0] == "exited"
            self.bury(worker)
        self.check()

    def bury(self, worker: Worker) -> None:
        state = self.dispatch.workers[worker.id]
        if state.retired:
            self.act(self.dispatch.left(worker.id))
            return
        self.forget(worker)
        if state.queue and state.ready and not state.queue[0].abandoned:
            self.deaths_of[self.key(state.queue[0])] += 1
        strike = True
        if self.limits_left and self.random.random() < 0.5 and self.dispatch.active_limit > 1:
            # As engine does where workers are killed for lack of memory.
            if state.queue and state.ready and not state.queue[0].abandoned:
                self.deaths_of[self.key(state.queue[0])] -= 1
            self.limits_left -= 1
            self.chances += self.dispatch.outstanding
            strike = False
            self.act(self.dispatch.limit_active(self.dispatch.active_limit - 1))
            self.forget(worker)
        self.chances += 1
        self.act(self.dispatch.died(worker.id, strike=strike))

    def forget(self, worker: Worker) -> None:
        for seq in [seq for seq, (who, _) in self.writers.items() if who is worker]:
            del self.writers[seq]

    def key(self, task: Task) -> tuple[int, int]:
        assert isinstance(task.payload, tuple)
        return task.payload

    def host_dies(self) -> None:
        for worker in self.crew:
            if worker.alive:
                worker.alive = False
            while worker.said and worker.said[0][0] != "exited":
                self.hear(worker)
            worker.said.clear()
        self.writers.clear()
        self.chances += len(self.crew)
        self.act(self.dispatch.all_died())
        self.check()

    @property
    def accepting(self) -> bool:
        if not self.setup.iterable and self.line() >= self.setup.batches:
            return False
        room = self.dispatch.outstanding < self.window or self.headless
        return room and self.dispatch.any_active

    @property
    def headless(self) -> bool:
        return self.dispatch.head_task() is None

    def line(self) -> int:
        """The next position that was not submitted early."""
        while self.position in self.early:
            self.position += 1
        return self.position

    def submit(self) -> None:
        key = (self.epoch, self.line())
        self.position += 1
        self.act(self.dispatch.submit(key))
        self.check()

    def slow_ones(self) -> list[int]:
        """What could be submitted early now. Not only where there is room: see below."""
        if not self.setup.in_order or self.setup.iterable or not self.accepting or self.headless:
            return []
        slow = self.setup.slow - self.early
        return sorted(p for p in slow if self.line() < p < self.setup.batches)

    def submit_early(self, choice: int) -> None:
        if not self.dispatch.early_room and choice % 8:
            return  # else: after an interruption batches that were early before are so again
        slow = self.slow_ones()
        position = slow[choice % len(slow)]
        self.early.add(position)
        self.act(self.dispatch.submit((self.epoch, position), position - self.line()))
        self.check()

    def take(self) -> bool:
        delivery = self.dispatch.deliver()
        if delivery is None:
            self.act(self.dispatch.starved())
            self.check()
            return False
        self.accept(delivery)
        self.act(self.dispatch.pump())
        self.check()
        return True

    def accept(self, delivery: Delivery) -> None:
        task = delivery.task
        if task.state is State.FAILED:
            assert self.deaths_of[self.key(task)] >= MAX_STRIKES
            assert delivery.how is How.PLAIN
            self.got.append((*self.key(task), "failed"))
            return
        assert task.state is State.FILLED
        self.got.append(task.result)
        if delivery.how is How.PLAIN:
            assert task.extent is None
            return
        assert task.extent is not None
        if delivery.how is How.COPY:
            self.act(self.dispatch.release(task.extent.start))
        elif len(self.got) % 4 >= self.setup.keeps:
            self.held.append(task.extent.start)

    def release(self, choice: int) -> None:
        self.act(self.dispatch.release(self.held.pop(choice % len(self.held))))
        self.check()

    def new_epoch(self) -> None:
        self.epoch += 1
        self.position = 0
        self.early = set()
        self.got = []
        self.act(self.dispatch.abandon())
        for worker in self.crew:
            if not self.dispatch.workers[worker.id].retired:
                worker.pipe.append(("epoch", self.epoch))
        self.dispatch.begin_epoch()
        assert self.dispatch.outstanding == 0
        self.check()

    # ---- the workers

    def step(self, worker: Worker) -> bool:
        """One step of a worker; False if it has nothing to do."""
        if not worker.alive:
            return False
        if not worker.ready:
            worker.ready = True
            worker.said.append(("ready",))
            return True
        if worker.asks:
            return self.read_on(worker)
        if worker.task is None:
            if worker.kept:
                message = worker.kept.popleft()
            elif worker.pipe:
                message = worker.pipe.popleft()
            else:
                return False
            self.begin(worker, message)
            return True
        self.work(worker)
        return True

    def read_on(self, worker: Worker) -> bool:
        assert worker.task is not None
        if not worker.pipe:
            return False
        message = worker.pipe.popleft()
        if message[0] != "grant":
            assert message[0] != "exit"
            worker.kept.append(message)
            return True
        assert message[1] == worker.task[1], "a grant for another batch"
        if message[2] is None:
            worker.own = True
        else:
            assert message[2].size >= worker.asks
            worker.room = message[2].size
        worker.asks = 0
        return True

    def begin(self, worker: Worker, message: tuple[Any, ...]) -> None:
        if message[0] == "epoch":
            worker.epoch = message[1]
            worker.produced = 0
        elif message[0] == "exit":
            worker.alive = False
            worker.said.append(("exited",))
        else:
            assert message[0] == "task", message
            assert message[3] == worker.epoch, "a batch of one epoch was read in another"
            worker.task = message
            worker.own = message[2] is None
            worker.room = 0 if worker.own else message[2].size
            if not self.setup.iterable and message[4][1] in self.setup.deadly:
                self.die(worker)

    def work(self, worker: Worker) -> None:
        assert worker.task is not None
        _, seq, _, epoch, (_, position) = worker.task
        result: tuple[int, ...] = (epoch, position)
        if self.setup.iterable:
            if worker.produced >= self.setup.batches + worker.id:
                worker.task = None
                worker.said.append(("end", seq))
                return
            position = worker.produced
            result = (epoch, worker.id, position)
        size = self.setup.size(position)
        if size > worker.room and not worker.own:
            # Rooms grow as samples come in: first a little too small, then what it takes.
            worker.asks = size if worker.room > size // 2 else max(1, size - 1)
            worker.asks = max(worker.asks, min(size, worker.room + 1))
            worker.said.append(("need", seq, worker.asks))
            return
        worker.produced += 1
        worker.task = None
        looked = self.setup.looks and position >= 2
        worker.said.append(("done", seq, size, result, looked))

    def die(self, worker: Worker) -> None:
        worker.alive = False
        worker.said.append(("exited",))

    # ---- what must always be true

    def check(self) -> None:
        dispatch = self.dispatch
        reserved = 0
        pieces: list[Extent] = []
        tasks = {id(task): task for worker in dispatch.workers for task in worker.queue}
        tasks.update((id(task), task) for task in dispatch.tasks.values())
        for task in tasks.values():
            own = [*task.outgrown, *([task.extent] if task.extent is not None else [])]
            reserved += sum(extent.size for extent in own)
            pieces += own
        leases = list(dispatch._leases.values())
        assert dispatch.leased_bytes == sum(extent.size for extent in leases)
        assert dispatch.used_bytes == reserved + dispatch.leased_bytes
        assert 0 <= dispatch.used_bytes <= dispatch.peak_bytes <= self.most_budget
        # What is above a bound that was lowered only becomes less.
        assert dispatch.used_bytes <= max(dispatch.budget, self.used_bytes)
        self.used_bytes = dispatch.used_bytes
        pieces += leases
        pieces += dispatch.extents.blocks()
        pieces.sort()
        at = 0
        for piece in pieces:
            assert piece.start == at, "extents overlap or are lost"
            assert piece.size > 0
            at = piece.end
        assert at == max(REGION, dispatch.budget)
        assert not dispatch.extents.beyond, "free pages that nobody gives back"
        self.check_queues()

    def check_queues(self) -> None:
        dispatch = self.dispatch
        for worker in dispatch.workers:
            assert not (worker.retired and worker.queue)
            for task in worker.queue:
                assert task.worker == worker.id
                assert task.state in (State.ASSIGNED, State.PARKED)
                assert task.abandoned != (dispatch.tasks.get(task.seq) is task)
        for task in dispatch.tasks.values():
            assert not task.abandoned
            if task.worker < 0:
                assert task.state not in (State.ASSIGNED, State.PARKED)
        # Not a law of nature but the bound that rules out ping-pong.
        assert self.recalls <= 2 * self.chances + (self.epoch + 1) * (
            self.setup.window * self.most_workers + 2 * self.most_workers
        )

    # ---- running it

    def options(self, choice: int) -> list[Callable[[], object]]:
        """What can happen next."""
        options: list[Callable[[], object]] = []
        for worker in self.crew:
            if worker.said:
                options.append(partial(self.hear, worker))
            if worker.alive:
                options.append(partial(self.step, worker))
        if self.accepting:
            options.append(self.submit)
        if self.slow_ones():
            options.append(partial(self.submit_early, choice))
        if self.dispatch.outstanding:
            options.append(self.take)
        if self.held:
            options.append(partial(self.release, choice))
        if self.deaths_left and not self.setup.iterable:
            options.append(partial(self.a_worker_dies, choice))
        if self.limits_left and not self.setup.iterable:
            options.append(self.lower_limit)
        if self.resizes_left:
            options.append(partial(self.resize, choice))
        if self.epoch + 1 < self.setup.epochs and choice % 8 == 0:
            options.append(self.new_epoch)
        return options

    def a_worker_dies(self, choice: int) -> None:
        self.deaths_left -= 1
        if choice % 16 == 0:
            self.host_dies()
            return
        worker = self.crew[choice % len(self.crew)]
        if worker.alive:
            self.die(worker)

    def lower_limit(self) -> None:
        self.limits_left -= 1
        self.chances += self.dispatch.outstanding
        self.act(self.dispatch.limit_active(self.dispatch.active_limit - 1))
        self.check()

    def resize(self, choice: int) -> None:
        self.resizes_left -= 1
        dispatch = self.dispatch
        if choice & 1 and not dispatch.pinned:  # as engine does: a pinned number stays
            workers = 1 + (choice >> 1) % 7
            per = max(1, self.setup.window // self.setup.workers)
            ahead = None if self.setup.ahead is None else max(1, self.setup.ahead)
            self.window = per * workers
            self.most_workers = max(self.most_workers, workers)
            self.chances += workers + dispatch.outstanding
            self.act(dispatch.set_active(workers, self.window, ahead or self.window))
            assert dispatch.active_limit == workers
        else:
            budget = BUDGETS[(choice >> 1) % len(BUDGETS)] * PAGE
            self.most_budget = max(self.most_budget, budget)
            self.act(dispatch.set_budget(budget))
            assert dispatch.budget == budget
        self.check()

    def play(self, script: list[int]) -> None:
        for number in script:
            options = self.options(number >> 8)
            if options:
                options[number % len(options)]()

    def run_out(self) -> None:
        """From here on the caller only takes, workers only work, and nobody lets go of anything."""
        self.deaths_left = 0
        while True:
            while self.accepting:
                if self.dispatch.early_room and self.slow_ones():
                    self.submit_early(0)
                else:
                    self.submit()
            if self.take():
                continue
            if not self.dispatch.outstanding:
                return
            if not self.advance():
                raise Deadlock(f"{self.dispatch.outstanding} batches outstanding, {self.got=}")

    def advance(self) -> bool:
        moved = False
        for worker in list(self.crew):
            if worker.said:
                self.hear(worker)
                moved = True
            elif self.step(worker):
                moved = True
        return moved

    def idle_workers_finish(self) -> None:
        while self.advance():
            pass

    def check_all_delivered(self) -> None:
        setup = self.setup
        if setup.iterable:
            expected = [
                (self.epoch, worker, item)
                for worker in range(setup.workers)
                for item in range(setup.batches + worker)
            ]
            assert sorted(self.got) == sorted(expected)
            for worker in range(setup.workers):
                share = [item for _, who, item in self.got if who == worker]
                assert not setup.in_order or share == sorted(share)
            return
        assert all(got[0] == self.epoch for got in self.got), "a batch of another epoch"
        positions = [got[1] for got in self.got]
        if setup.in_order:
            assert positions == list(range(setup.batches))
        assert sorted(positions) == list(range(setup.batches))
        failed = {got[1] for got in self.got if got[-1] == "failed"}
        assert failed >= {p for p in setup.deadly if p < setup.batches}
        if not setup.deaths:
            assert failed <= setup.deadly


def run(setup: Setup, script: list[int], dispatch: type[Dispatch] = Dispatch) -> World:
    world = World(setup, dispatch)
    with mock.patch.object(dispatch_module, "SMALL_BYTES", setup.small):
        world.play(script)
        world.run_out()
        world.check_all_delivered()
        world.idle_workers_finish()
    kept = sum(extent.size for extent in world.dispatch._leases.values())
    assert world.dispatch.used_bytes == kept, "bytes that nobody has"
    for state in world.dispatch.workers:
        assert not state.queue
        assert state.retired == (state.id >= world.dispatch.active_limit)
        assert not state.retired or state.gone
    assert world.dispatch.used_bytes <= max(world.dispatch.budget, kept)
    return world


budgets = st.sampled_from(BUDGETS).map(lambda pages: pages * PAGE)
sizes = st.one_of(
    st.just((PAGE,)),
    st.just((3 * PAGE,)),
    st.just((0,)),
    st.just(tuple(n * PAGE // 2 for n in range(1, 24))),
    st.just((100 * PAGE, 1)),
    st.lists(st.integers(0, 9 * PAGE), min_size=1, max_size=6).map(tuple),
)


def long_script(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1 << 16) for _ in range(length)]


# Short ones shrink well; long ones get into states that take many events to reach.
scripts = st.lists(st.integers(0, (1 << 16) - 1), max_size=150) | st.builds(
    long_script, st.integers(0, 1 << 32), st.integers(100, 500)
)


@st.composite
def setups(draw: st.DrawFn, /, **fixed: Any) -> Setup:
    workers = draw(st.integers(1, 6))
    window = workers * draw(st.integers(1, 3))
    values: dict[str, Any] = {
        "workers": workers,
        "window": window,
        "ahead": draw(st.none() | st.integers(1, window)),
        "small": draw(st.sampled_from([SMALL_BYTES, 0])),
        "budget": draw(budgets),
        "in_order": draw(st.booleans()),
        "pinned": draw(st.booleans()),
        "cautious": draw(st.booleans()),
        "brisk": draw(st.booleans()),
        "batches": draw(st.integers(0, 14)),
        "epochs": draw(st.integers(1, 4)),
        "sizes": draw(sizes),
        "keeps": draw(st.sampled_from([0, 2, 4])),
        "resizes": draw(st.sampled_from([0, 0, 3, 20])),
        "slow": draw(st.just(frozenset()) | st.frozensets(st.integers(1, 13), max_size=6)),
    }
    return Setup(**(values | {name: draw(value) for name, value in fixed.items()}))


generated = settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.too_slow])


@generated
@given(setup=setups(), script=scripts)
def test_every_batch_arrives_once_whatever_the_order_of_events(
    setup: Setup, script: list[int]
) -> None:
    run(setup, script)


@generated
@given(
    setup=setups(
        deaths=st.integers(1, 12),
        limits=st.integers(0, 6),
        looks=st.booleans(),
        deadly=st.frozensets(st.integers(0, 13), max_size=2),
    ),
    script=scripts,
)
def test_every_batch_arrives_though_workers_die_and_retire(setup: Setup, script: list[int]) -> None:
    run(setup, script)


@generated
@given(setup=setups(iterable=st.just(True), batches=st.integers(0, 4)), script=scripts)
def test_every_stream_is_delivered_to_its_end(setup: Setup, script: list[int]) -> None:
    run(setup, script)


@generated
@given(
    setup=setups(
        workers=st.integers(2, 6),
        window=st.integers(4, 12),
        ahead=st.none() | st.integers(1, 12),
        budget=st.sampled_from([8, 20, 64]).map(lambda pages: pages * PAGE),
        in_order=st.just(True),
        pinned=st.just(False),
        batches=st.integers(15, 40),
        slow=st.frozensets(st.integers(1, 39), min_size=1, max_size=12),
        deaths=st.integers(0, 6),
        limits=st.integers(0, 2),
        looks=st.booleans(),
        deadly=st.frozensets(st.integers(0, 39), max_size=2),
    ),
    script=scripts,
)
def test_every_batch_arrives_in_its_turn_though_some_are_started_early(
    setup: Setup, script: list[int]
) -> None:
    run(setup, script)


class Greedy(Dispatch):
    """Grants whatever is free to whoever asks first, and has nothing but the arena."""

    def _place(self, task: Task, nbytes: int, urgent: bool) -> bool:
        task.extent = self.extents.allocate(nbytes)
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return task.extent is not None


def tight_runs() -> Iterator[tuple[Setup, list[int]]]:
    for seed in range(100):
        rng = random.Random(seed)
        # Any one batch fits in a quarter of the budget.
        sizes = tuple(rng.randrange(1, 4 * PAGE) for _ in range(7))
        setup = Setup(workers=3, window=9, sizes=sizes, batches=25)
        yield setup, long_script(seed, 200)


def test_the_simulation_deadlocks_without_the_progress_rule() -> None:
    stuck = 0
    for setup, script in tight_runs():
        try:
            run(setup, script, Greedy)
        except Deadlock:
            stuck += 1
    assert stuck > 50


def test_the_same_runs_never_deadlock_with_the_progress_rule() -> None:
    for setup, script in tight_runs():
        run(setup, script)


# ---- single contracts, told one by one


def started(
    *, workers: int = 2, pages: int = 16, window: int = 4, size: int = PAGE, **more: Any
) -> tuple[Dispatch, list[Command]]:
    """A dispatch with ready workers that knows the size of a batch, and a full window of them."""
    dispatch = Dispatch(workers=workers, budget=pages * PAGE, window=window, **more)
    if size:
        dispatch.sized(size)
    for worker in range(workers):
        assert dispatch.worker_ready(worker) == []
    commands = [command for n in range(window) for command in dispatch.submit(n)]
    return dispatch, commands


def assigned(commands: list[Command]) -> list[tuple[int, int]]:
    """(worker, batch) of every assignment."""
    return [(c.worker, c.task.seq) for c in commands if isinstance(c, Assign)]


def test_batches_go_to_workers_in_turn() -> None:
    _, commands = started(workers=3, window=6)
    assert assigned(commands) == [(0, 0), (1, 1), (2, 2), (0, 3), (1, 4), (2, 5)]


def test_a_worker_with_less_to_do_is_preferred() -> None:
    dispatch, _ = started(in_order=False)
    dispatch.done(1, 1, PAGE, None)
    dispatch.deliver()
    assert assigned(dispatch.submit(4)) == [(1, 4)]


def test_where_identity_matters_a_batch_stays_with_its_worker() -> None:
    dispatch, _ = started(pinned=True)
    commands = dispatch.done(1, 1, PAGE, None) + dispatch.done(1, 3, PAGE, None)
    assert commands == [], "worker 1 idles beside two batches of worker 0"


def test_an_idle_worker_gets_what_waits_behind_another() -> None:
    dispatch, _ = started()
    assert dispatch.done(1, 1, PAGE, None) == []
    assert dispatch.done(1, 3, PAGE, None) == [Recall(0)]
    assert assigned(dispatch.recalled(0, 2)) == [(1, 2)]


def test_a_recall_that_found_nothing_is_repeated_only_after_a_finished_batch() -> None:
    dispatch, _ = started(window=6)
    for seq in (1, 3):
        dispatch.done(1, seq, PAGE, None)
    assert dispatch.done(1, 5, PAGE, None) == [Recall(0)]
    assert dispatch.recalled(0, None) == []
    assert dispatch.worker_ready(1) == []
    assert dispatch.done(0, 0, PAGE, None) == [Recall(0)]


def test_nothing_is_recalled_while_a_grant_may_be_unread() -> None:
    dispatch, _ = started(pages=64, window=6)
    [grant] = dispatch.need(0, 0, 20 * PAGE)
    assert isinstance(grant, Grant)
    commands = [c for seq in (1, 3, 5) for c in dispatch.done(1, seq, PAGE, None)]
    assert Recall(0) not in commands
    assert Recall(0) in dispatch.done(0, 0, 20 * PAGE, None), "it has answered, so it has read"


def test_an_answer_of_the_last_epoch_does_not_prove_that_the_new_one_was_read() -> None:
    dispatch, _ = started()
    assert dispatch.abandon() == [Recall(0), Recall(1)]
    for worker in (0, 1):
        assert dispatch.recalled(worker, worker + 2) == [Recall(worker)]
        assert dispatch.recalled(worker, None) == []
    dispatch.begin_epoch()
    for n in range(4):
        dispatch.submit(n)
    dispatch.done(0, 0, PAGE, None)
    dispatch.done(1, 1, PAGE, None)
    for seq in (5, 7):
        assert Recall(0) not in dispatch.done(1, seq, PAGE, None)
    assert dispatch.done(0, 4, PAGE, None) == []


def test_a_batch_that_is_not_awaited_leaves_room_for_the_largest() -> None:
    dispatch, commands = started(pages=10, window=3, workers=1, size=4 * PAGE)
    assert assigned(commands) == [(0, 0)], "of 6 pages 2 would be left, less than 4"
    assert dispatch.need(0, 0, 5 * PAGE) != [], "the awaited one may take them"
    assert dispatch.done(0, 0, 5 * PAGE, None) == []
    assert dispatch.deliver() is not None
    assert assigned(dispatch.pump()) == [(0, 1)], "now it is awaited"


def test_a_batch_before_the_awaited_one_has_its_rights() -> None:
    """Else both wait for each other: the worker for space, the head for the worker."""
    dispatch, _ = started(pages=8, window=2)
    dispatch.done(0, 0, PAGE, None)
    dispatch.deliver()
    dispatch.submit(2)
    assert dispatch.need(0, 2, 5 * PAGE) == [], "batch 1 is awaited, not batch 2"
    dispatch.limit_active(1)
    commands = dispatch.died(1)
    assert assigned(commands) == [(0, 1)], "behind batch 2, which waits for space"
    [grant] = [command for command in commands if isinstance(command, Grant)]
    assert grant.task.seq == 2


def test_an_awaited_batch_that_fits_nowhere_gets_memory_of_its_own() -> None:
    dispatch, _ = started(pages=2, window=2, workers=1)
    [grant] = dispatch.need(0, 0, 3 * PAGE)
    assert isinstance(grant, Grant)
    assert grant.task.extent is None


def test_without_any_budget_batches_are_loaded_one_at_a_time_in_memory_of_their_own() -> None:
    dispatch, commands = started(pages=0)
    assert assigned(commands) == [(0, 0)]
    commands = dispatch.done(0, 0, PAGE, None)
    delivery = dispatch.deliver()
    assert delivery is not None
    assert delivery.how is How.PLAIN
    assert len(assigned(commands + dispatch.pump())) == 1


def test_a_lease_leaves_room_for_the_largest_batch_and_otherwise_it_is_a_copy() -> None:
    dispatch, _ = started(pages=3, window=1, workers=1)
    how = []
    for seq in range(4):
        dispatch.done(0, seq, PAGE, None)
        delivery = dispatch.deliver()
        assert delivery is not None
        how.append(delivery.how)
        if delivery.how is How.COPY:
            assert delivery.task.extent is not None
            dispatch.release(delivery.task.extent.start)
        dispatch.submit(seq + 1)
    assert how == [How.LEASE, How.LEASE, How.COPY, How.COPY]
    assert dispatch.leased_bytes == 2 * PAGE


def test_a_batch_that_brought_down_three_workers_is_delivered_as_failed() -> None:
    dispatch, _ = started()
    for _ in range(MAX_STRIKES):
        assert not dispatch.deliverable
        assert Spawn(0) in dispatch.died(0)
        dispatch.worker_ready(0)
    delivery = dispatch.deliver()
    assert delivery is not None
    assert (delivery.task.state, delivery.how) == (State.FAILED, How.PLAIN)


def test_a_worker_that_dies_waiting_for_space_is_granted_none_afterwards() -> None:
    dispatch, _ = started(pages=8, window=2)
    assert dispatch.need(1, 1, 7 * PAGE) == []
    commands = dispatch.died(1)
    assert Spawn(1) in commands
    commands += dispatch.done(0, 0, PAGE, None)
    dispatch.deliver()
    commands += dispatch.release(0)
    assert [type(command) for command in commands].count(Grant) == 0
    assert assigned(commands)[-1][1] == 1, "its batch is loaded again, with the space it needs"


def test_a_worker_that_dies_before_it_is_ready_is_no_batchs_fault() -> None:
    dispatch, _ = started()
    dispatch.died(0)
    for _ in range(2 * MAX_STRIKES):
        dispatch.died(0)
    head = dispatch.head_task()
    assert head is not None
    assert head.strikes == 1


def test_a_worker_beyond_the_limit_finishes_retires_and_is_not_started_again() -> None:
    dispatch, _ = started()
    assert dispatch.limit_active(1) == []
    assert Retire(1) not in dispatch.done(1, 1, PAGE, None)
    assert Retire(1) in dispatch.done(1, 3, PAGE, None)
    dispatch, _ = started()
    dispatch.limit_active(1)
    commands = dispatch.died(1)
    assert Spawn(1) not in commands
    assert Retire(1) in commands


def test_batches_pinned_to_a_retired_worker_go_to_those_that_are_left() -> None:
    dispatch, _ = started()
    dispatch.limit_active(1)
    for seq in (1, 3):
        dispatch.done(1, seq, PAGE, None)
    dispatch.pin()
    dispatch.done(0, 0, PAGE, None)
    dispatch.deliver()
    commands = dispatch.submit(4) + dispatch.done(0, 2, PAGE, None)
    assert assigned(commands) == [(0, 4)]


def unpinned(**more: Any) -> tuple[Dispatch, list[Command]]:
    """`started`, with its first batch finished: so nobody has looked at worker ids."""
    dispatch, commands = started(**more)
    commands += dispatch.done(0, 0, more.get("size", PAGE), None)
    return dispatch, commands


def test_more_workers_are_started_and_given_what_waits_behind_others() -> None:
    dispatch, _ = unpinned(window=8)
    assert dispatch.set_active(4, 16, 16) == [Spawn(2), Spawn(3)]
    assert dispatch.worker_ready(2) == [Recall(1)], "the longest line"
    [assign] = dispatch.recalled(1, 3)
    assert assigned([assign]) == [(2, 3)]
    assert dispatch.active_limit == 4


def test_a_worker_too_many_gives_back_what_it_has_not_read_and_retires() -> None:
    dispatch, _ = unpinned(window=8)
    assert dispatch.set_active(1, 4, 4) == [Recall(1)]
    first, *_ = dispatch.recalled(1, 3)
    assert first == Recall(1)
    dispatch.recalled(1, 5)
    assert dispatch.recalled(1, 7) == [], "the last one it may have begun"
    assert Retire(1) in dispatch.done(1, 1, PAGE, None)


def test_a_worker_that_is_wanted_again_before_it_retired_stays() -> None:
    dispatch, _ = unpinned()
    assert dispatch.set_active(1, 2, 2) == [Recall(1)]
    dispatch.recalled(1, None)
    assert Spawn(1) not in dispatch.set_active(2, 4, 4)
    assert Retire(1) not in dispatch.done(1, 1, PAGE, None)


def test_a_worker_that_is_wanted_again_before_it_is_gone_is_started_once_it_is() -> None:
    dispatch, _ = unpinned(window=2)
    dispatch.done(1, 1, PAGE, None)
    assert dispatch.set_active(1, 2, 2) == [Retire(1)]
    assert dispatch.set_active(3, 6, 6) == [Spawn(2)]
    for _ in range(2):
        dispatch.deliver()
    commands = [command for n in range(6) for command in dispatch.submit(n)]
    assert {worker for worker, _ in assigned(commands)} == {0, 2}, "worker 1 is still leaving"
    assert dispatch.left(1)[0] == Spawn(1)


def test_a_lower_budget_binds_every_new_grant_and_frees_what_lies_beyond() -> None:
    dispatch, _ = unpinned(pages=16, window=4, size=2 * PAGE)
    dispatch.done(1, 1, 2 * PAGE, None)
    deliveries = [dispatch.deliver(), dispatch.deliver()]
    extents = [delivery.task.extent for delivery in deliveries if delivery is not None]
    assert extents == [Extent(0, 2 * PAGE), Extent(2 * PAGE, 2 * PAGE)]
    assert dispatch.set_budget(3 * PAGE) == [GiveBack([Extent(8 * PAGE, 8 * PAGE)])]
    assert dispatch.used_bytes == 8 * PAGE, "held and on their way"
    assert not assigned(dispatch.submit(4))
    assert dispatch.release(2 * PAGE) == [GiveBack([Extent(3 * PAGE, PAGE)])]
    done = dispatch.done(0, 2, 2 * PAGE, None) + dispatch.done(1, 3, 2 * PAGE, None)
    assert not assigned(done)
    delivery = dispatch.deliver()
    assert delivery is not None
    assert delivery.how is How.COPY, "a lease would leave no room for the largest"
    assert dispatch.release(4 * PAGE)[0] == GiveBack([Extent(4 * PAGE, 2 * PAGE)])


def test_a_higher_budget_is_given_out_at_once_up_to_the_region() -> None:
    dispatch = Dispatch(workers=2, budget=PAGE, window=4, region=8 * PAGE)
    dispatch.sized(PAGE)
    assert len(assigned([c for n in range(4) for c in dispatch.submit(n)])) == 1
    assert len(assigned(dispatch.set_budget(100 * PAGE))) == 3
    assert dispatch.budget == 8 * PAGE


def test_the_end_of_a_stream_in_the_last_epoch_says_nothing_about_this_one() -> None:
    dispatch, _ = started(pinned=True)
    dispatch.abandon()
    dispatch.begin_epoch()
    for n in range(4):
        dispatch.submit(n)
    for worker, seq in ((0, 0), (1, 1), (0, 2), (1, 3)):
        dispatch.exhausted(worker, seq)
    assert dispatch.any_active
    assert dispatch.outstanding == 4


def test_space_of_an_abandoned_batch_comes_back_when_its_worker_is_done_with_it() -> None:
    dispatch, _ = started()
    dispatch.abandon()
    dispatch.recalled(0, 2)
    dispatch.recalled(1, 3)
    before = dispatch.used_bytes
    assert before > 0
    dispatch.done(0, 0, PAGE, None)
    assert 0 < dispatch.used_bytes < before
    dispatch.died(1)
    assert dispatch.used_bytes == 0


def test_a_worker_that_waits_for_space_for_an_abandoned_batch_is_let_go() -> None:
    dispatch, _ = started(pages=8)
    assert dispatch.need(1, 1, 7 * PAGE) == []
    assert Grant in [type(command) for command in dispatch.abandon()]


def test_leases_outlive_the_epoch() -> None:
    dispatch, _ = started()
    dispatch.done(0, 0, PAGE, None)
    delivery = dispatch.deliver()
    assert delivery is not None
    assert delivery.task.extent is not None
    dispatch.abandon()
    dispatch.begin_epoch()
    dispatch.release(delivery.task.extent.start)
    assert dispatch.leased_bytes == 0


def test_before_any_size_is_known_a_batch_gets_no_space_and_its_worker_asks() -> None:
    dispatch, commands = started(size=0)
    assert assigned(commands) == [(0, 0), (1, 1)], "one a worker: the others wait for a size"
    assert all(c.task.asks and c.task.extent is None for c in commands if isinstance(c, Assign))
    assert dispatch.used_bytes == 0
    grant, *rest = dispatch.need(0, 0, 2 * PAGE)
    assert isinstance(grant, Grant)
    assert grant.task.extent == Extent(0, 2 * PAGE)
    assert [c.task.extent for c in rest if isinstance(c, Assign)] == [
        Extent(2 * PAGE, 2 * PAGE),
        Extent(4 * PAGE, 2 * PAGE),
    ], "now that a size is known"


def test_a_batch_held_back_for_thrift_is_loaded_once_the_caller_had_to_wait_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch_module, "SMALL_BYTES", 0)
    dispatch, commands = started(workers=1, window=6)
    assert assigned(commands) == [(0, 0), (0, 1)], "one at hand, one more kept ready"
    assert dispatch.starved() == [], "the caller waits for a batch that was not held back"
    for seq in (0, 1):
        dispatch.done(0, seq, PAGE, None)
        dispatch.deliver()
    dispatch.pump()
    assert assigned(dispatch.starved()) != []


def test_a_cautious_start_gives_out_one_batch_until_its_size_is_known() -> None:
    dispatch, commands = started(cautious=True, size=0)
    assert assigned(commands) == [(0, 0)]
    assert assigned(dispatch.sized(PAGE)) == [(1, 1), (0, 2), (1, 3)]


def test_while_half_is_ready_brisk_batches_are_not_given_out_one_by_one() -> None:
    dispatch, _ = started(workers=2, window=8)
    dispatch.brisk = True
    for seq in range(8):
        dispatch.done(seq % 2, seq, PAGE, None)
    given: list[list[tuple[int, int]]] = []
    for taken in range(5):
        assert dispatch.deliver() is not None
        given.append(assigned(dispatch.submit(8 + taken)) + assigned(dispatch.pump()))
    assert given == [[], [], [], [(0, 8), (1, 9), (0, 10), (1, 11)], [(0, 12)]]


def test_a_brisk_batch_that_is_waited_for_is_given_out_at_once() -> None:
    dispatch, _ = started(workers=2, window=4)
    dispatch.brisk = True
    for seq in (1, 2, 3):
        dispatch.done(seq % 2, seq, PAGE, None)
    assert (1, 0) in assigned(dispatch.died(0))


def test_submitting_after_every_stream_ended_is_an_error() -> None:
    dispatch, _ = started(workers=1, window=1, pinned=True)
    dispatch.exhausted(0, 0)
    assert not dispatch.any_active
    with pytest.raises(ValueError, match="exhausted"):
        dispatch.submit(1)


# ---- started before its turn


def early(pages: int = 64, workers: int = 4, window: int = 8, **more: Any) -> Dispatch:
    """A dispatch that has delivered its first batch, so that it knows what it needs to."""
    dispatch, _ = started(workers=workers, pages=pages, window=window, **more)
    dispatch.done(0, 0, PAGE, None)
    delivery = dispatch.deliver()
    assert delivery is not None
    assert delivery.task.extent is not None
    dispatch.release(delivery.task.extent.start)
    return dispatch


def test_an_early_batch_is_begun_at_once_and_delivered_in_its_turn() -> None:
    dispatch = early(workers=2, window=4)
    [(worker, number)] = assigned(dispatch.submit("slow", ahead=2))
    assert (worker, number) == (0, 6), "to the worker with least to do"
    dispatch.done(worker, number, PAGE, "slow")
    got = []
    for _ in range(7):
        head = dispatch.head_task()
        assert head is not None
        if head.state is not State.FILLED:
            dispatch.done(head.worker, head.seq, PAGE, head.payload)
        delivery = dispatch.deliver()
        assert delivery is not None
        got.append(delivery.task.seq)
        dispatch.pump()
        if dispatch.outstanding < 4:
            dispatch.submit("next in line")
    assert got == [1, 2, 3, 4, 5, 6, 7]


def test_what_was_started_early_is_never_taken_for_the_head() -> None:
    dispatch = early(workers=2, window=4)
    [(worker, number)] = assigned(dispatch.submit("slow", ahead=2))
    dispatch.done(worker, number, PAGE, "slow")
    for _ in range(3):
        head = dispatch.head_task()
        assert head is not None
        dispatch.done(head.worker, head.seq, PAGE, None)
        assert dispatch.deliver() is not None
    assert dispatch.outstanding == 1
    assert dispatch.head_task() is None
    assert not dispatch.deliverable
    assert assigned(dispatch.submit("next in line")) != []
    head = dispatch.head_task()
    assert head is not None
    assert head.payload == "next in line"


def rooms(dispatch: Dispatch) -> int:
    """How many batches may be started early."""
    for count in range(20):
        if not dispatch.early_room:
            return count
        dispatch.submit("slow", ahead=10 + 2 * count)
    raise AssertionError("no bound")


def test_early_batches_take_up_half_of_the_workers_at_most() -> None:
    dispatch = early(workers=6, window=40)
    assert rooms(dispatch) == 3
    assert sum(task.payload == "slow" for w in dispatch.workers for task in w.queue) == 3
    busy = [w for w in dispatch.workers if any(task.payload == "slow" for task in w.queue)]
    assert len(busy) <= 3


def test_early_batches_take_up_a_quarter_of_the_window_at_most() -> None:
    assert rooms(early(workers=8, window=8)) == 2


def test_early_batches_take_up_a_quarter_of_the_budget_at_most() -> None:
    assert rooms(early(workers=8, window=40, pages=12)) == 3
    assert rooms(early(workers=8, window=40, pages=3)) == 0


@pytest.mark.parametrize(
    "setting", [{"pinned": True}, {"in_order": False}, {"workers": 1}, {"window": 3}]
)
def test_nothing_is_started_early_where_it_would_not_help_or_be_noticed(
    setting: dict[str, Any],
) -> None:
    dispatch = early(**setting)
    if setting.get("pinned"):
        dispatch.pin()
    assert rooms(dispatch) == 0


def test_nothing_is_started_early_before_a_batch_has_shown_whether_identity_matters() -> None:
    dispatch, _ = started(workers=4, window=8)
    assert not dispatch.early_room
    dispatch.done(0, 0, PAGE, None)
    assert dispatch.early_room


def test_early_batches_do_not_count_where_thrift_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_module, "SMALL_BYTES", 0)
    dispatch = early(workers=4, window=16)
    before = sum(len(worker.queue) for worker in dispatch.workers)
    dispatch.submit("slow", ahead=9)
    dispatch.pump()
    dispatch.submit("slow", ahead=11)
    dispatch.pump()
    after = sum(len(worker.queue) for worker in dispatch.workers)
    assert after >= before + 2, "as many in line as before"


def test_an_early_batch_whose_worker_dies_is_given_out_again() -> None:
    dispatch = early(workers=2, window=4)
    [(worker, number)] = assigned(dispatch.submit("slow", ahead=3))
    commands = dispatch.died(worker) + dispatch.worker_ready(worker)
    assert number in [seq for _, seq in assigned(commands)]
    assert dispatch.tasks[number].strikes == 0, "it had not begun"


def test_numbers_of_early_batches_are_not_given_out_again_in_the_next_epoch() -> None:
    dispatch = early(workers=2, window=4)
    [(worker, number)] = assigned(dispatch.submit("slow", ahead=5))
    dispatch.abandon()
    dispatch.begin_epoch()
    assert dispatch.early_room
    for n in range(4):
        dispatch.submit(n)
    assert min(dispatch.tasks) > number
    used = dispatch.used_bytes
    dispatch.done(worker, number, PAGE, "slow")
    assert not dispatch.deliverable, "nobody's batch"
    assert dispatch.used_bytes <= used


def test_a_batch_started_early_keeps_the_home_of_its_place() -> None:
    """If it turns out later that identity matters, every batch is where torch has it."""
    dispatch = early(workers=4, window=8)
    dispatch.submit("slow", ahead=3)
    for _ in range(6):
        dispatch.submit("in line")
    assert all(task.home == task.seq % 4 for task in dispatch.tasks.values())
