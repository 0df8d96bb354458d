"""A state that is loaded gives the rest of the epoch, to the bit, as if nothing had happened.

Everything is compared with an uninterrupted run. States travel through ``torch.save`` and
``torch.load(weights_only=True)``, as checkpoints do, unless a test says otherwise.
"""

from __future__ import annotations

import io
import json
import logging
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from stoker import DataLoader
from stoker.errors import StateError
from stoker.loader.engine import Engine
from tests.process.datasets import Augmented, Failing, Numbers, Sleepy, Stream, raise_value_error
from tests.process.epochs import flat, kill, numbers, same, wait_until_idle, worker_pids

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SAMPLES = 29
KINDS: dict[str, dict[str, Any]] = {
    "main": {"num_workers": 0},
    "one": {"num_workers": 1},
    "process": {"num_workers": 2},
    "three": {"num_workers": 3, "prefetch_factor": 3},
    "thread": {"num_workers": 2, "worker_kind": "thread"},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


class Eager:
    """Draws when it is asked for an iterator (torch asks twice where there are workers)."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SAMPLES).tolist())

    def __len__(self) -> int:
        return SAMPLES


class Pythons:
    """Draws from Python's and numpy's generators, when it begins."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        random.shuffle(order)
        yield from (order[i] for i in np.random.permutation(SAMPLES))


class Counting(Sampler[int]):
    """Keeps a state of its own and a different order in every epoch."""

    def __init__(self) -> None:
        self.at = 0
        self.rounds = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < SAMPLES:
            self.at += 1
            yield (7 * self.at + 5 * self.rounds) % SAMPLES
        self.at = 0
        self.rounds += 1

    def __len__(self) -> int:
        return SAMPLES

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "rounds": self.rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.rounds = state["at"], state["rounds"]


class LazilyReset(DistributedSampler[Any]):
    """As torchdata's: what it has given is forgotten only when the next epoch is begun."""

    given = 0
    skip: int | None = None

    def __iter__(self) -> Iterator[int]:
        self.given, self.skip = self.skip or 0, None
        for index in list(super().__iter__())[self.given :]:
            self.given += 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skip = state["given"]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "sequential": dict,
    "shuffle": lambda: {"shuffle": True},
    "shuffle, generator": lambda: {"shuffle": True, "generator": generator()},
    "replacement": lambda: {"sampler": RandomSampler(range(SAMPLES), True, 70)},
    "replacement, generator": lambda: {
        "sampler": RandomSampler(range(SAMPLES), True, 70, generator())
    },
    "subset": lambda: {"sampler": SubsetRandomSampler(range(3, 25))},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0, 2.0, 3.0] * 9, 25)},
    "distributed": lambda: {"sampler": DistributedSampler(range(SAMPLES), 2, 1)},
    "eager": lambda: {"sampler": Eager()},
    "python and numpy": lambda: {"sampler": Pythons()},
    "with a state": lambda: {"sampler": Counting()},
    "lazily reset": lambda: {"sampler": LazilyReset(range(SAMPLES), 1, 0)},
    "batch sampler": lambda: {
        "batch_size": 1,
        "batch_sampler": BatchSampler(RandomSampler(range(SAMPLES)), 4, False),
    },
    "samples": lambda: {"batch_size": None, "shuffle": True},
}


def build(order: str, kind: str, **more: Any) -> DataLoader[Any]:
    dataset = more.pop("dataset", None) or Augmented(SAMPLES, width=4)
    return DataLoader(dataset, **{"batch_size": 3, **ORDERS[order](), **KINDS[kind], **more})


def indices(batches: list[Any]) -> list[Any]:
    """For kinds that augment from other streams: what does not depend on them."""
    found = [batch["index"] for batch in batches]
    return [i.tolist() if isinstance(i, torch.Tensor) else i for i in found]


