"""Workers and bytes change in mid-epoch, from any thread; nobody who reads the batches can tell."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info

from stoker import DataLoader, Knobs
from stoker.errors import ConfigError
from stoker.loader.iterator import EngineIter
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
    worker_pids,
)
from tests.process.scripts import run

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
MEGABYTE = 1 << 20


def loader_of(dataset: Any, **more: Any) -> DataLoader[Any]:
    settings = {"batch_size": 4, "shuffle": True, "num_workers": 2, "prefetch_factor": 2, **more}
    return DataLoader(dataset, **settings)


@pytest.fixture(scope="module")
def undisturbed() -> list[Any]:
    return epoch(loader_of(Augmented(400)))


def eventually(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def settle(loader: DataLoader[Any], iterator: Any, workers: int) -> None:
    """Until so many workers are there, and no more."""

    def settled() -> bool:
        iterator._engine.has_next()
        return loader.stats().workers == workers == len(iterator._workers)

    eventually(settled, f"{loader.stats().workers} workers, not {workers}")


@pytest.mark.parametrize("steps", [(4,), (1,), (6, 1, 5), (1, 2, 3, 4), (5, 1, 5, 1)])
def test_any_number_of_workers_at_any_time(steps: tuple[int, ...], undisturbed: list[Any]) -> None:
    loader = loader_of(Augmented(400))
    iterator = seeded(loader)
    batches = [next(iterator) for _ in range(5)]
    for workers in steps:
        assert loader.apply(Knobs(workers=workers)).workers == workers
        assert loader.knobs.workers == loader.num_workers == workers
        batches += [next(iterator) for _ in range(6)]
        settle(loader, iterator, workers)
    assert same(batches + list(iterator), undisturbed)
    assert loader.stats().deaths == 0


def test_a_worker_too_many_finishes_what_it_has_and_exits(tmp_path: Path) -> None:
    dataset = Gated(200, at=9, folder=tmp_path)
    loader = loader_of(dataset, shuffle=False)
    iterator = iter(loader)
    batches = [next(iterator) for _ in range(2)]
    slow = dataset.who_waits()
    before = worker_pids(iterator)
    assert len(before) == 2
    # The one that stays is the first: it may be either that waits at the gate.
    loader.apply(Knobs(workers=1))
    time.sleep(0.05)
    assert Path(f"/proc/{slow}").exists(), "it has not finished"
    dataset.open_gate()
    batches += list(iterator)
    assert flat(batch["index"].tolist() for batch in batches) == list(range(200))
    assert loader.stats().deaths == 0


def test_workers_wanted_again_before_they_are_gone(undisturbed: list[Any]) -> None:
    loader = loader_of(Augmented(400), num_workers=6)
    iterator = seeded(loader)
    batches = [next(iterator)]
    before = len(os.listdir("/proc/self/fd"))
    while len(batches) < 90:
        loader.apply(Knobs(workers=1))
        loader.apply(Knobs(workers=6))
        loader.apply(Knobs(workers=3))
        loader.apply(Knobs(workers=6))
        batches.append(next(iterator))
    settle(loader, iterator, 6)
    worker_pids(iterator)
    assert len(os.listdir("/proc/self/fd")) <= before + 6, "a pidfd each that was not known yet"
    assert same(batches + list(iterator), undisturbed)


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_any_number_of_bytes_at_any_time(kind: str) -> None:
    loader = DataLoader(
        Numbers(400, width=10_000), batch_size=4, num_workers=2, worker_kind=kind, memory=MEGABYTE
    )
    iterator = iter(loader)
    held: dict[int, torch.Tensor] = {}
    got = []
    for step in range(100):
        if step % 5 == 0:
            wanted = [MEGABYTE, 0, 64 * MEGABYTE, 3000, 200_000][step // 5 % 5]
            achieved = loader.apply(Knobs(in_flight_bytes=wanted)).in_flight_bytes
            assert achieved is not None
            assert wanted - 4096 < achieved <= wanted
            assert loader.knobs.in_flight_bytes == loader.stats().arena_bytes == achieved
            assert loader.knobs.workers == 2
        batch = next(iterator)
        got += numbers([batch])
        if step % 3 == 0:
            held[step] = batch
        if step % 20 == 0:
            held.clear()
        assert numbers(held.values()) == [counted(400, 4)[n] for n in held]
    assert got == counted(400, 4)
    assert next(iterator, None) is None
    assert loader.memory == 200_000


@pytest.mark.parametrize("seed", range(4))
def test_resizes_and_deaths_at_random_from_two_threads(seed: int, undisturbed: list[Any]) -> None:
    rng = random.Random(seed)
    loader = loader_of(Augmented(400))
    iterator = seeded(loader)
    over = threading.Event()
    resized: list[Knobs] = []

    def resize() -> None:
        rng = random.Random(-seed)
        while not over.is_set():
            resized.append(loader.apply(Knobs(workers=rng.randint(1, 5))))
            loader.apply(Knobs(in_flight_bytes=rng.choice([0, 5000, 10**5, 10**8])))
            time.sleep(rng.random() / 40)
        resized.append(Knobs())

    thread = threading.Thread(target=resize)
    thread.start()
    batches = []
    try:
        for batch in iterator:
            batches.append({name: value.clone() for name, value in batch.items()})
            if rng.random() < 0.15:
                alive = [handle for handle in iterator._workers if handle.is_alive()]
                if alive:
                    rng.choice(alive).kill()
            if rng.random() < 0.02:
                kill(host_pid(iterator))
    finally:
        over.set()
        thread.join()
    assert resized[-1] == Knobs(), "the other thread failed"
    assert len({knobs.workers for knobs in resized}) > 2
    assert same(batches, undisturbed)


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_a_thread_that_waits_for_a_batch_is_woken_to_resize(kind: str, tmp_path: Path) -> None:
    dataset = Gated(40, at=5, folder=tmp_path)
    loader = loader_of(dataset, shuffle=False, worker_kind=kind)
    iterator = iter(loader)
    next(iterator)
    rest: list[Any] = []
    consumer = threading.Thread(target=lambda: rest.extend(iterator))
    consumer.start()
    dataset.who_waits()
    for workers in (4, 1, 3):
        assert loader.apply(Knobs(workers, 10 * MEGABYTE * workers)) == loader.knobs
        assert loader.knobs.workers == workers
        assert not rest
    dataset.open_gate()
    consumer.join()
    assert flat(batch["index"].tolist() for batch in rest) == list(range(4, 40))


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_a_signal_handler_may_resize_while_its_thread_waits(kind: str, tmp_path: Path) -> None:
    dataset = Gated(40, at=5, folder=tmp_path)
    loader = loader_of(dataset, shuffle=False, worker_kind=kind)
    iterator = iter(loader)
    batches = [next(iterator)]
    main = threading.get_ident()
    seen: list[Knobs] = []

    def other() -> None:
        dataset.who_waits()
        eventually(lambda: iterator._engine.waiting, "the caller waits")
        signal.pthread_kill(main, signal.SIGUSR1)
        eventually(lambda: loader.knobs.workers == 4, "resized while the caller waits")
        dataset.open_gate()

    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(loader.apply(Knobs(workers=4))))
    thread = threading.Thread(target=other)
    thread.start()
    try:
        batches += list(iterator)
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert [knobs.workers for knobs in seen] == [2]
    assert flat(batch["index"].tolist() for batch in batches) == list(range(40))


def test_before_there_is_an_iterator_it_is_what_the_next_one_starts_with() -> None:
    loader = DataLoader(Numbers(40), batch_size=4, num_workers=0)
    assert loader.knobs.workers is None
    assert loader.apply(Knobs(3, "1MiB")) == loader.knobs == Knobs(3, MEGABYTE)
    assert loader.num_workers == 3
    iterator = iter(loader)
    assert isinstance(iterator, EngineIter)
    assert len(worker_pids(iterator)) == 3
    assert loader.stats().arena_bytes == MEGABYTE
    assert numbers(iterator) == counted(40, 4)
    assert loader.apply(Knobs(workers=1)) == Knobs(1, MEGABYTE), "between epochs"
    assert len(worker_pids(iter(loader))) == 1


def test_a_loader_without_workers_goes_on_without_until_the_next_epoch() -> None:
    loader = DataLoader(Numbers(40), batch_size=4, num_workers=0)
    iterator = iter(loader)
    first = next(iterator)
    loader.apply(Knobs(workers=2))
    assert numbers([first, *iterator]) == counted(40, 4)
    assert numbers(loader) == counted(40, 4)
    assert len(worker_pids(iter(loader))) == 2


def test_persistent_workers_are_resized_between_epochs() -> None:
    loader = loader_of(Augmented(80), persistent_workers=True)
    expected = [epoch(loader, seed) for seed in range(3)]
    loader = loader_of(Augmented(80), persistent_workers=True)
    for seed, workers in enumerate((2, 5, 1)):
        assert loader.apply(Knobs(workers=workers)).workers == workers
        assert same(epoch(loader, seed), expected[seed])
        settle(loader, loader._iterator, workers)


def test_before_the_first_batch_the_number_changes_as_soon_as_it_can(
    undisturbed: list[Any],
) -> None:
    loader = loader_of(Augmented(400))
    iterator = seeded(loader)
    loader.apply(Knobs(workers=4))
    batches = [next(iterator) for _ in range(3)]
    assert loader.knobs.workers == 4
    assert same(batches + list(iterator), undisturbed)


class Shares(Numbers):
    """Delivers who loads it."""

    def __getitem__(self, index: int) -> torch.Tensor:
        info = get_worker_info()
        return torch.tensor([index, info.id, info.num_workers])


def init(worker: int) -> None:
    torch.manual_seed(worker)


@pytest.mark.parametrize("more", [{}, {"worker_init_fn": init}], ids=["looks", "init"])
@pytest.mark.parametrize("persistent", [False, True])
def test_where_identity_matters_the_number_changes_with_the_epoch(
    more: dict[str, Any], persistent: bool
) -> None:
    loader = loader_of(Shares(80), shuffle=False, persistent_workers=persistent, **more)
    iterator = iter(loader)
    batches = [next(iterator) for _ in range(3)]
    achieved = loader.apply(Knobs(4, 10 * MEGABYTE))
    assert achieved == Knobs(2, 10 * MEGABYTE), "bytes can change, workers can't"
    batches += list(iterator)
    assert [int(batch[0, 1]) for batch in batches] == [0, 1] * 10
    assert loader.num_workers == 4
    batches = list(loader)
    assert [int(batch[0, 1]) for batch in batches] == [0, 1, 2, 3] * 5
    assert all((batch[:, 2] == 4).all() for batch in batches), "and they know it"


@pytest.mark.parametrize("persistent", [False, True])
def test_a_stream_keeps_its_workers_for_the_epoch(persistent: bool) -> None:
    loader = DataLoader(
        Stream(60), batch_size=4, num_workers=2, persistent_workers=persistent, memory=MEGABYTE
    )
    iterator = iter(loader)
    batches = [next(iterator) for _ in range(3)]
    assert loader.apply(Knobs(3, 5000)) == Knobs(2, 4096)
    batches += list(iterator)
    assert sorted(flat(numbers(batches))) == list(range(60))
    assert sorted(flat(numbers(loader))) == list(range(60)), "three shares now, each once"
    assert loader.knobs.workers == 3


def test_threads_read_a_stream_once_however_many_are_asked_for() -> None:
    loader = DataLoader(Stream(60), batch_size=4, num_workers=1, worker_kind="thread")
    iterator = iter(loader)
    batches = [next(iterator)]
    assert loader.apply(Knobs(workers=3)).workers == 1
    assert numbers([*batches, *iterator]) == numbers(loader) == counted(60, 4)


def test_after_an_interruption_loading_goes_on_with_what_was_applied(
    undisturbed: list[Any],
) -> None:
    loader = loader_of(Augmented(400))
    iterator = seeded(loader)
    batches = [next(iterator) for _ in range(3)]
    loader.apply(Knobs(4, 5 * MEGABYTE))
    iterator._engine.suspect = True  # as after a Ctrl-C in the middle of a change
    batches.append(next(iterator))
    assert loader.knobs == Knobs(4, 5 * MEGABYTE)
    assert len(worker_pids(iterator)) == 4
    iterator._engine.suspect = True
    assert loader.apply(Knobs(workers=3)).workers == 4, "carried out by the next call"
    batches += [next(iterator) for _ in range(2)]
    assert loader.knobs.workers == 3
    assert same(batches + list(iterator), undisturbed)


def test_workers_are_added_only_as_far_as_their_private_memory_leaves_room(
    undisturbed: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    loader = loader_of(Augmented(400), memory=MEGABYTE)
    iterator = seeded(loader)
    batches = [next(iterator) for _ in range(3)]
    engine = iterator._engine
    engine._private = {0: int(engine.terms.available_bytes * 0.2)}
    assert loader.apply(Knobs(workers=8)).workers == 4
    assert "leaves room for 4" in caplog.text
    room = int(engine.terms.available_bytes * 0.5)
    assert loader.apply(Knobs(in_flight_bytes=room)).workers == 1, "bytes take from that room"
    engine._private = {}
    assert loader.apply(Knobs(8, MEGABYTE)).workers == 8, "and a later call may raise it again"
    assert same(batches + list(iterator), undisturbed)


def test_bytes_grow_to_what_this_process_may_use_and_no_further() -> None:
    loader = DataLoader(Numbers(400), batch_size=4, num_workers=1, memory=MEGABYTE)
    iterator = iter(loader)
    next(iterator)
    most = loader.apply(Knobs(in_flight_bytes="900TB")).in_flight_bytes
    assert most == iterator._engine.arena.region_bytes == loader.knobs.in_flight_bytes
    assert most > 100 * MEGABYTE


LIMITED_ADDRESSES = """
import resource
from stoker import Knobs
loader = DataLoader(Numbers(400), batch_size=4, num_workers=2, memory="4MiB", worker_kind={kind!r})
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
iterator = iter(loader)
got = numbers([next(iterator)])
print(loader.apply(Knobs(3, "64MiB")))
assert got + numbers(iterator) == counted(400, 4)
"""


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_where_addresses_are_limited_bytes_are_not_raised_in_mid_epoch(kind: str) -> None:
    ended = run(LIMITED_ADDRESSES.format(kind=kind))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"Knobs(workers=3, in_flight_bytes={4 << 20})\n"


FEW_DESCRIPTORS = """
import resource
from stoker import Knobs
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
iterator = iter(loader := DataLoader(Numbers(4000), batch_size=4, num_workers=2))
got = [next(iterator)]
achieved = loader.apply(Knobs(workers=100))
assert 2 <= achieved.workers < 100, achieved
got += [next(iterator) for _ in range(50)]
assert loader.knobs.workers < 100
loader.apply(Knobs(workers=1))
got += [next(iterator) for _ in range(50)]
assert loader.apply(Knobs(workers=4)).workers == 4
assert numbers([*got, *iterator]) == counted(4000, 4)
assert len(os.listdir("/proc/self/fd")) < 20
"""


def test_without_descriptors_for_more_workers_it_goes_on_with_those_there_are() -> None:
    ended = run(FEW_DESCRIPTORS)
    assert ended.returncode == 0, ended.stderr


def test_a_forked_child_changes_its_own_loader_only(undisturbed: list[Any]) -> None:
    loader = loader_of(Augmented(400))
    iterator = seeded(loader)
    batches = [next(iterator) for _ in range(3)]
    loader.apply(Knobs(workers=3))
    pid = os.fork()
    if not pid:
        code = 1
        try:
            assert loader.apply(Knobs(workers=1)).workers == 1
            code = 0 if len(list(loader)) == 100 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert loader.knobs.workers == 3
    assert loader.apply(Knobs(workers=4)).workers == 4
    assert same(batches + list(iterator), undisturbed)


def test_applying_to_a_loader_that_is_just_ending(undisturbed: list[Any]) -> None:
    loader = loader_of(Augmented(400))
    over = threading.Event()

    def resize() -> None:
        rng = random.Random(3)
        while not over.is_set():
            loader.apply(Knobs(workers=rng.randint(1, 3)))

    thread = threading.Thread(target=resize)
    thread.start()
    try:
        for _ in range(3):
            assert same(epoch(loader), undisturbed)
            broken_off = seeded(loader)
            next(broken_off)
            del broken_off
    finally:
        over.set()
        thread.join()


def test_a_stopped_worker_does_not_keep_others_from_being_resized() -> None:
    loader = DataLoader(Numbers(400), batch_size=4, num_workers=2, timeout=1)
    iterator = iter(loader)
    batches = [next(iterator)]
    os.kill(worker_pids(iterator)[1], signal.SIGSTOP)
    assert loader.apply(Knobs(workers=1)).workers == 1
    assert loader.apply(Knobs(workers=3)).workers == 3
    assert numbers(batches + list(iterator)) == counted(400, 4)


def test_something_else_than_knobs_is_refused() -> None:
    loader = DataLoader(Numbers(4), num_workers=1)
    with pytest.raises(ConfigError, match=r"knobs=4 is not acceptable; give stoker\.Knobs"):
        loader.apply(4)  # type: ignore[arg-type]
    assert "knobs" not in vars(loader), "frameworks rebuild a loader from what is in there"
