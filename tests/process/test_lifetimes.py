"""Loaders and iterators begin and end in every way that scripts know."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from typing import Any

import pytest

from stoker import DataLoader
from tests.process.datasets import Augmented, Changing, Numbers, Stream
from tests.process.epochs import counted, epoch, flat, numbers, same, seeded, worker_pids
from tests.process.scripts import run

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def loader_of(samples: int = 80, **more: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(samples), **{"batch_size": 4, "num_workers": 2, **more})


def ended(pids: list[int]) -> bool:
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_a_loader_may_be_used_from_a_thread() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(numbers(loader_of())))
    thread.start()
    thread.join()
    assert found == counted(80, 4)


def test_an_iterator_may_move_to_another_thread() -> None:
    iterator = iter(loader_of())
    found = numbers([next(iterator)])
    thread = threading.Thread(target=lambda: found.extend(numbers(iterator)))
    thread.start()
    thread.join()
    assert found == counted(80, 4)


def test_several_threads_may_share_an_iterator() -> None:
    iterator = iter(loader_of(400))
    found: list[list[int]] = []

    def take() -> None:
        for batch in iterator:
            found.extend(numbers([batch]))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == counted(400, 4)


def test_two_loaders_at_once() -> None:
    left, right = loader_of(80), loader_of(80, batch_size=2)
    pairs = list(zip(left, right, strict=False))
    assert numbers(batch for batch, _ in pairs) == counted(80, 4)
    assert numbers(batch for _, batch in pairs) == counted(40, 2)


def test_one_loader_zipped_with_itself() -> None:
    loader = DataLoader(Augmented(80), batch_size=4, num_workers=2)
    pairs = list(zip(loader, loader, strict=True))
    assert same([a["index"] for a, _ in pairs], [b["index"] for _, b in pairs])
    assert len(pairs) == 20


def test_nested_loops_over_two_loaders() -> None:
    outer, inner = loader_of(12), loader_of(8)
    for batch in outer:
        assert numbers(inner) == counted(8, 4)
        del batch
    assert numbers(outer) == counted(12, 4)


def test_nested_loops_over_one_loader() -> None:
    loader = loader_of(12)
    assert [numbers(loader) for _ in loader] == [counted(12, 4)] * 3


@pytest.mark.parametrize("persistent", [False, True])
def test_leaving_in_mid_epoch_and_coming_back(persistent: bool) -> None:
    loader = loader_of(200, persistent_workers=persistent)
    for leave_after in (1, 7, 50, 3, 50):
        found = []
        for batch in loader:
            found.append(batch)
            if len(found) == leave_after:
                break
        assert numbers(found) == counted(200, 4)[:leave_after]


@pytest.mark.parametrize("persistent", [False, True])
def test_epochs_differ_in_augmentation_and_repeat_with_the_seed(persistent: bool) -> None:
    def epochs() -> list[list[Any]]:
        loader = DataLoader(
            Augmented(40), batch_size=4, num_workers=2, persistent_workers=persistent
        )
        return [epoch(loader, 1), list(loader), list(loader)]

    once = epochs()
    assert not same(once[0], once[1])
    assert not same(once[1], once[2])
    assert same(once, epochs())


def test_persistent_workers_stay_the_same_processes() -> None:
    loader = loader_of(persistent_workers=True)
    list(loader)
    before = worker_pids(loader._iterator)
    list(loader)
    assert worker_pids(loader._iterator) == before


def test_leaving_a_stream_early_with_persistent_workers_starts_it_over() -> None:
    loader = DataLoader(Stream(80), batch_size=4, num_workers=2, persistent_workers=True)
    for _ in range(3):
        iterator = iter(loader)
        assert numbers([next(iterator)]) == [[0, 2, 4, 6]]
    assert sorted(flat(numbers(loader))) == list(range(80))


@pytest.mark.parametrize("persistent", [False, True])
def test_a_change_of_the_dataset_is_seen_as_in_torch(persistent: bool) -> None:
    dataset = Changing(8)
    loader = DataLoader(dataset, batch_size=4, num_workers=2, persistent_workers=persistent)
    assert numbers(loader) == counted(8, 4)
    dataset.offset = 100
    first = int(next(iter(loader))[0, 0])
    assert first == (0 if persistent else 100)


def test_an_iterator_that_is_dropped_ends_its_workers_at_once() -> None:
    iterator = iter(loader_of(4000))
    next(iterator)
    pids = worker_pids(iterator)
    del iterator
    assert ended(pids)


def test_a_loader_with_persistent_workers_that_is_dropped_ends_them_at_once() -> None:
    loader = loader_of(4000, persistent_workers=True)
    next(iter(loader))
    pids = worker_pids(loader._iterator)
    gone = weakref.ref(loader)
    del loader
    assert gone() is None, "only the garbage collector would find it"
    assert ended(pids)


@pytest.mark.parametrize("persistent", [False, True])
def test_an_iterator_in_a_cycle_is_ended_by_the_garbage_collector(persistent: bool) -> None:
    gc.collect()
    gc.disable()
    try:
        loader = loader_of(4000, persistent_workers=persistent)
        cycle: dict[str, Any] = {"iterator": iter(loader), "loader": loader}
        cycle["self"] = cycle
        next(cycle["iterator"])
        pids = worker_pids(cycle["iterator"])
        del cycle, loader
        assert not ended(pids)
        gc.collect()
        assert ended(pids)
    finally:
        gc.enable()


def test_a_dataset_that_knows_its_iterator_is_collected() -> None:
    dataset = Numbers(4000)
    iterator = iter(DataLoader(dataset, batch_size=4, num_workers=2))
    dataset.iterator = iterator  # type: ignore[attr-defined]
    next(iterator)
    pids = worker_pids(iterator)
    del dataset, iterator
    gc.collect()
    assert ended(pids)


def test_batches_that_are_kept_never_change() -> None:
    loader = DataLoader(
        Numbers(800, width=5000), batch_size=4, num_workers=2, memory=20 * 4 * 5000 * 4
    )
    held = []
    for step, batch in enumerate(loader):
        if step % 3 == 0:
            held.append(batch)
        if step % 50 == 0:
            assert numbers(held) == counted(800, 4)[::3][: len(held)]
    assert numbers(held) == counted(800, 4)[::3]


def test_batches_outlive_the_loader() -> None:
    iterator = iter(DataLoader(Numbers(400, width=5000), batch_size=4, num_workers=2))
    held = [next(iterator) for _ in range(20)]
    slices = [batch[1:3, ::2] for batch in held[:5]]
    del iterator, held[:5]
    gc.collect()
    assert numbers(held) == counted(80, 4)[5:]
    assert [part[:, 0].int().tolist() for part in slices] == [
        [n + 1, n + 2] for n in range(0, 20, 4)
    ]
    other = iter(DataLoader(Numbers(400, width=5000), batch_size=4, num_workers=2))
    assert numbers(other) == counted(400, 4)
    assert numbers(held) == counted(80, 4)[5:]


def test_an_exhausted_iterator_stays_exhausted() -> None:
    iterator = iter(loader_of(8))
    assert len(list(iterator)) == 2
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)


def test_an_iterator_that_was_never_asked_leaves_nothing() -> None:
    iterator = iter(loader_of(4000))
    del iterator


def test_more_workers_than_batches() -> None:
    assert numbers(loader_of(8, num_workers=6)) == counted(8, 4)


def test_an_empty_dataset() -> None:
    assert list(loader_of(0)) == []


def test_seeds_are_those_of_the_loader_and_not_of_what_was_left_early() -> None:
    loader = DataLoader(Augmented(400), batch_size=4, num_workers=2, persistent_workers=True)
    expected = epoch(loader, 4)
    again = DataLoader(Augmented(400), batch_size=4, num_workers=2, persistent_workers=True)
    assert same([next(seeded(again, 4)) for _ in range(1)], expected[:1])


ENDINGS = {
    "end of the script": ("", 0, False),
    "end of the script, persistent workers": ("", 0, True),
    "sys.exit": ("sys.exit(7)", 7, True),
    "an exception": ("raise ValueError('training went wrong')", 1, False),
}

LEAVES = """
loader = DataLoader(Numbers(4000), batch_size=4, num_workers=2, persistent_workers={persistent},
                    worker_kind={kind!r})
iterator = iter(loader)
batches = [next(iterator) for _ in range(5)]
{ending}
"""


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_may_end_in_mid_epoch(ending: str) -> None:
    line, code, persistent = ENDINGS[ending]
    script = run(LEAVES.format(persistent=persistent, kind="process", ending=line), seconds=15)
    assert script.returncode == code, script.stderr
    if code == 1:
        assert script.stderr.count("Traceback") == 1
        assert script.stderr.endswith("ValueError: training went wrong\n")
    else:
        assert script.stderr == ""


def test_a_script_with_thread_workers_may_end_in_mid_epoch() -> None:
    script = run(LEAVES.format(persistent=True, kind="thread", ending=""), seconds=15)
    assert script.returncode == 0, script.stderr
    assert script.stderr == ""


INSIDE_A_FUNCTION = """
def train():
    dataset = Sleepy(400, set(range(20, 400)), 30.0)
    for step, batch in enumerate(DataLoader(dataset, batch_size=4, num_workers=2)):
        if step == 4:
            raise SystemExit(3)

train()
"""


def test_a_script_may_end_while_workers_are_busy() -> None:
    script = run(INSIDE_A_FUNCTION, seconds=15)
    assert script.returncode == 3
    assert script.stderr == ""