def interrupted(loader: DataLoader[Any], after: int) -> tuple[list[Any], dict[str, Any]]:
    iterator = iter(loader)
    batches = [next(iterator) for _ in range(after)]
    return batches, through_a_file(loader.state_dict())


def resumed(loader: DataLoader[Any], state: dict[str, Any]) -> list[Any]:
    seed_all(4711)  # another process: nothing of the first one is left
    loader.load_state_dict(state)
    return list(loader)


# --- anywhere in an epoch, with any workers -----------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kinds", [("process", "three"), ("main", "process"), ("three", "main")])
def test_every_sampler_goes_on_where_it_was(order: str, kinds: tuple[str, str]) -> None:
    before, after = kinds
    for stop in (0, 4):
        seed_all(1)
        whole = list(build(order, before))
        seed_all(1)
        batches, state = interrupted(build(order, before), stop)
        batches += resumed(build(order, after), state)
        if "main" in kinds:
            assert indices(batches) == indices(whole)
        else:
            assert same(batches, whole)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    order=st.sampled_from(sorted(ORDERS)),
    kinds=st.tuples(*[st.sampled_from(sorted(KINDS))] * 3),
    stops=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    seed=st.integers(0, 1000),
    drop_last=st.booleans(),
)
def test_two_interruptions_of_an_epoch_leave_no_trace(
    order: str, kinds: tuple[str, str, str], stops: tuple[int, int], seed: int, drop_last: bool
) -> None:
    more = {"drop_last": drop_last} if "batch" not in order and order != "samples" else {}
    seed_all(seed)
    whole = indices(list(build(order, kinds[0], **more)))
    first = min(stops[0], len(whole))
    second = min(stops[1], len(whole) - first)
    seed_all(seed)
    batches, state = interrupted(build(order, kinds[0], **more), first)
    seed_all(seed + 1)
    loader = build(order, kinds[1], **more)
    loader.load_state_dict(state)
    middle, state = interrupted(loader, second)
    batches += middle + resumed(build(order, kinds[2], **more), state)
    assert indices(batches) == whole


@pytest.mark.parametrize("kind", ["process", "main", "persistent", "thread"])
@pytest.mark.parametrize("order", ["shuffle", "shuffle, generator", "with a state", "lazily reset"])
def test_at_the_end_of_an_epoch_the_next_one_is_resumed(kind: str, order: str) -> None:
    # Threads that augment would draw from the trainer's streams while it does.
    more = {"dataset": Numbers(SAMPLES)} if kind == "thread" else {}
    seed_all(1)
    loader = build(order, kind, **more)
    list(loader)
    state = through_a_file(loader.state_dict())
    following = [list(loader), list(loader)]
    seed_all(1)
    again = build(order, kind, **more)
    list(again)  # its trainer comes to where the state was saved, as if it had restored its streams
    other = build(order, kind, **more)
    other.load_state_dict(state)
    assert same([list(other), list(other)], following)


@pytest.mark.parametrize("kind", ["process", "main"])
def test_a_new_epoch_is_the_same_also_where_the_trainer_stands_elsewhere(kind: str) -> None:
    seed_all(1)
    loader = build("shuffle", kind)
    list(loader)
    state = through_a_file(loader.state_dict())
    following = list(loader)
    assert indices(resumed(build("shuffle", kind), state)) == indices(following)


def test_before_the_first_iteration_a_state_says_how_it_will_begin() -> None:
    seed_all(1)
    loader = build("shuffle", "process")
    state = through_a_file(loader.state_dict())
    whole = list(loader)
    assert same(resumed(build("shuffle", "three"), state), whole)


def test_after_the_last_batch_but_before_the_end_nothing_is_left() -> None:
    for kind in ("process", "main"):
        batches, state = interrupted(build("shuffle", kind), 10)
        assert len(batches) == 10
        assert resumed(build("shuffle", kind), state) == []


