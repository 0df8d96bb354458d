"""Workers and their host are killed; nobody who reads the batches can tell."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from stoker import DataLoader
from tests.process.datasets import Augmented, Gated, Numbers, Stream
from tests.process.epochs import (
    counted,
    epoch,
    flat,
    host_pid,
    kill,
    numbers,
    same,
    seeded,
    wait_until_idle,
    worker_pids,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def loader_of(dataset: Any, **more: Any) -> DataLoader[Any]:
    settings = {"batch_size": 4, "shuffle": True, "num_workers": 3, "prefetch_factor": 2, **more}
    return DataLoader(dataset, **settings)


@pytest.fixture(scope="module")
def undisturbed() -> list[Any]:
    return epoch(loader_of(Augmented(160)))


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_each_worker_may_die_in_its_turn(victim: int, undisturbed: list[Any]) -> None:
    loader = loader_of(Augmented(160))
    iterator = seeded(loader)
    batches = [next(iterator) for _ in range(5)]
    kill(worker_pids(iterator)[victim])
    batches += list(iterator)
    assert same(batches, undisturbed)
    assert loader.stats().deaths == 1


def test_workers_may_die_again_and_again(undisturbed: list[Any]) -> None:
    loader = loader_of(Augmented(160))
    iterator = seeded(loader)
    batches = []
    for number in range(12):
        batches.append(next(iterator))
        kill(worker_pids(iterator)[number % 3])
    batches += list(iterator)
    assert same(batches, undisturbed)
    assert loader.stats().deaths >= 11  # the last one may come too late to be noticed


def test_two_of_three_may_die_at_once(undisturbed: list[Any]) -> None:
    iterator = seeded(loader_of(Augmented(160)))
    batches = [next(iterator)]
    for pid in worker_pids(iterator)[:2]:
        kill(pid)
    assert same(batches + list(iterator), undisturbed)


def test_all_may_die_at_once_and_twice(undisturbed: list[Any]) -> None:
    iterator = seeded(loader_of(Augmented(160)))
    batches = []
    for _ in range(2):
        batches += [next(iterator) for _ in range(3)]
        for pid in worker_pids(iterator):
            kill(pid)
    assert same(batches + list(iterator), undisturbed)


def test_all_may_die_before_the_first_batch(undisturbed: list[Any]) -> None:
    iterator = seeded(loader_of(Augmented(160)))
    for pid in worker_pids(iterator):
        kill(pid)
    assert same(list(iterator), undisturbed)


def test_the_host_may_die(undisturbed: list[Any]) -> None:
    loader = loader_of(Augmented(160))
    iterator = seeded(loader)
    batches = [next(iterator) for _ in range(5)]
    kill(host_pid(iterator))
    batches += list(iterator)
    assert same(batches, undisturbed)
    assert loader.stats().deaths == 1


def test_the_host_may_die_before_it_has_started_a_worker(undisturbed: list[Any]) -> None:
    iterator = seeded(loader_of(Augmented(160)))
    kill(host_pid(iterator))
    assert same(list(iterator), undisturbed)


def test_the_host_may_die_several_times_while_batches_get_through(undisturbed: list[Any]) -> None:
    iterator = seeded(loader_of(Augmented(160)))
    batches = []
    for _ in range(5):
        batches += [next(iterator) for _ in range(3)]
        kill(host_pid(iterator))
    assert same(batches + list(iterator), undisturbed)


def test_host_and_workers_may_die_together(undisturbed: list[Any]) -> None:
    iterator = seeded(loader_of(Augmented(160)))
    batches = [next(iterator)]
    for pid in [*worker_pids(iterator), host_pid(iterator)]:
        kill(pid)
    assert same(batches + list(iterator), undisturbed)


def test_a_worker_may_die_while_idle(undisturbed: list[Any]) -> None:
    iterator = seeded(loader_of(Augmented(160)))
    batches = [next(iterator)]
    wait_until_idle(iterator)
    kill(worker_pids(iterator)[0])
    time.sleep(0.05)
    assert same(batches + list(iterator), undisturbed)


def test_a_worker_may_die_while_fetching(tmp_path: Path, undisturbed: list[Any]) -> None:
    dataset = Gated(160, at=int(undisturbed[6]["index"][2]), folder=tmp_path)
    iterator = seeded(loader_of(dataset))
    batches = [next(iterator) for _ in range(4)]
    kill(dataset.who_waits())
    dataset.open_gate()
    assert same(batches + list(iterator), undisturbed)


def test_a_worker_may_die_while_stopped(undisturbed: list[Any]) -> None:
    iterator = seeded(loader_of(Augmented(160)))
    batches = [next(iterator)]
    victim = worker_pids(iterator)[1]
    os.kill(victim, signal.SIGSTOP)
    kill(victim)
    assert same(batches + list(iterator), undisturbed)


def test_a_worker_may_die_while_it_waits_for_space() -> None:
    width = 40_000
    dataset = Augmented(24, width=width)
    expected = epoch(loader_of(dataset, batch_size=2))
    iterator: Any = seeded(loader_of(dataset, batch_size=2, memory=5 * 4 * width))
    batches = [next(iterator)]
    parked = iterator._engine.dispatch._parked
    deadline = time.monotonic() + 10
    while not parked and time.monotonic() < deadline:
        iterator._engine.has_next()
    assert parked, "no worker waits for space: this test needs another size"
    kill(worker_pids(iterator)[parked[0].worker])
    assert same(batches + list(iterator), expected)


def test_a_worker_may_die_in_a_batch_that_overdraws() -> None:
    dataset = Augmented(24, width=40_000)
    expected = epoch(loader_of(dataset, batch_size=2))
    loader = loader_of(dataset, batch_size=2, memory=1)
    iterator = seeded(loader)
    batches = []
    for _ in range(4):
        batches.append(next(iterator))
        kill(worker_pids(iterator)[0])
    assert same(batches + list(iterator), expected)
    assert loader.stats().overdraft_batches > 0


def test_persistent_workers_may_die_between_epochs() -> None:
    loader = loader_of(Augmented(64), persistent_workers=True)
    expected = [epoch(loader, seed) for seed in (1, 2)]
    again = loader_of(Augmented(64), persistent_workers=True)
    first = epoch(again, 1)
    for pid in worker_pids(again._iterator):
        kill(pid)
    assert same([first, epoch(again, 2)], expected)


def test_a_host_of_persistent_workers_may_die_between_epochs() -> None:
    loader = loader_of(Augmented(64), persistent_workers=True)
    expected = [epoch(loader, seed) for seed in (1, 2)]
    again = loader_of(Augmented(64), persistent_workers=True)
    first = epoch(again, 1)
    kill(host_pid(again._iterator))
    assert same([first, epoch(again, 2)], expected)


def test_deaths_do_not_change_batches_under_spawn(undisturbed: list[Any]) -> None:
    loader = loader_of(Augmented(160), multiprocessing_context="spawn", num_workers=2)
    iterator = seeded(loader)
    batches = [next(iterator) for _ in range(3)]
    kill(worker_pids(iterator)[0])
    batches += [next(iterator) for _ in range(3)]
    kill(host_pid(iterator))
    assert same(batches + list(iterator), undisturbed)


def test_batches_held_across_deaths_keep_their_contents() -> None:
    iterator = seeded(DataLoader(Numbers(400, width=5000), batch_size=4, num_workers=2))
    held = []
    for batch in iterator:
        held.append(batch)
        if len(held) % 20 == 0:
            kill(worker_pids(iterator)[0])
    assert numbers(held) == counted(400, 4)


def test_a_host_that_dies_every_time_is_an_error() -> None:
    iterator: Any = seeded(loader_of(Augmented(160, seconds=0.2)))
    crew = iterator._engine._crew
    restart = crew.restart
    kill(host_pid(iterator))

    def restart_and_die() -> None:
        restart()
        kill(crew._process.pid)

    crew.restart = restart_and_die
    with pytest.raises(RuntimeError, match="host process was killed by SIGKILL"):
        next(iterator)
    with pytest.raises(RuntimeError, match="host process was killed by SIGKILL"):
        next(iterator)


@pytest.mark.parametrize("persistent", [False, True])
def test_the_death_of_a_stream_is_an_error_and_a_new_iteration_works(
    persistent: bool, tmp_path: Path
) -> None:
    antidote = tmp_path / "antidote"
    dataset = Stream(40, deadly=21, antidote=antidote)
    loader = DataLoader(dataset, batch_size=4, num_workers=2, persistent_workers=persistent)
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid \d+\) is killed by signal: "):
        list(loader)
    antidote.touch()
    found = numbers(loader)
    assert sorted(flat(found)) == list(range(40))
