"""Randomness: the trainer's own stream is torch's bit for bit; augmentations go with the position.

Two promises. Whatever a script draws between batches, and every index, is what it would be with
torch's loader. And what a map-style dataset draws inside process workers depends on the seed, the
epoch and the batch, not on how many workers there are or which of them died.
"""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import stoker

Torch = torch.utils.data.DataLoader
LENGTH = 29


class Indices(Dataset[Any]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return int(index)


# --- the trainer's own stream -------------------------------------------------------------------


class Lazy:
    """Draws from the global generator for each index, when it is asked for it."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(LENGTH):
            yield int(torch.randint(LENGTH, ()))

    def __len__(self) -> int:
        return LENGTH


class Eager:
    """Draws from the global generator as soon as an iterator is asked for."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(LENGTH).tolist())

    def __len__(self) -> int:
        return LENGTH


class Pythons:
    """Draws from Python's and numpy's generators."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(LENGTH):
            yield (random.randrange(LENGTH) + int(np.random.randint(LENGTH))) % LENGTH


class Buckets:
    """A batch sampler that draws the size of each batch."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(9):
            count = 1 + int(torch.randint(3, ()))
            yield torch.randint(LENGTH, (count,)).tolist()


Order = Callable[[torch.Generator], dict[str, Any]]
WEIGHTS = [1.0 + i % 4 for i in range(LENGTH)]
ORDERS: dict[str, Order] = {
    "sequential": lambda g: {},
    "sequential, generator": lambda g: {"generator": g},
    "shuffle": lambda g: {"shuffle": True},
    "shuffle, generator": lambda g: {"shuffle": True, "generator": g},
    "replacement": lambda g: {"sampler": RandomSampler(range(LENGTH), True, 40)},
    "replacement, generator": lambda g: {"sampler": RandomSampler(range(LENGTH), True, 90, g)},
    "several rounds": lambda g: {"sampler": RandomSampler(range(7), False, 21, generator=g)},
    "subset": lambda g: {"sampler": SubsetRandomSampler(range(3, 20))},
    "subset, generator": lambda g: {"sampler": SubsetRandomSampler(range(3, 20), g)},
    "weighted": lambda g: {"sampler": WeightedRandomSampler(WEIGHTS, 25)},
    "weighted, generator": lambda g: {
        "sampler": WeightedRandomSampler(WEIGHTS, 25, generator=g),
        "generator": g,
    },
    "lazy": lambda g: {"sampler": Lazy()},
    "eager": lambda g: {"sampler": Eager()},
    "python and numpy": lambda g: {"sampler": Pythons()},
    "batch sampler": lambda g: {"batch_sampler": Buckets()},
    "batches of lazy": lambda g: {"batch_sampler": BatchSampler(Lazy(), 4, True)},
    "batches in order": lambda g: {
        "batch_sampler": BatchSampler(SequentialSampler(range(LENGTH)), 4, False)
    },
}


@dataclass(frozen=True)
class Script:
    """A training script: how it loads, how many epochs, and where it breaks off."""

    options: dict[str, Any]
    epochs: int = 2
    stop_after: int | None = None
    ours: dict[str, Any] = field(default_factory=dict)

    def run(self, cls: type[Torch], order: Order) -> list[Any]:
        """Everything random that the script can see."""
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        generator = torch.Generator().manual_seed(3)
        arguments = order(generator)
        if "batch_sampler" not in arguments:
            arguments["batch_size"] = 3
        extra = self.ours if issubclass(cls, stoker.DataLoader) else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loader = cls(Indices(), **arguments, **self.options, **extra)
            return list(self._train(loader, generator))

    def _train(self, loader: Any, generator: torch.Generator) -> Iterator[Any]:
        for _ in range(self.epochs):
            for step, batch in enumerate(loader):
                yield batch.tolist()
                yield torch.rand(2).tolist(), random.random(), np.random.rand()
                yield torch.get_rng_state().tolist(), generator.get_state().tolist()
                if step == self.stop_after:
                    break
            yield torch.get_rng_state().tolist(), generator.get_state().tolist()
            yield random.getstate(), np.random.get_state()[1].tolist()


SCRIPTS = {
    "main process, break": Script({"num_workers": 0}, 3, 4),
    "2 workers": Script({"num_workers": 2}, 1),
    "1 worker, far ahead, break": Script({"num_workers": 1, "prefetch_factor": 5}, 2, 1),
    "persistent, break": Script({"num_workers": 2, "persistent_workers": True}, 3, 3),
    "bounded by memory": Script({"num_workers": 1}, 1, 2, {"memory": "20MB"}),
}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("order", ORDERS)
def test_indices_and_the_trainers_streams_are_those_of_torch(order: str, script: str) -> None:
    expected = SCRIPTS[script].run(Torch, ORDERS[order])
    assert SCRIPTS[script].run(stoker.DataLoader, ORDERS[order]) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_statistics_and_length_draw_nothing(workers: int) -> None:
    loader = stoker.DataLoader(Indices(), 3, shuffle=True, num_workers=workers)
    iterator = iter(loader)
    next(iterator)
    state = torch.get_rng_state()
    loader.stats()
    len(loader)
    len(iterator)
    repr(loader)
    assert torch.equal(torch.get_rng_state(), state)


# --- augmentations ------------------------------------------------------------------------------


def draws() -> list[float]:
    """Something from each generator that a dataset may use."""
    return [float(torch.rand(())), random.random(), float(np.random.rand())]


class Augmented(Dataset[Any]):
    def __init__(self, length: int = 24, seconds: float = 0.0) -> None:
        self.length = length
        self.seconds = seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return index, draws()


class AugmentedStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        for index in range(info.id, 20, info.num_workers):
            yield index, draws(), info.seed, torch.initial_seed()


def as_list(samples: Any) -> Any:
    return samples


def epochs(
    cls: type[Torch], dataset: Any, count: int = 1, seed: int = 5, **options: Any
) -> list[list[Any]]:
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more workers than cores
        loader = cls(dataset, 3, collate_fn=as_list, **options)
        return [list(loader) for _ in range(count)]


@pytest.mark.parametrize("persistent", [False, True])
def test_augmentations_are_the_same_for_any_number_of_workers(persistent: bool) -> None:
    one, two, five = (
        epochs(stoker.DataLoader, Augmented(), 2, num_workers=n, persistent_workers=persistent)
        for n in (1, 2, 5)
    )
    assert one == two == five


def test_augmentations_do_not_depend_on_prefetching_or_order_of_arrival() -> None:
    usual = epochs(stoker.DataLoader, Augmented(), num_workers=2)[0]
    far = epochs(stoker.DataLoader, Augmented(), num_workers=2, prefetch_factor=6)[0]
    mixed = epochs(stoker.DataLoader, Augmented(), num_workers=3, in_order=False)[0]
    assert usual == far == sorted(mixed)


def test_augmentations_differ_between_epochs_batches_and_samples() -> None:
    for persistent in (False, True):
        both = epochs(
            stoker.DataLoader, Augmented(), 2, num_workers=2, persistent_workers=persistent
        )
        drawn = [
            value for epoch in both for batch in epoch for _, three in batch for value in three
        ]
        assert len(set(drawn)) == len(drawn)


def test_augmentations_come_back_with_the_seed_and_change_with_it() -> None:
    first, again, other = (
        epochs(stoker.DataLoader, Augmented(), seed=seed, num_workers=2) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_augmentations_with_a_generator_depend_on_it_alone() -> None:
    runs = [
        epochs(
            stoker.DataLoader,
            Augmented(),
            seed=seed,
            num_workers=2,
            generator=torch.Generator().manual_seed(9),
        )
        for seed in (1, 2)
    ]
    assert runs[0] == runs[1]


def test_augmentations_survive_the_death_of_a_worker() -> None:
    dataset = Augmented(60, seconds=0.003)
    expected = epochs(stoker.DataLoader, dataset, num_workers=1)[0]
    torch.manual_seed(5)
    loader = stoker.DataLoader(dataset, 3, num_workers=2, collate_fn=as_list)
    iterator = iter(loader)
    delivered = [next(iterator) for _ in range(3)]
    os.kill(iterator._workers[0].pid, signal.SIGKILL)
    delivered += iterator
    assert delivered == expected
    assert loader.stats().deaths == 1


def test_without_workers_the_dataset_draws_from_the_trainers_stream_as_in_torch() -> None:
    random.seed(3)
    np.random.seed(3)
    expected = epochs(Torch, Augmented(), 2, num_workers=0)
    random.seed(3)
    np.random.seed(3)
    assert epochs(stoker.DataLoader, Augmented(), 2, num_workers=0) == expected


# --- where the user or the stream is in charge --------------------------------------------------


def seed_worker(worker: int) -> None:
    """The recipe of torch's documentation."""
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def fixed_seed(worker: int) -> None:
    torch.manual_seed(worker)
    np.random.seed(worker)
    random.seed(worker)


def no_seed(worker: int) -> None:
    pass


@pytest.mark.parametrize("init", [seed_worker, fixed_seed, no_seed])
@pytest.mark.parametrize("workers", [1, 3])
def test_with_a_worker_init_fn_augmentations_are_those_of_torch(
    init: Callable[[int], None], workers: int
) -> None:
    for persistent in (False, True):
        expected, ours = (
            epochs(
                cls,
                Augmented(30),
                2,
                num_workers=workers,
                worker_init_fn=init,
                persistent_workers=persistent,
                generator=torch.Generator().manual_seed(0),
            )
            for cls in (Torch, stoker.DataLoader)
        )
        assert ours == expected


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_an_iterable_dataset_draws_what_it_draws_with_torch(workers: int, persistent: bool) -> None:
    expected, ours = (
        epochs(cls, AugmentedStream(), 2, num_workers=workers, persistent_workers=persistent)
        for cls in (Torch, stoker.DataLoader)
    )
    assert ours == expected


class Introduced(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return info.seed - info.id, info.num_workers, len(info.dataset)


def test_worker_info_has_torchs_seeds() -> None:
    expected, ours = (
        epochs(cls, Introduced(), 2, num_workers=2) for cls in (Torch, stoker.DataLoader)
    )
    assert ours == expected