def test_epochs_after_a_resumed_one_are_the_same_with_persistent_workers() -> None:
    for stop in (0, 3):
        seed_all(1)
        loader = build("shuffle, generator", "persistent")
        list(loader)
        batches, state = interrupted(loader, stop)
        whole = [*batches, *loader._iterator, *loader, *loader]
        other = build("shuffle, generator", "persistent")
        batches += resumed(other, state)
        assert same([*batches, *other, *other], whole)


def test_the_state_of_a_loader_that_was_loaded_is_what_was_loaded() -> None:
    _, state = interrupted(build("shuffle", "process"), 3)
    loader = build("shuffle", "process")
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    loader.load_state_dict({})
    assert loader.state_dict() != state


# --- the trainer's own stream -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["process", "main"])
@pytest.mark.parametrize("order", ["shuffle", "eager", "python and numpy"])
def test_resuming_in_mid_epoch_draws_nothing_from_the_trainers_streams(
    kind: str, order: str
) -> None:
    _, state = interrupted(build(order, kind, dataset=Numbers(SAMPLES)), 2)
    seed_all(8)
    expected = torch.rand(1), random.random(), np.random.rand()
    seed_all(8)
    loader = build(order, kind, dataset=Numbers(SAMPLES))
    loader.load_state_dict(state)
    list(loader)
    assert (torch.rand(1), random.random(), np.random.rand()) == expected


def test_a_new_epoch_of_a_restored_trainer_draws_as_it_would_have() -> None:
    seed_all(1)
    loader = build("shuffle", "process")
    list(loader)
    stream, state = torch.get_rng_state(), through_a_file(loader.state_dict())
    list(loader)
    expected = torch.rand(3)
    seed_all(5)
    other = build("shuffle", "process")
    other.load_state_dict(state)
    torch.set_rng_state(stream)
    list(other)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("kind", ["process", "main", "thread"])
def test_asking_for_the_state_changes_nothing(kind: str) -> None:
    seed_all(1)
    whole = list(build("shuffle", kind))
    drawn = torch.rand(1)
    seed_all(1)
    loader = build("shuffle", kind)
    loader.state_dict()
    batches = []
    for batch in loader:
        loader.state_dict()
        batches.append(batch)
    loader.state_dict()
    assert indices(batches) == indices(whole)
    assert torch.equal(torch.rand(1), drawn)


def test_the_generators_are_copied_once_an_epoch() -> None:
    loader = build("shuffle, generator", "process")
    iterator = iter(loader)
    next(iterator)
    first = loader.state_dict()
    next(iterator)
    assert loader.state_dict()["generators"] is first["generators"]
    assert (first["delivered"], loader.state_dict()["delivered"]) == (1, 2)


# --- what counts as delivered -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["process", "main"])
def test_left_out_batches_count_and_come_not_again(kind: str) -> None:
    dataset = Failing(SAMPLES, {3, 4, 5, 10}, raise_value_error)
    more = {"dataset": dataset, "on_error": "skip"}
    whole = numbers(build("sequential", kind, **more))
    iterator = iter(loader := build("sequential", kind, **more))
    batches = numbers(next(iterator) for _ in range(2))
    assert batches == [[0, 1, 2], [6, 7, 8]]
    state = through_a_file(loader.state_dict())
    assert state["delivered"] == 3
    assert batches + numbers(resumed(build("sequential", "three", **more), state)) == whole


@pytest.mark.parametrize("kind", ["process", "main"])
def test_a_batch_that_was_an_error_is_not_tried_again(kind: str) -> None:
    dataset = Failing(SAMPLES, {4}, raise_value_error)
    loader = build("sequential", kind, dataset=dataset)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(ValueError, match="bad"):
        next(iterator)
    state = through_a_file(loader.state_dict())
    assert numbers(resumed(build("sequential", kind, dataset=dataset), state))[0] == [6, 7, 8]


