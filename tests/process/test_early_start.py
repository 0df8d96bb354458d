"""Batches with samples known to be slow are begun early; nobody who reads the batches can tell.

Where it does not matter how the loader came to know them, costs are put into its table at once: no
test here depends on how long anything takes.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch.utils.data import WeightedRandomSampler

from stoker import DataLoader, Knobs
from tests.process.datasets import Augmented, Numbers, Sleepy
from tests.process.epochs import counted, epoch, kill, numbers, same, seeded, worker_pids

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SAMPLES = 240
SLOW = (50, 51, 52, 100, 121, 139, 140, 177, 233)


def loader_of(dataset: Any, slow: tuple[int, ...] = SLOW, **more: Any) -> DataLoader[Any]:
    settings = {"batch_size": 4, "num_workers": 4, "prefetch_factor": 2, **more}
    loader = DataLoader(dataset, **settings)
    loader._counters.costs.note([], [(index, 1000.0) for index in slow])
    return loader


def began(loader: DataLoader[Any]) -> dict[int, int]:
    """When each batch was begun, by its position."""
    return {span.step: span.start_ns for span in loader.timeline() if span.kind == "fetch"}


@pytest.fixture(scope="module")
def undisturbed() -> list[Any]:
    return epoch(DataLoader(Augmented(SAMPLES), batch_size=4, shuffle=True, num_workers=2))


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("more", [{}, {"prefetch_factor": None}, {"worker_kind": "thread"}])
def test_order_is_the_samplers_and_each_sample_comes_once(
    workers: int, more: dict[str, Any]
) -> None:
    loader = loader_of(Numbers(SAMPLES), num_workers=workers, **more)
    assert numbers(loader) == counted(SAMPLES, 4)
    assert loader.stats().early_batches


def test_a_slow_batch_is_begun_long_before_its_turn() -> None:
    loader = loader_of(Numbers(SAMPLES), slow=(200,))
    assert numbers(loader) == counted(SAMPLES, 4)
    begin = began(loader)
    assert begin[50] < begin[30], "of which the window would have let it be 8 ahead"
    assert loader.stats().early_batches == 1


def test_no_more_batches_are_outstanding_than_prefetch_factor_allows() -> None:
    loader = loader_of(Numbers(SAMPLES))
    iterator = iter(loader)
    for _ in range(SAMPLES // 4):
        assert iterator._engine.outstanding <= 8
        next(iterator)
    assert loader.stats().early_batches


def test_augmentations_are_those_of_the_position(undisturbed: list[Any]) -> None:
    loader = loader_of(Augmented(SAMPLES), shuffle=True)
    assert same(epoch(loader), undisturbed)
    assert loader.stats().early_batches


@pytest.mark.parametrize("persistent", [False, True])
def test_the_trainers_own_stream_and_later_epochs_are_untouched(persistent: bool) -> None:
    def draws(loader: DataLoader[Any]) -> list[Any]:
        torch.manual_seed(5)
        found: list[Any] = []
        for number in range(3):
            for step, batch in enumerate(loader):
                found.append((batch["index"].tolist(), batch["torch"].sum(), torch.rand(1)))
                if number == 1 and step == 20:
                    break
        return found

    more: dict[str, Any] = {"shuffle": True, "persistent_workers": persistent}
    with_costs = loader_of(Augmented(SAMPLES), **more)
    assert same(draws(with_costs), draws(loader_of(Augmented(SAMPLES), (), **more)))
    assert with_costs.stats().early_batches > len(SLOW)


def test_workers_may_die_while_they_load_early(undisturbed: list[Any]) -> None:
    loader = loader_of(Augmented(SAMPLES), shuffle=True, num_workers=4)
    iterator = seeded(loader)
    batches = []
    for number in range(12):
        batches.append(next(iterator))
        kill(worker_pids(iterator)[number % 4])
    assert same(batches + list(iterator), undisturbed)
    assert loader.stats().early_batches


def test_resizing_while_batches_are_under_way_early_changes_nothing(undisturbed: list[Any]) -> None:
    loader = loader_of(Augmented(SAMPLES), shuffle=True)
    iterator = seeded(loader)
    batches = []
    for workers in (1, 6, 2, 4, 1, 3):
        batches += [next(iterator) for _ in range(6)]
        loader.apply(Knobs(workers=workers))
    assert same(batches + list(iterator), undisturbed)
    assert loader.stats().early_batches


@pytest.mark.parametrize("at", range(1, 40, 4))
def test_an_interrupted_iterator_goes_on_with_the_right_batches(
    at: int, undisturbed: list[Any]
) -> None:
    iterator = seeded(loader_of(Augmented(SAMPLES), shuffle=True))
    batches = [next(iterator) for _ in range(at)]
    iterator._engine.suspect = True  # as an exception in the middle of a change leaves it
    assert same(batches + list(iterator), undisturbed)


def test_a_tiny_budget_and_large_batches_change_nothing_but_how_many_start_early() -> None:
    for memory in ("1B", "100kB", "400kB", "4MB"):
        loader = loader_of(Numbers(SAMPLES, width=4000), memory=memory)
        assert numbers(loader) == counted(SAMPLES, 4)
        assert loader.stats().in_flight_peak_bytes <= loader.stats().arena_bytes


def test_pinned_batches_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning takes batches ahead of the caller: there may be none in line for a moment."""
    monkeypatch.setattr("stoker.loader.pin.pin_memory", lambda batch, device: batch)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    for workers in (2, 4):
        loader = loader_of(Numbers(SAMPLES), pin_memory=True, num_workers=workers)
        assert numbers(loader) == counted(SAMPLES, 4)
        assert loader.stats().early_batches


@pytest.mark.parametrize(
    "more",
    [
        {"in_order": False},
        {"worker_init_fn": print},
        {"shuffle": True, "generator": torch.Generator()},
        {"sampler": WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)},
        {"num_workers": 1},
    ],
    ids=["out of order", "worker_init_fn", "a generator others see", "sampler", "one worker"],
)
def test_where_somebody_could_notice_or_nobody_gains_batches_keep_their_turn(
    more: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    loader = loader_of(Numbers(SAMPLES), slow=tuple(range(SAMPLES)), **more)
    assert sum(len(batch) for batch in loader) == SAMPLES
    assert loader.stats().early_batches == 0


class Uneven(Sleepy):
    """Not so quick otherwise that samples would be timed by the batch."""

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.001)
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_slow_samples_are_learned_in_one_epoch_and_begun_early_in_the_next(kind: str) -> None:
    loader = loader_of(Uneven(160, {101, 133}, 0.5), slow=(), worker_kind=kind)
    assert numbers(loader) == counted(160, 4)
    assert loader.stats().early_batches == 0
    assert loader._counters.costs.of([101, 7, 133]) >= 1.0
    assert numbers(loader) == counted(160, 4)
    assert loader.stats().early_batches >= 2


def test_a_copy_of_a_loader_learns_for_itself() -> None:
    assert len(copy.copy(loader_of(Numbers(8)))._counters.costs) == 0
