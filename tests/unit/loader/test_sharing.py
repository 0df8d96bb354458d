"""Shared batches: every row once, in order, within the bound, whatever happens to whom.

The simulation is that of `test_dispatch`, with workers that also fill parts of batches. What a row
does (fits, does not, raises, kills) belongs to its position, so every run has one right outcome.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.loader import dispatch as dispatch_module
from stoker.loader.dispatch import MAX_STRIKES, SMALL_BYTES
from stoker.loader.extents import Extent
from stoker.loader.sharing import MAX_MISFITS, Batch, Part, Sharing, Verdict
from stoker.loader.tasks import Assign, Command, Delivery, How, State, Task
from tests.unit.loader.test_dispatch import PAGE, REGION, Setup, Worker, World, budgets, scripts

UNFIT = -1


@dataclass(eq=False)
class Plan:
    """A layout: samples of this kind, with rows of this size."""

    kind: int
    row_bytes: int

    def nbytes(self, rows: int) -> int:
        return rows * self.row_bytes


@dataclass(frozen=True)
class Shared(Setup):
    """One loader with shared batches."""

    rows: int = 6
    lead: int = 2
    skips: bool = False
    row_bytes: int = PAGE // 2
    kinds: tuple[int, ...] = (0,)
    """What samples of each position are like, over and over; UNFIT for no plan at all."""
    odd: frozenset[tuple[int, int]] = frozenset()
    """Position and row of samples of yet another kind."""
    raising: frozenset[tuple[int, int]] = frozenset()
    killing: frozenset[tuple[int, int]] = frozenset()

    def count(self, position: int) -> int:
        return self.rows if position < self.batches - 1 else max(1, self.rows // 2)

    def kind(self, position: int, row: int) -> int:
        if (position, row) in self.odd:
            return 99
        return self.kinds[position % len(self.kinds)]

    def size(self, position: int) -> int:
        return self.count(position) * self.row_bytes

    def outcome(self, position: int) -> tuple[str, int]:
        """What becomes of a batch that nothing but its own rows disturbs."""
        for row in range(self.count(position)):
            if (position, row) in self.raising and not self.skips:
                return "raised", row
            if (position, row) in self.killing:
                return "failed", row
        return "filled", 0


class SharedWorld(World):
    """`World`, whose batches are cut into parts."""

    setup: Shared
    dispatch: Sharing

    def __init__(self, setup: Shared) -> None:
        def make(**settings: Any) -> Sharing:
            del settings["pinned"], settings["cautious"]
            return Sharing(lead=setup.lead, skips=setup.skips, **settings)

        super().__init__(setup, make)  # type: ignore[arg-type]
        self.owners: dict[int, int] = {}  # number of a part -> its batch

    @property
    def most_waves(self) -> int:
        return super().most_waves + 2 * self.window * self.setup.rows

    # ---- the trainer

    def send(self, worker: Worker, task: Task) -> None:
        if isinstance(task, Part):
            assert task.probe == (task.batch.layout is None)
            worker.pipe.append(("task", task.seq, task, self.epoch, task.payload))
        else:
            super().send(worker, task)

    def may_write(self, worker: Worker, task: Task) -> None:
        if not isinstance(task, Part):
            super().may_write(worker, task)
            return
        self.owners[task.seq] = task.batch.seq
        extent = task.batch.extent
        if extent is not None:
            for seq, (other, extents) in self.writers.items():
                if self.owners.get(seq) == task.batch.seq:
                    continue
                for taken in extents:
                    assert extent.end <= taken.start or taken.end <= extent.start, (
                        f"{worker.id} was given {extent}, but {other.id} may write {taken}"
                    )
        assert task.seq not in self.writers, "a part in two hands"
        self.writers[task.seq] = (worker, [] if extent is None else [extent])

    def hear(self, worker: Worker) -> None:
        if worker.said[0][0] != "part":
            super().hear(worker)
            return
        _, seq, verdict, value, row = worker.said.popleft()
        self.writers.pop(seq, None)
        self.chances += 1
        self.act(self.dispatch.part_done(worker.id, seq, verdict, value, row))
        self.check()

    def key(self, task: Task) -> tuple[int, int]:
        assert isinstance(task.payload, tuple)
        epoch, position, _ = task.payload
        return epoch, position

    def submit(self) -> None:
        position = self.position
        self.position += 1
        rows = list(range(self.setup.count(position)))
        self.act(self.dispatch.submit((self.epoch, position, rows)))
        self.check()

    def accept(self, delivery: Delivery) -> None:
        task = delivery.task
        assert isinstance(task, Batch)
        assert not task.writers
        if task.state is State.FAILED or task.whole:
            super().accept(delivery)
            return
        epoch, position = self.key(task)
        if task.errors:
            assert delivery.how is How.PLAIN
            assert task.extent is None
            self.got.append(task.result)
            return
        assert isinstance(task.result, dict)
        rows = [row for first in sorted(task.result) for row in task.result[first]]
        assert rows == [(epoch, position, row) for row in range(self.setup.count(position))]
        self.got.append((epoch, position, "filled", 0))
        if delivery.how is How.PLAIN:
            assert task.extent is None
            assert not self.setup.row_bytes
            return
        assert task.extent is not None
        assert task.extent.size >= self.setup.size(position)
        if delivery.how is How.COPY:
            self.act(self.dispatch.release(task.extent.start))
        elif len(self.got) % 4 >= self.setup.keeps:
            self.held.append(task.extent.start)

    # ---- the workers

    def begin(self, worker: Worker, message: tuple[Any, ...]) -> None:
        if message[0] == "task" and isinstance(message[2], Part):
            assert message[3] == worker.epoch or message[2].abandoned
            worker.task = message
        elif message[0] == "task":
            _, seq, extent, epoch, (_, position, rows) = message
            super().begin(worker, ("task", seq, extent, epoch, (epoch, position)))
            for row in rows:
                if (position, row) in self.setup.raising and not self.setup.skips:
                    break
                if (position, row) in self.setup.killing:
                    self.die(worker)
                    break
        else:
            super().begin(worker, message)

    def work(self, worker: Worker) -> None:
        assert worker.task is not None
        _, seq, part, epoch, key = worker.task
        if isinstance(part, Part):
            worker.task = None
            self.fill(worker, seq, part, epoch)
            return
        outcome, row = self.setup.outcome(key[1])
        if outcome == "raised":
            worker.task = None
            worker.said.append(("done", seq, 0, (*key, "raised", row), False))
            return
        super().work(worker)
        if worker.task is None:
            _, _, size, _, looked = worker.said.pop()
            worker.said.append(("done", seq, size, (*key, "filled", 0), looked))

    def fill(self, worker: Worker, seq: int, part: Part, epoch: int) -> None:
        setup = self.setup
        _, position, rows = part.payload  # type: ignore[misc]
        assert rows == list(range(part.first, part.first + part.count))
        layout = part.batch.layout
        done = []
        for row in rows:
            if (position, row) in setup.raising:
                error = (epoch, position, "raised", row)
                worker.said.append(("part", seq, Verdict.RAISED, error, row))
                return
            if (position, row) in setup.killing:
                self.die(worker)
                return
            kind = setup.kind(position, row)
            if part.probe:
                if kind == UNFIT:
                    worker.said.append(("part", seq, Verdict.MISFIT, "no plan", row))
                else:
                    plan = Plan(kind, setup.row_bytes)
                    worker.said.append(("part", seq, Verdict.PROBED, plan, row))
                return
            assert isinstance(layout, Plan)
            if kind != layout.kind:
                worker.said.append(("part", seq, Verdict.MISFIT, "another kind", row))
                return
            done.append((epoch, position, row))
        worker.said.append(("part", seq, Verdict.FILLED, done, 0))

    # ---- what must always be true

    def check(self) -> None:
        dispatch = self.dispatch
        for worker in dispatch._active if dispatch._loose else []:
            assert worker.queue or not worker.ready, "a part that nobody has beside an idle worker"
        loose = Counter(id(part.batch) for part in dispatch._loose)
        batches: dict[int, Batch] = {}
        hands: dict[int, int] = {}
        for worker in dispatch.workers:
            for task in worker.queue:
                if isinstance(task, Part):
                    batches[id(task.batch)] = task.batch
                    hands[id(task.batch)] = hands.get(id(task.batch), 0) + 1
                else:
                    assert isinstance(task, Batch)
                    batches[id(task)] = task
        for task in dispatch.tasks.values():
            assert isinstance(task, Batch)
            batches[id(task)] = task
        pieces: list[Extent] = []
        for batch in batches.values():
            assert batch.writers == hands.get(id(batch), 0)
            assert batch.abandoned or batch.left == batch.writers + loose[id(batch)]
            own = [*batch.outgrown, *([batch.extent] if batch.extent is not None else [])]
            pieces += own
        reserved = sum(piece.size for piece in pieces)
        leases = list(dispatch._leases.values())
        assert dispatch.used_bytes == reserved + sum(extent.size for extent in leases)
        assert 0 <= dispatch.used_bytes <= dispatch.peak_bytes <= self.most_budget
        # What is above a bound that was lowered only becomes less.
        assert dispatch.used_bytes <= max(dispatch.budget, self.used_bytes)
        self.used_bytes = dispatch.used_bytes
        pieces += leases
        pieces += dispatch.extents.blocks()
        at = 0
        for piece in sorted(pieces):
            assert piece.start == at, "extents overlap or are lost"
            at = piece.end
        assert at == max(REGION, dispatch.budget)
        assert not dispatch.extents.beyond, "free pages that nobody gives back"
        alike = self.setup.kinds == (0,) and not self.setup.odd and not self.setup.raising
        if dispatch_module.SMALL_BYTES == 0 and alike and self.setup.row_bytes:
            begun = len(dispatch.tasks) - len(dispatch._waiting)
            assert begun <= self.setup.lead + 1, "more batches in flight than is worth it"
        assert self.recalls <= 4 * self.chances + (self.epoch + 1) * (
            2 * (self.setup.rows + 1) * self.setup.window * self.most_workers
            + 2 * self.most_workers
        ), "recalls without end"

    def check_all_delivered(self) -> None:
        setup = self.setup
        assert all(got[0] == self.epoch for got in self.got), "a batch of another epoch"
        positions = [got[1] for got in self.got]
        if setup.in_order:
            assert positions == list(range(setup.batches))
        assert sorted(positions) == list(range(setup.batches))
        for got in self.got:
            outcome, row = setup.outcome(got[1])
            if got[2] == "failed":
                assert outcome == "failed" or setup.deaths
            else:
                assert (got[2], got[3]) == (outcome, row) or (setup.deaths and outcome == "failed")


def run(setup: Shared, script: list[int]) -> SharedWorld:
    with mock.patch.object(dispatch_module, "SMALL_BYTES", setup.small):
        world = SharedWorld(setup)
        world.play(script)
        world.run_out()
        world.check_all_delivered()
        world.idle_workers_finish()
    kept = sum(extent.size for extent in world.dispatch._leases.values())
    assert world.dispatch.used_bytes == kept, "bytes that nobody has"
    for state in world.dispatch.workers:
        assert not state.queue
        assert state.retired == (state.id >= world.dispatch.active_limit)
    return world


places = st.frozensets(st.tuples(st.integers(0, 9), st.integers(0, 8)), max_size=4)


@st.composite
def setups(draw: st.DrawFn, /, **fixed: Any) -> Shared:
    workers = draw(st.integers(1, 6))
    window = workers * draw(st.integers(1, 3))
    values: dict[str, Any] = {
        "workers": workers,
        "window": window,
        "ahead": draw(st.none() | st.integers(1, window)),
        "small": draw(st.sampled_from([SMALL_BYTES, 0])),
        "budget": draw(budgets),
        "in_order": draw(st.booleans()),
        "batches": draw(st.integers(0, 10)),
        "epochs": draw(st.integers(1, 4)),
        "keeps": draw(st.sampled_from([0, 2, 4])),
        "resizes": draw(st.sampled_from([0, 0, 3, 20])),
        "rows": draw(st.integers(1, 9)),
        "lead": draw(st.integers(1, 3)),
        "row_bytes": draw(st.sampled_from([0, 1, PAGE // 2, PAGE])),
        "kinds": draw(st.sampled_from([(0,), (0, 0, 0, 1), (0, 0, 0, 1, 1, 1), (UNFIT,), (0, 1)])),
    }
    return Shared(**(values | {name: draw(value) for name, value in fixed.items()}))


generated = settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.too_slow])


@generated
@given(setup=setups(), script=scripts)
def test_every_row_arrives_once_whatever_the_order_of_events(
    setup: Shared, script: list[int]
) -> None:
    run(setup, script)


@generated
@given(setup=setups(odd=places, raising=places, skips=st.booleans()), script=scripts)
def test_batches_that_do_not_fit_or_raise_are_what_they_are_without_sharing(
    setup: Shared, script: list[int]
) -> None:
    run(setup, script)


@generated
@given(
    setup=setups(
        odd=places,
        raising=places,
        killing=st.frozensets(st.tuples(st.integers(0, 9), st.integers(0, 8)), max_size=2),
        skips=st.booleans(),
        deaths=st.integers(0, 12),
        limits=st.integers(0, 6),
    ),
    script=scripts,
)
def test_every_batch_arrives_though_workers_die_and_retire(
    setup: Shared, script: list[int]
) -> None:
    run(setup, script)


# ---- single contracts, told one by one


def started(
    workers: int = 4, rows: int = 8, batches: int = 4, pages: int = 100, **more: Any
) -> tuple[Sharing, list[Command]]:
    """Workers that are up, a known layout of a page a row, and what the first batches led to."""
    sharing = Sharing(workers=workers, budget=pages * PAGE, window=2 * workers, **more)
    for worker in range(workers):
        sharing.worker_ready(worker)
    out: list[Command] = []
    with mock.patch.object(dispatch_module, "SMALL_BYTES", 0):
        for position in range(batches):
            out += sharing.submit((0, position, list(range(rows))))
        (probe,) = out
        assert isinstance(probe, Assign)
        out = sharing.part_done(0, probe.task.seq, Verdict.PROBED, Plan(0, PAGE))
    return sharing, out


def parts(commands: list[Command]) -> list[Part]:
    return [c.task for c in commands if isinstance(c, Assign) and isinstance(c.task, Part)]


def _position(part: Part) -> int:
    assert isinstance(part.payload, tuple)
    return int(part.payload[1])


def finish(sharing: Sharing, part: Part) -> list[Command]:
    with mock.patch.object(dispatch_module, "SMALL_BYTES", 0):
        return sharing.part_done(part.worker, part.seq, Verdict.FILLED, [part.first])


def test_one_row_is_probed_and_then_everybody_works_on_the_first_batch() -> None:
    _, commands = started()
    first = [part for part in parts(commands) if part.batch.seq == 0]
    assert [(part.first, part.count) for part in first] == [(row, 1) for row in range(8)]
    assert sorted(part.worker for part in first) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert first[0].worker == 0, "the worker that has the sample already"


def test_sixteen_workers_take_the_memory_of_three_batches() -> None:
    sharing, commands = started(workers=16, rows=32, batches=32, pages=1000)
    held: list[Extent] = []
    taken = 0
    todo = parts(commands)
    while taken < 32:
        while not sharing.deliverable:
            todo += parts(finish(sharing, todo.pop(0)))
        delivery = sharing.deliver()
        assert delivery is not None
        assert delivery.how is How.LEASE
        assert delivery.task.extent is not None
        held.append(delivery.task.extent)
        taken += 1
        with mock.patch.object(dispatch_module, "SMALL_BYTES", 0):
            todo += parts(sharing.pump())
            if len(held) == 2:  # a loop lets go of a batch when it has the next
                todo += parts(sharing.release(held.pop(0).start))
    assert sharing.peak_bytes == 3 * 32 * PAGE


def test_while_workers_start_one_batch_is_enough() -> None:
    sharing = Sharing(workers=2, budget=100 * PAGE, window=8)
    sharing.worker_ready(0)
    (probe,) = [c for n in range(3) for c in sharing.submit((0, n, [0, 1, 2, 3]))]
    assert isinstance(probe, Assign)
    todo = parts(sharing.part_done(0, probe.task.seq, Verdict.PROBED, Plan(0, PAGE)))
    assert {_position(part) for part in todo} == {0}
    assert {_position(part) for part in parts(sharing.worker_ready(1))} == {1, 2}


def test_an_idle_worker_takes_over_from_one_that_is_not_up() -> None:
    sharing = Sharing(workers=2, budget=100 * PAGE, window=8)
    sharing.worker_ready(0)
    (probe,) = sharing.submit((0, 0, [0, 1]))
    assert isinstance(probe, Assign)
    mine, other = parts(sharing.part_done(0, probe.task.seq, Verdict.PROBED, Plan(0, PAGE)))
    assert (mine.worker, other.worker) == (0, 1)
    (recall,) = finish(sharing, mine)
    assert recall == dispatch_module.Recall(1)
    (again,) = parts(sharing.recalled(1, other.seq))
    assert again is other
    assert again.worker == 0


def test_an_extent_is_not_free_while_a_part_of_a_spoiled_batch_is_in_a_workers_hands() -> None:
    sharing, commands = started(workers=2, rows=4, batches=1)
    one, *others = parts(commands)
    assert sharing.part_done(one.worker, one.seq, Verdict.MISFIT, "another shape") == []
    for part in others[:-1]:
        assert not parts(finish(sharing, part))
    assert sharing.used_bytes == 4 * PAGE
    last = others[-1]
    (whole,) = [c for c in finish(sharing, last) if isinstance(c, Assign)]
    assert whole.task is one.batch
    assert not isinstance(whole.task, Part)


def test_after_a_misfit_the_next_batch_is_probed_again() -> None:
    sharing, commands = started(workers=1, rows=1, batches=6)
    (misfit, *others) = parts(commands)
    out = sharing.part_done(0, misfit.seq, Verdict.MISFIT, "another shape")
    for part in others:
        out += finish(sharing, part)
    for delivered in range(3):
        if delivered == 0:
            sharing.done(0, misfit.batch.seq, PAGE, None)
        delivery = sharing.deliver()
        assert delivery is not None
        out += sharing.pump()
    assert any(part.probe for part in parts(out))


def test_sharing_is_given_up_after_three_batches_in_a_row_that_do_not_fit() -> None:
    sharing = Sharing(workers=1, budget=100 * PAGE, window=8)
    sharing.worker_ready(0)
    for position in range(int(MAX_MISFITS)):
        assert sharing.given_up is None
        (probe,) = sharing.submit((0, position, [0, 1]))
        assert isinstance(probe, Assign)
        assert isinstance(probe.task, Part)
        (whole,) = sharing.part_done(0, probe.task.seq, Verdict.MISFIT, "a set")
        assert isinstance(whole, Assign)
        sharing.done(0, whole.task.seq, PAGE, None)
    assert sharing.given_up == "a set"
    (whole,) = sharing.submit((0, int(MAX_MISFITS), [0, 1]))
    assert isinstance(whole, Assign)
    assert not isinstance(whole.task, Part)


def test_a_part_that_kills_three_workers_fails_its_batch_and_is_named() -> None:
    sharing, commands = started(workers=2, rows=4, batches=1)
    deadly, *others = sorted(parts(commands), key=lambda part: part.first)
    for part in others:
        finish(sharing, part)
    for _ in range(MAX_STRIKES):
        assert not sharing.deliverable
        worker = deadly.worker
        sharing.died(worker)
        sharing.worker_ready(worker)
    delivery = sharing.deliver()
    assert delivery is not None
    batch = delivery.task
    assert isinstance(batch, Batch)
    assert (batch.state, batch.culprit, delivery.how) == (State.FAILED, deadly, How.PLAIN)
    assert sharing.used_bytes == 0


@pytest.mark.parametrize("first_to_report", [0, 1])
def test_the_lowest_rows_exception_wins_whoever_reports_first(first_to_report: int) -> None:
    sharing, commands = started(workers=2, rows=2, batches=1)
    two = sorted(parts(commands), key=lambda part: part.first)
    for part in two if first_to_report == 0 else two[::-1]:
        sharing.part_done(part.worker, part.seq, Verdict.RAISED, f"row {part.first}", part.first)
    delivery = sharing.deliver()
    assert delivery is not None
    assert delivery.task.result == "row 0"


def test_the_one_who_keeps_everything_still_gets_a_batch_ahead() -> None:
    sharing, commands = started(workers=2, rows=2, batches=4)
    todo = parts(commands)
    for _ in range(3):
        while not sharing.deliverable:
            todo += parts(finish(sharing, todo.pop(0)))
        delivery = sharing.deliver()
        assert delivery is not None
        with mock.patch.object(dispatch_module, "SMALL_BYTES", 0):
            todo += parts(sharing.pump())
    assert todo, "nothing is loaded ahead"


def test_a_worker_that_is_stuck_in_the_last_epoch_gets_nothing_while_others_can() -> None:
    sharing, commands = started(workers=3, rows=3, batches=1)
    stuck, *others = parts(commands)
    recalls = sharing.abandon()
    assert {command.worker for command in recalls} == {0, 1, 2}
    sharing.recalled(stuck.worker, None)
    for part in others:
        sharing.recalled(part.worker, part.seq)
    sharing.begin_epoch()
    given = parts(sharing.submit((0, 0, [0, 1, 2])))
    assert given
    assert stuck.worker not in {part.worker for part in given}
    assert sharing.used_bytes == 6 * PAGE, "the extent that it may still write to is not free"


def test_a_batch_that_no_worker_can_be_given_waits_for_one_that_speaks() -> None:
    sharing, commands = started(workers=2, rows=2, batches=1)
    old = parts(commands)
    sharing.abandon()
    for part in old:
        sharing.recalled(part.worker, None)
    sharing.begin_epoch()
    assert sharing.submit((0, 0, [0, 1])) == []
    assert sharing.stuck_task() in old, "whom a timeout should ask"
    given = parts(finish(sharing, old[1]))
    assert [part.worker for part in given] == [1, 1]


def test_sharing_is_given_up_where_every_other_batch_does_not_fit_and_not_where_few_do() -> None:
    for period, gives_up in ((2, True), (4, False)):
        sharing = Sharing(workers=1, budget=100 * PAGE, window=8)
        sharing.worker_ready(0)
        for position in range(24):
            commands = sharing.submit((0, position, [0]))
            for _ in range(3):  # a probe, a part, and perhaps the whole
                (command,) = commands or [None]
                if not isinstance(command, Assign):
                    break
                if not isinstance(command.task, Part):
                    commands = sharing.done(0, command.task.seq, PAGE, None)
                elif command.task.probe:
                    plan = Plan(0, PAGE)
                    commands = sharing.part_done(0, command.task.seq, Verdict.PROBED, plan)
                elif position % period == 1:
                    commands = sharing.part_done(0, command.task.seq, Verdict.MISFIT, "odd")
                else:
                    commands = sharing.part_done(0, command.task.seq, Verdict.FILLED, [])
            delivery = sharing.deliver()
            assert delivery is not None
            if delivery.task.extent is not None:
                sharing.release(delivery.task.extent.start)
        assert (sharing.given_up is not None) == gives_up