@pytest.mark.parametrize("after", ["process", "main"])
def test_out_of_order_no_position_is_lost_or_repeated(after: str) -> None:
    dataset = Sleepy(SAMPLES, {0}, 0.3)
    loader = build("shuffle", "three", dataset=dataset, in_order=False)
    seed_all(1)
    iterator = iter(loader)
    batches = [next(iterator) for _ in range(4)]
    state = through_a_file(loader.state_dict())
    assert state["delivered"] + len(state["beyond"]) == 4
    other = build("shuffle", after, dataset=dataset, in_order=False)
    batches += resumed(other, state)
    assert sorted(flat(numbers(batches))) == list(range(SAMPLES))


def test_positions_out_of_order_are_skipped_exactly() -> None:
    loader = build("sequential", "process")
    _, state = interrupted(loader, 2)
    state["beyond"] = [3, 5]
    for kind in ("process", "main"):
        rest = indices(resumed(build("sequential", kind), state))
        assert [batch[0] for batch in rest] == [6, 12, 18, 21, 24, 27]


def test_batches_that_wait_to_be_pinned_are_not_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor.clone())
    more = {"dataset": Numbers(SAMPLES), "pin_memory": True}
    loader = build("sequential", "process", **more)
    iterator: Any = iter(loader)
    batches = numbers([next(iterator)])
    wait_until_idle(iterator)
    batches += numbers([next(iterator)])
    assert iterator._pinner.pending
    state = through_a_file(loader.state_dict())
    batches += numbers(resumed(build("sequential", "process", **more), state))
    assert flat(batches) == list(range(SAMPLES))
    iterator._shutdown_workers()


@pytest.mark.parametrize("kind", ["process", "main", "persistent"])
def test_an_iteration_left_by_break_is_resumed_where_it_was_left(kind: str) -> None:
    loader = build("shuffle", kind)
    seed_all(1)
    batches = []
    for batch in loader:
        batches.append(batch)
        if len(batches) == 4:
            break
    state = through_a_file(loader.state_dict())
    seed_all(1)
    whole = list(build("shuffle", kind))
    assert indices(batches + resumed(build("shuffle", kind), state)) == indices(whole)


def test_the_newest_of_two_iterators_counts() -> None:
    for kind in ("process", "main"):
        loader = build("sequential", kind)
        first = iter(loader)
        next(first)
        second = iter(loader)
        batches = [next(second) for _ in range(3)]
        next(first)
        assert loader.state_dict()["delivered"] == len(batches)


def test_an_interrupted_next_has_not_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = build("sequential", "process")
    iterator: Any = iter(loader)
    next(iterator)
    drawn = iterator._draw

    def interrupt() -> bool:
        raise KeyboardInterrupt

    iterator._draw = interrupt
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    iterator._draw = drawn
    state = through_a_file(loader.state_dict())
    assert state["delivered"] == 1
    rest = list(iterator)
    assert same(resumed(build("sequential", "three"), {**state}), rest)


def test_another_thread_may_take_batches() -> None:
    loader = build("sequential", "process")
    iterator = iter(loader)
    thread = threading.Thread(target=next, args=(iterator,))
    thread.start()
    thread.join()
    next(iterator)
    assert loader.state_dict()["delivered"] == 2


# --- deaths -------------------------------------------------------------------------------------


def test_workers_may_be_killed_before_and_after_a_resume() -> None:
    seed_all(1)
    whole = list(build("shuffle", "process"))
    seed_all(1)
    loader = build("shuffle", "process")
    iterator = iter(loader)
    batches = [next(iterator) for _ in range(2)]
    kill(worker_pids(iterator)[0])
    batches += [next(iterator) for _ in range(2)]
    state = through_a_file(loader.state_dict())
    del iterator
    other = build("shuffle", "three")
    other.load_state_dict(state)
    iterator = iter(other)
    for pid in worker_pids(iterator)[:2]:
        kill(pid)
    batches.append(next(iterator))
    kill(worker_pids(iterator)[2])
    batches += list(iterator)
    assert same(batches, whole)


# --- samplers that are told their epoch ---------------------------------------------------------


