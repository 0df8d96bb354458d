"""The trainer forks while it loads: parent and child must not disturb each other."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stoker import DataLoader
from tests.process.datasets import Augmented, Numbers
from tests.process.epochs import counted, epoch, numbers, same, seeded

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def fork(body: Callable[[], None]) -> int:
    """A child that runs `body` and leaves without cleaning up."""
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)  # torch's thread pool did not come along
            body()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a child must not run on as a second pytest
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_what_a_forked_child_holds_is_not_overwritten() -> None:
    loader = DataLoader(
        Numbers(1200, width=20_000), batch_size=4, num_workers=2, memory=10 * 4 * 20_000 * 4
    )
    iterator = iter(loader)
    held = [next(iterator) for _ in range(3)]

    def look() -> None:
        for _ in range(20):
            assert numbers(held) == counted(12, 4)
            time.sleep(0.05)

    child = fork(look)
    held.clear()
    assert numbers(iterator) == counted(1200, 4)[3:]
    assert status(child) == 0


def test_several_children_hold_different_batches() -> None:
    loader = DataLoader(
        Numbers(800, width=20_000), batch_size=4, num_workers=2, memory=12 * 4 * 20_000 * 4
    )
    expected = counted(800, 4)
    children = []
    for step, batch in enumerate(loader):
        if step % 20 == 0 and step < 120:

            def look(batch: Any = batch, step: int = step) -> None:
                for _ in range(10):
                    assert numbers([batch]) == [expected[step]]
                    time.sleep(0.05)

            children.append(fork(look))
        assert numbers([batch]) == [expected[step]]
    assert [status(child) for child in children] == [0] * 6


def test_the_iterator_is_refused_to_a_forked_child() -> None:
    iterator = iter(DataLoader(Numbers(400), batch_size=4, num_workers=2))
    first = next(iterator)

    def take() -> None:
        with pytest.raises(RuntimeError, match="iterate over the loader anew"):
            next(iterator)

    assert status(fork(take)) == 0
    assert numbers([first, *iterator]) == counted(400, 4)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_forked_child_iterates_anew_while_the_parent_goes_on(persistent: bool) -> None:
    loader = DataLoader(Numbers(400), batch_size=4, num_workers=2, persistent_workers=persistent)
    iterator = iter(loader)
    first = next(iterator)

    def load() -> None:
        assert numbers(loader) == counted(400, 4)
        assert numbers(loader) == counted(400, 4)

    child = fork(load)
    assert numbers([first, *iterator]) == counted(400, 4)
    assert status(child) == 0
    assert numbers(loader) == counted(400, 4)


def test_a_forked_child_that_drops_the_iterator_does_not_end_the_workers() -> None:
    expected = epoch(DataLoader(Augmented(400), batch_size=4, num_workers=2))
    loader = DataLoader(Augmented(400), batch_size=4, num_workers=2)
    iterator: Any = seeded(loader)
    batches = [next(iterator)]

    def drop() -> None:
        iterator._shutdown_workers()

    assert status(fork(drop)) == 0
    assert same(batches + list(iterator), expected)
    assert loader.stats().deaths == 0


def look_at(batch: Any, numbers_wanted: list[int]) -> None:
    for _ in range(5):
        assert numbers([batch]) == [numbers_wanted]
        time.sleep(0.02)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_process_made_in_mid_epoch_gets_the_batch(context: str) -> None:
    iterator = iter(DataLoader(Numbers(800, width=5000), batch_size=4, num_workers=2))
    batch = next(iterator)
    child = multiprocessing.get_context(context).Process(
        target=look_at, args=(batch.clone() if context == "spawn" else batch, [0, 1, 2, 3])
    )
    child.start()
    del batch
    assert numbers(iterator) == counted(800, 4)[1:]
    child.join(20)
    assert child.exitcode == 0
    child.close()


def test_a_child_that_stays_does_not_stop_the_parent_from_loading() -> None:
    loader = DataLoader(
        Numbers(400, width=20_000), batch_size=4, num_workers=2, memory=6 * 4 * 20_000 * 4
    )
    iterator = iter(loader)
    held = [next(iterator) for _ in range(4)]
    child = fork(lambda: time.sleep(3.0))
    held.clear()
    assert numbers(iterator) == counted(400, 4)[4:]
    assert status(child) == 0
