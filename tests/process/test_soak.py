"""A thousand faults and resizes in one run: nothing is lost, repeated, changed or left behind.

Everything that can go wrong at once does so at a high rate: workers and their host are killed,
workers are stopped, numbers of workers and bytes change from two threads, epochs are broken off,
and batches are held for a long or a short time.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections import Counter
from typing import Any

import psutil
import pytest
import torch

from stoker import DataLoader, Knobs
from stoker.loader.dispatch import MAX_STRIKES
from tests.process.datasets import Augmented
from tests.process.epochs import epoch, host_pid, kill, same, seeded

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

EVENTS = 1000
SEEDS = 3
STOPS = 3
BREAKS = 25


class Uneven(Augmented):
    """Augmented samples of which some are a hundred times as large as others, and some slow."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        sample["large"] = torch.full((20_000 if index // 4 % 9 == 0 else 200,), float(index))
        return sample


def loader_of(**more: Any) -> DataLoader[Any]:
    # Not shuffled: the four samples of a batch must be of one size.
    return DataLoader(Uneven(400), batch_size=4, num_workers=2, prefetch_factor=2, **more)


class Soak:
    """One loader, what happens to it, and what it should deliver all the same."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.expected = [epoch(loader_of(), seed) for seed in range(SEEDS)]
        self.loader = loader_of(timeout=2)
        self.happened = Counter({"resized beside": 0})
        self.held: list[tuple[Any, Any]] = []
        self.start()

    @property
    def events(self) -> int:
        return sum(self.happened.values())

    def start(self) -> None:
        self.seed = self.random.randrange(SEEDS)
        self.position = 0
        self.iterator: Any = seeded(self.loader, self.seed)

    # ---- what happens

    def event(self) -> None:
        kinds = ["kill"] * 40 + ["workers"] * 15 + ["bytes"] * 30 + ["hold", "let go"] * 5
        kinds += ["host", "stop", "break off"] * 2
        kind = self.random.choice(kinds)
        if getattr(self, kind.replace(" ", "_"))():
            self.happened[kind] += 1

    def victim(self) -> Any:
        """A worker whose batches have not brought down others too often, or None."""
        engine = self.iterator._engine
        alive = [handle for handle in self.iterator._workers if handle.is_alive()]
        if not alive:
            return None
        handle = self.random.choice(alive)
        state = engine.dispatch.workers[handle.id]
        spared = any(task.strikes + 1 >= MAX_STRIKES for task in state.queue)
        return None if spared or engine._unready_deaths[handle.id] else handle

    def kill(self) -> bool:
        handle = self.victim()
        if handle is not None:
            handle.kill()
        return handle is not None

    def stop(self) -> bool:
        handle = self.victim() if self.happened["stop"] < STOPS else None
        if handle is not None:
            handle.signal(signal.SIGSTOP)
        return handle is not None

    def host(self) -> bool:
        if self.iterator._engine._host_deaths:
            return False
        kill(host_pid(self.iterator))
        return True

    def workers(self) -> bool:
        wanted = self.random.randint(1, 6)
        achieved = self.loader.apply(Knobs(workers=wanted))
        assert achieved.workers is not None
        assert 1 <= achieved.workers <= 6
        return True

    def bytes(self) -> bool:
        wanted = self.random.choice([0, 5_000, 100_000, 400_000, 10_000_000])
        self.loader.apply(Knobs(in_flight_bytes=wanted))
        return True

    def hold(self) -> bool:
        self.take()
        return True

    def let_go(self) -> bool:
        for batch, expected in self.held:
            assert same(batch, expected), "a batch was changed while it was held"
        self.held.clear()
        return True

    def break_off(self) -> bool:
        if self.happened["break off"] >= BREAKS:
            return False
        del self.iterator
        self.start()
        return True

    # ---- what must be true

    def take(self) -> None:
        batch = next(self.iterator, None)
        expected = self.expected[self.seed]
        if batch is None:
            assert self.position == len(expected), "batches are missing at the end"
            self.start()
            return
        assert same(batch, expected[self.position]), f"batch {self.position} is not the right one"
        self.position += 1
        if self.random.random() < 0.3:
            self.held.append((batch, expected[self.position - 1]))
        if len(self.held) > 40:
            del self.held[self.random.randrange(40)]


def resize_beside(soak: Soak, over: threading.Event, failed: list[BaseException]) -> None:
    rng = random.Random(1)
    try:
        while not over.wait(0.05 + rng.random() / 5):
            workers = rng.choice([None, None, 1, 3, 6])
            soak.loader.apply(Knobs(workers, rng.choice([0, 50_000, 1_000_000])))
            soak.happened["resized beside"] += 1
    except BaseException as error:
        failed.append(error)
        raise


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_thousand_faults_and_resizes_lose_repeat_and_leak_nothing() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    children = len(psutil.Process().children(recursive=True))
    soak = Soak(seed=7)
    over = threading.Event()
    failed: list[BaseException] = []
    other = threading.Thread(target=resize_beside, args=(soak, over, failed))
    other.start()
    try:
        while soak.events < EVENTS:
            soak.event()
            soak.take()
    finally:
        over.set()
        other.join()
    assert not failed
    rest = list(soak.iterator)
    assert same(rest, soak.expected[soak.seed][soak.position :])
    soak.let_go()
    assert set(soak.happened) >= {"kill", "host", "stop", "break off", "workers", "bytes"}
    assert soak.happened["kill"] > 100, soak.happened
    deaths = soak.loader.stats().deaths
    assert deaths > 50, "most of those that were killed were missed"
    del soak, rest
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert len(psutil.Process().children(recursive=True)) <= children