def test_a_distributed_sampler_goes_on_in_its_epoch(caplog: pytest.LogCaptureFixture) -> None:
    loader = build("distributed", "process")
    sampler: Any = loader.sampler
    sampler.set_epoch(5)
    whole = indices(list(loader))
    batches, state = interrupted(loader, 2)
    other = build("distributed", "process")
    with caplog.at_level(logging.WARNING, "stoker.loader"):
        assert indices(batches + resumed(other, state)) == whole
    assert "middle of epoch 5" in caplog.text


def test_a_distributed_sampler_is_resumed_across_the_end_of_an_epoch() -> None:
    loader = build("distributed", "process")
    list(loader)
    state = through_a_file(loader.state_dict())
    for _ in range(2):
        other = build("distributed", "process")
        other.load_state_dict(state)
        sampler: Any = other.sampler
        sampler.set_epoch(1)
        batches, middle = interrupted(other, 2)
    sampler = (last := build("distributed", "process")).sampler
    batches += resumed(last, middle)
    assert sampler.epoch == 1
    sampler.set_epoch(1)
    assert indices(batches) == indices(list(last))


def test_a_state_survives_an_iteration_that_could_not_begin() -> None:
    seed_all(1)
    batches, state = interrupted(build("shuffle", "process"), 3)
    loader = build("shuffle", "process")
    loader.load_state_dict(state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "start", _fail)
        with pytest.raises(OSError, match="no more"):
            iter(loader)
    assert loader.state_dict() == state
    batches += list(loader)
    seed_all(1)
    assert same(batches, list(build("shuffle", "process")))


def _fail(engine: Engine) -> None:
    raise OSError("no more of these")


# --- datasets with a state ----------------------------------------------------------------------


class Keeping(Dataset[int]):
    """A map-style dataset whose state changes what it delivers."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index + self.offset

    def state_dict(self) -> dict[str, int]:
        return {"offset": self.offset}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.offset = state["offset"]


@pytest.mark.parametrize("kind", ["process", "main", "thread"])
def test_a_map_dataset_with_a_state_gets_it_back(kind: str) -> None:
    _, state = interrupted(build("sequential", kind, dataset=Keeping(100)), 2)
    rest = resumed(build("sequential", kind, dataset=Keeping()), state)
    assert rest[0].tolist() == [106, 107, 108]


class Restartable(IterableDataset[Any]):
    """Shares of unequal size, restored without being read again; every epoch has its number."""

    def __init__(self, sizes: tuple[int, ...] = (2, 20, 7)) -> None:
        self.sizes = sizes
        self.at = 0
        self.skip = 0
        self.epoch = 0
        self.read = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        start, size = 0, sum(self.sizes)
        if info is not None and info.num_workers == len(self.sizes):
            start, size = sum(self.sizes[: info.id]), self.sizes[info.id]
        self.at, self.skip = self.skip, 0
        while self.at < size:
            self.at += 1
            self.read += 1
            yield torch.tensor([start + self.at - 1, self.epoch, self.read])
        self.at = 0
        self.epoch += 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip, self.epoch = state["at"], state["epoch"]


def stream_of(kind: str, dataset: Any, **more: Any) -> DataLoader[Any]:
    return DataLoader(dataset, **{"batch_size": 2, **KINDS[kind], **more})


def told(batches: list[Any]) -> list[Any]:
    return [batch[:, :2].tolist() for batch in batches]


@pytest.mark.parametrize("kind", ["main", "one", "three", "thread"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_an_iterable_dataset_with_a_state_is_not_read_again(kind: str, drop_last: bool) -> None:
    whole = told(list(stream_of(kind, Restartable(), drop_last=drop_last)))
    for stop in range(len(whole) + 1):
        batches, state = interrupted(stream_of(kind, Restartable(), drop_last=drop_last), stop)
        rest = resumed(stream_of(kind, Restartable(), drop_last=drop_last), state)
        assert told(batches + rest) == whole, stop
        if rest and stop > 3:
            assert int(rest[0][0, 2]) <= 2  # the first samples its new worker has read


@pytest.mark.parametrize("kind", ["main", "persistent", "thread"])
def test_an_iterable_dataset_goes_on_with_the_next_epoch(kind: str) -> None:
    loader = stream_of(kind, Restartable((5, 9)))
    list(loader)
    state = through_a_file(loader.state_dict())
    following = told([*loader, *loader])
    assert {batch[0][1] for batch in following} == {1, 2}
    other = stream_of(kind, Restartable((5, 9)))
    assert told(resumed(other, state) + list(other)) == following


def test_a_second_epoch_of_persistent_workers_is_resumed_in_its_middle() -> None:
    for stop in range(8):
        loader = stream_of("persistent", Restartable((3, 9)))
        list(loader)
        batches, state = interrupted(loader, min(stop, 7))
        whole = told([*batches, *loader._iterator, *loader])
        other = stream_of("persistent", Restartable((3, 9)))
        assert told([*batches, *resumed(other, state), *other]) == whole, stop


class Iterating:
    """An iterator with a state; the dataset itself has none."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.at = 0

    def __iter__(self) -> Iterating:
        return self

    def __next__(self) -> torch.Tensor:
        if self.at >= self.samples:
            raise StopIteration
        self.at += 1
        return torch.tensor([self.at, int(torch.randint(1000, ()))])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "stream": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        torch.set_rng_state(state["stream"])


