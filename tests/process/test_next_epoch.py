"""``prefetch_next_epoch``: the next epoch's first batches are early, and never other ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler, Sampler

from stoker import DataLoader
from stoker.errors import ConfigError
from tests.process.datasets import Augmented, Changing, Numbers, Stream
from tests.process.epochs import kill, same, worker_pids
from tests.process.test_resume import through_a_file

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SAMPLES = 30


class Rounds(Sampler[int]):
    """Its order depends on nothing but how often it was asked; keeps a state."""

    draws_own_stream = True

    def __init__(self) -> None:
        self.rounds = 0

    def __iter__(self) -> Iterator[int]:
        self.rounds += 1
        return iter([(i * 7 + self.rounds) % SAMPLES for i in range(SAMPLES)])

    def __len__(self) -> int:
        return SAMPLES


def own_generator() -> dict[str, Any]:
    return {"shuffle": True, "generator": torch.Generator().manual_seed(5)}


ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "sequential": dict,
    "own generator": own_generator,
    "replacement": lambda: {
        "sampler": RandomSampler(range(SAMPLES), True, 70, torch.Generator().manual_seed(5))
    },
    "distributed": lambda: {"sampler": DistributedSampler(range(SAMPLES), 2, 0)},
    "says so": lambda: {"sampler": Rounds()},
}


def build(order: str, **more: Any) -> DataLoader[Any]:
    dataset = more.pop("dataset", None) or Augmented(SAMPLES, width=4)
    facts = {"batch_size": 4, "num_workers": 2, "persistent_workers": True}
    return DataLoader(dataset, **{**facts, **ORDERS[order](), **more})


def epochs(
    loader: DataLoader[Any],
    count: int = 3,
    *,
    stop: tuple[int, int] | None = None,
    between: Callable[[DataLoader[Any], int], None] | None = None,
) -> list[list[Any]]:
    """Batches by epoch; one epoch may be left early, and something done before each."""
    torch.manual_seed(1)
    found: list[list[Any]] = []
    for epoch in range(count):
        if between is not None:
            between(loader, epoch)
        found.append([])
        for batch in loader:
            found[-1].append(batch)
            if (epoch, len(found[-1])) == stop:
                break
    return found


def early(loader: DataLoader[Any]) -> int:
    iterator: Any = loader._iterator
    return len(iterator._ahead.pending) if iterator._ahead is not None else 0


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stop", [None, (1, 1), (1, 7), (1, 8)])
@pytest.mark.parametrize("kind", ["process", "thread"])
def test_every_batch_is_what_it_would_be_without(
    order: str, stop: tuple[int, int] | None, kind: str
) -> None:
    dataset: Any = Numbers(SAMPLES) if kind == "thread" else Augmented(SAMPLES, width=4)
    more = {"dataset": dataset, "worker_kind": kind}
    expected = epochs(build(order, **more), stop=stop)
    loader = build(order, prefetch_next_epoch=True, **more)
    assert same(epochs(loader, stop=stop), expected)


@pytest.mark.parametrize("order", ORDERS)
def test_the_next_epoch_is_under_way_before_it_is_asked_for(order: str) -> None:
    loader = build(order, prefetch_next_epoch=True)
    assert len(epochs(loader, 1)[0]) > 2
    assert early(loader) >= 2
    iterator: Any = loader._iterator
    deadline = time.monotonic() + 20
    while not iterator._engine.has_next():  # loaded although nobody has begun that epoch
        assert time.monotonic() < deadline
        time.sleep(0.005)
    first_indices = list(iterator._ahead.pending)
    iterator._reset(loader)
    assert iterator._ahead is None
    assert set(first_indices) <= set(iterator._pending)


def test_without_it_nothing_is_drawn_early() -> None:
    loader = build("own generator")
    epochs(loader, 1)
    assert early(loader) == 0
    assert loader.prefetch_next_epoch is False


def test_an_epoch_shorter_than_what_is_prefetched_is_delivered_once() -> None:
    more = {"dataset": Numbers(5), "prefetch_factor": 8}
    expected = epochs(build("own generator", **more), 5)
    assert same(epochs(build("own generator", prefetch_next_epoch=True, **more), 5), expected)


def test_a_distributed_sampler_that_is_told_its_epoch_is_foreseen() -> None:
    def tell(loader: DataLoader[Any], epoch: int) -> None:
        sampler: Any = loader.sampler
        sampler.set_epoch(epoch)

    expected = epochs(build("distributed"), 4, between=tell)
    loader = build("distributed", prefetch_next_epoch=True)
    kept = []

    def tell_and_look(loader: DataLoader[Any], epoch: int) -> None:
        tell(loader, epoch)
        ahead = loader._progress.coming if loader._progress is not None else None
        kept.append(ahead is not None and ahead.is_right(loader))

    assert same(epochs(loader, 4, between=tell_and_look), expected)
    assert kept == [False, False, True, True]  # two epochs show how it is told


def test_an_epoch_that_was_not_foreseen_is_drawn_anew() -> None:
    def tell(loader: DataLoader[Any], epoch: int) -> None:
        sampler: Any = loader.sampler
        sampler.set_epoch([0, 1, 7, 2][epoch])

    expected = epochs(build("distributed"), 4, between=tell)
    loader = build("distributed", prefetch_next_epoch=True)
    assert same(epochs(loader, 4, between=tell), expected)


def test_a_generator_that_is_seeded_between_epochs_is_obeyed() -> None:
    def seed(loader: DataLoader[Any], epoch: int) -> None:
        if epoch == 1:
            assert loader.generator is not None
            loader.generator.manual_seed(99)

    expected = epochs(build("own generator"), between=seed)
    loader = build("own generator", prefetch_next_epoch=True)
    assert same(epochs(loader, between=seed), expected)


def test_a_dataset_that_grew_is_drawn_anew() -> None:
    def grow(loader: DataLoader[Any], epoch: int) -> None:
        dataset: Any = loader.dataset
        dataset.samples = 10 + epoch

    found = epochs(
        build("own generator", dataset=Numbers(10), prefetch_next_epoch=True), between=grow
    )
    assert [sum(len(batch) for batch in epoch) for epoch in found] == [10, 11, 12]


def test_workers_may_die_between_two_epochs() -> None:
    expected = epochs(build("own generator"), 3)
    loader = build("own generator", prefetch_next_epoch=True)

    def murder(loader: DataLoader[Any], epoch: int) -> None:
        if epoch:
            for pid in worker_pids(loader._iterator):
                kill(pid)

    assert same(epochs(loader, 3, between=murder), expected)


def test_an_interruption_keeps_what_is_early() -> None:
    expected = epochs(build("own generator"), 3)
    loader = build("own generator", prefetch_next_epoch=True)

    def suspect(loader: DataLoader[Any], epoch: int) -> None:
        iterator: Any = loader._iterator
        if epoch == 2:
            iterator._engine.suspect = True  # as a Ctrl-C leaves it

    torch.manual_seed(1)
    found: list[list[Any]] = [[]]
    for batch in loader:
        found[-1].append(batch)
        iterator: Any = loader._iterator
        if len(found[-1]) == 7:
            assert early(loader)
            iterator._engine.suspect = True
    found += epochs_of(loader, 2, suspect)
    assert same(found, expected)


def epochs_of(
    loader: DataLoader[Any], count: int, between: Callable[[DataLoader[Any], int], None]
) -> list[list[Any]]:
    found = []
    for epoch in range(count):
        between(loader, epoch + 1)
        found.append(list(loader))
    return found


@pytest.mark.parametrize("order", ["sequential", "own generator", "distributed"])
@pytest.mark.parametrize("stop", [6, 7, 8, "end"])
def test_a_state_saved_while_the_next_epoch_is_under_way(order: str, stop: int | str) -> None:
    if order == "distributed" and isinstance(stop, int):
        stop -= 4  # half as many batches
    torch.manual_seed(1)
    loader = build(order, prefetch_next_epoch=True)
    list(loader)
    iterator = iter(loader)
    batches = [next(iterator) for _ in range(stop)] if isinstance(stop, int) else list(iterator)
    assert early(loader)
    state = through_a_file(loader.state_dict())
    rest = [*iterator] if isinstance(stop, int) else []
    whole = [*batches, *rest, *loader, *loader]
    torch.manual_seed(2)
    other = build(order, prefetch_next_epoch=True)
    other.load_state_dict(state)
    batches += list(other) if isinstance(stop, int) else []
    assert same([*batches, *other, *other], whole)


def test_what_the_trainer_changes_between_epochs_comes_too_late_by_definition() -> None:
    """Said in the docs: workers are persistent, and their dataset is theirs anyway."""
    loader = build("sequential", dataset=Changing(SAMPLES), prefetch_next_epoch=True)
    list(loader)
    dataset: Any = loader.dataset
    dataset.offset = 100.0
    assert float(next(iter(loader))[0, 0]) == 0.0


def test_a_sampler_that_needs_the_trainers_stream_is_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = epochs(build("sequential", shuffle=True))
    with caplog.at_level(logging.WARNING, "stoker.loader"):
        loader = build("sequential", shuffle=True, prefetch_next_epoch=True)
        assert same(epochs(loader), expected)
    assert caplog.text.count("prefetch_next_epoch has no effect") == 1
    assert "RandomSampler" in caplog.text
    assert early(loader) == 0


class Grudging(Sampler[int]):
    """Refuses a third epoch."""

    draws_own_stream = True

    def __init__(self) -> None:
        self.asked = 0

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        if self.asked > 2:
            raise ValueError("no more epochs")
        return iter(range(SAMPLES))


def test_a_sampler_that_fails_early_fails_in_its_own_epoch() -> None:
    loader = build("sequential", sampler=Grudging(), prefetch_next_epoch=True)
    assert [len(list(loader)), len(list(loader))] == [8, 8]
    with pytest.raises(ValueError, match="no more epochs"):
        list(loader)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"persistent_workers": False}, "persistent_workers=True"),
        ({"in_order": False}, "in_order=True"),
        ({"dataset": Stream(4)}, "iterable"),
    ],
)
def test_what_can_not_work_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build("sequential", **{"prefetch_next_epoch": True, **wrong})
