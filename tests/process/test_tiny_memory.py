"""``memory=`` is a bound, not a condition: too small a one slows down and is reported."""

from __future__ import annotations

from typing import Any

import pytest

from stoker import DataLoader
from tests.process.datasets import Augmented, Numbers
from tests.process.epochs import counted, epoch, numbers, same

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

WIDTH = 50_000
BATCH_BYTES = 4 * 4 * WIDTH
PARTS = [0.0, 0.1, 0.9, 1.0, 1.5, 2.0, 2.5, 4.0]


def tiny(part: float, **more: Any) -> DataLoader[Any]:
    settings = {
        "batch_size": 4,
        "num_workers": 2,
        "memory": max(1, int(part * BATCH_BYTES)),
        **more,
    }
    return DataLoader(Numbers(120, width=WIDTH), **settings)


@pytest.mark.parametrize("part", PARTS)
def test_an_epoch_completes_in_any_memory(part: float) -> None:
    loader = tiny(part)
    assert numbers(loader) == counted(120, 4)


@pytest.mark.parametrize("part", PARTS)
def test_an_epoch_completes_in_any_memory_when_all_batches_are_kept(part: float) -> None:
    loader = tiny(part)
    assert numbers(list(loader)) == counted(120, 4)


@pytest.mark.parametrize("part", [0.0, 1.0, 1.5])
def test_an_epoch_completes_in_any_memory_with_threads(part: float) -> None:
    assert numbers(list(tiny(part, worker_kind="thread"))) == counted(120, 4)


@pytest.mark.parametrize("part", PARTS)
def test_the_arena_stays_within_memory(part: float) -> None:
    loader = tiny(part)
    iterator = iter(loader)
    for _ in iterator:
        stats = loader.stats()
        assert stats.in_flight_peak_bytes <= max(4096, -(-int(part * BATCH_BYTES) // 4096) * 4096)
        assert stats.in_flight_bytes <= stats.arena_bytes


def test_overdraft_is_counted() -> None:
    loader = tiny(0.0)
    iterator = iter(loader)
    held = [next(iterator) for _ in range(3)]
    assert loader.stats().overdraft_bytes >= 3 * BATCH_BYTES
    assert loader.stats().overdraft_batches >= 3
    assert numbers(held + list(iterator)) == counted(120, 4)
    assert loader.stats().overdraft_batches == 30


def test_overdraft_ends_with_the_batches() -> None:
    loader = tiny(0.0, persistent_workers=True)
    for batch in loader:
        del batch
    next(iter(loader))
    assert loader.stats().overdraft_bytes <= 6 * BATCH_BYTES


def test_enough_memory_has_no_overdraft() -> None:
    loader = tiny(40.0)
    assert numbers(loader) == counted(120, 4)
    assert loader.stats().overdraft_batches == 0
    assert loader.stats().copied_batches == 0


def test_augmentation_does_not_depend_on_memory() -> None:
    def load(memory: int) -> list[Any]:
        return epoch(
            DataLoader(Augmented(40, width=3000), batch_size=4, num_workers=2, memory=memory)
        )

    roomy = load(1 << 30)
    assert same(load(1), roomy)
    assert same(load(100_000), roomy)


def test_growing_batches_complete_in_little_memory() -> None:
    class Growing(Numbers):
        def __getitem__(self, index: int) -> Any:
            return Numbers(1, width=1 + 100 * (index // 4)).__getitem__(0) + index

    loader = DataLoader(Growing(400), batch_size=4, num_workers=3, memory=200_000)
    assert numbers(loader) == counted(400, 4)