class Stateless(IterableDataset[Any]):
    def __iter__(self) -> Iterating:
        return Iterating(11)


@pytest.mark.parametrize("kind", ["main", "process", "three", "persistent"])
def test_an_iterator_may_keep_the_state_and_the_random_stream(kind: str) -> None:
    for stop in (0, 1, 3, 5):
        seed_all(1)
        loader = stream_of(kind, Stateless())
        iterator = iter(loader)
        batches = [next(iterator) for _ in range(stop)]
        state = through_a_file(loader.state_dict())
        rest = list(iterator)
        assert len(batches) == stop
        assert same(resumed(stream_of(kind, Stateless()), state), rest)


@pytest.mark.parametrize("kind", ["main", "one", "three", "thread"])
def test_an_iterable_dataset_without_a_state_is_replayed(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = numbers(stream_of(kind, Stream(23)))
    for stop in (1, 5, 8):
        batches, state = interrupted(stream_of(kind, Stream(23)), stop)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "stoker.loader"):
            rest = resumed(stream_of(kind, Stream(23)), state)
        assert numbers(batches + rest) == whole
        assert f"{stop} batches are loaded again" in caplog.text


def test_an_iterable_dataset_that_became_shorter_is_an_error_and_no_hang() -> None:
    for kind in ("one", "main"):
        _, state = interrupted(stream_of(kind, Stream(23)), 8)
        with pytest.raises(RuntimeError, match="ended after 3 batches"):
            resumed(stream_of(kind, Stream(6)), state)


class Reluctant(Stream):
    """Has methods of these names that have nothing to do with us."""

    def state_dict(self, needed: int) -> dict[str, int]:
        return {"needed": needed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError("there is nothing to load")


@pytest.mark.parametrize("kind", ["main", "process", "thread"])
def test_a_dataset_that_can_not_give_its_state_still_loads(kind: str) -> None:
    loader = stream_of(kind, Reluctant(8))
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(StateError, match="failed: TypeError"):
        loader.state_dict()
    assert len(list(iterator)) == len(numbers(stream_of(kind, Stream(8)))) - 1


# --- states that do not fit ---------------------------------------------------------------------

MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "dataset": ({"dataset": Numbers(SAMPLES + 1)}, "length of the dataset was 29 and is 30"),
    "batch size": ({"batch_size": 5}, "batch_size was 3 and is 5"),
    "sampler": ({"shuffle": False}, "BatchSampler of RandomSampler' and is"),
    "drop_last": ({"drop_last": True}, "drop_last was False and is True"),
    "style": ({"dataset": Stream(SAMPLES), "shuffle": None}, "was 'map' and is 'iterable'"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_state_of_another_loader_is_refused_at_once(misfit: str) -> None:
    changed, words = MISFITS[misfit]
    _, state = interrupted(build("shuffle", "process"), 2)
    other = build("shuffle", "process", **changed)
    with pytest.raises(StateError, match=words) as refused:
        other.load_state_dict(state)
    assert "strict=False" in str(refused.value)
    assert refused.value.differences
    assert other.state_dict()["fresh"]  # nothing was loaded


def test_another_number_of_ranks_is_refused_unless_the_sampler_keeps_a_state() -> None:
    _, state = interrupted(build("distributed", "main"), 2)
    ranks: Any = DistributedSampler(range(SAMPLES), 3, 1)
    with pytest.raises(StateError, match="over 2' and is"):
        build("sequential", "main", sampler=ranks).load_state_dict(state)
    _, state = interrupted(build("lazily reset", "main"), 2)
    ranks = LazilyReset(range(SAMPLES), 2, 0)
    assert len(resumed(build("sequential", "main", sampler=ranks), state)) == 3  # 15 - 6 samples


def test_another_number_of_workers_is_refused_only_for_an_iterable_dataset() -> None:
    _, state = interrupted(stream_of("process", Restartable((3, 9))), 2)
    with pytest.raises(StateError, match="workers that share"):
        stream_of("three", Restartable((3, 9))).load_state_dict(state)
    for kind in ("one", "main", "thread"):  # one reader each
        _, state = interrupted(stream_of("one", Restartable((12,))), 2)
        assert told(resumed(stream_of(kind, Restartable((12,))), state))[0] == [[4, 0], [5, 0]]


def test_a_state_that_does_not_fit_can_be_insisted_on(caplog: pytest.LogCaptureFixture) -> None:
    loader = build("sequential", "process", dataset=Numbers(SAMPLES))
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = through_a_file(loader.state_dict())
    other = build("sequential", "process", dataset=Numbers(40), batch_size=4)
    with caplog.at_level(logging.WARNING, "stoker.loader"):
        other.load_state_dict(state, strict=False)
    assert flat(numbers(other)) == list(range(12, 40))  # 15 samples were delivered, 3 come again
    assert "3 samples are delivered again" in caplog.text
    streams = stream_of("three", Restartable())
    _, state = interrupted(stream_of("process", Restartable((3, 9))), 2)
    streams.load_state_dict(state, strict=False)
    assert len(told(list(streams))) == len(told(list(stream_of("three", Restartable()))))


def test_a_state_of_a_later_version_or_of_somebody_else_is_refused() -> None:
    loader = build("shuffle", "process")
    state = loader.state_dict()
    with pytest.raises(StateError, match="version 99"):
        loader.load_state_dict({**state, "version": 99})
    with pytest.raises(StateError, match="torchdata"):
        loader.load_state_dict({"_snapshot": {}, "_steps_since_snapshot": 0})
    with pytest.raises(StateError, match="not a state"):
        loader.load_state_dict({"model": 1})


def test_a_state_is_plain_enough_for_json() -> None:
    seed_all(1)
    whole = list(build("python and numpy", "process"))
    seed_all(1)
    loader = build("python and numpy", "process")
    iterator = iter(loader)
    batches = [next(iterator) for _ in range(3)]
    state = json.loads(json.dumps(loader.state_dict()))
    assert same(batches + resumed(build("python and numpy", "process"), state), whole)


def test_a_copy_of_a_loader_has_no_progress_of_its_own() -> None:
    import copy

    loader = build("sequential", "process")
    next(iter(loader))
    assert copy.copy(loader).state_dict()["fresh"]
    assert not loader.state_dict()["fresh"]
