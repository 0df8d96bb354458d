from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

import stoker
from stoker.errors import ConfigError
from stoker.integrations import like
from stoker.integrations.accelerate import adopt
from stoker.integrations.like import OWN, own_keywords

Torch = torch.utils.data.DataLoader


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: Any) -> Any:
        return torch.tensor(index)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def lists(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


def collate(samples: list[Any]) -> Any:
    return torch.stack(samples) * 2


GIVEN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "batches": {"batch_size": 4},
    "whole batches": {"batch_size": 4, "drop_last": True},
    "shuffled": {"batch_size": 3, "shuffle": True},
    "a generator": {"shuffle": True, "generator": torch.Generator()},
    "a sampler": {"sampler": WeightedRandomSampler([1.0] * 10, 7)},
    "a batch sampler": {"batch_sampler": BatchSampler(RandomSampler(Numbers()), 4, True)},
    "a list of batches": {"batch_sampler": [[1, 2], [3]]},
    "no batches": {"batch_size": None},
    "lists": {"batch_size": None, "sampler": BatchSampler(SequentialSampler(Numbers()), 4, False)},
    "a stream": {"dataset": Stream(), "batch_size": 4},
    "a stream of whole batches": {"dataset": Stream(), "batch_size": 4, "drop_last": True},
    "a stream of samples": {"dataset": Stream(), "batch_size": None, "collate_fn": torch.tensor},
    "a collate function": {"batch_size": 5, "collate_fn": collate},
    "a worker": {"batch_size": 4, "num_workers": 1, "timeout": 30.0},
    "a lasting worker": {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 5},
    "a context": {"num_workers": 1, "multiprocessing_context": "fork", "in_order": False},
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_it_loads_what_the_other_loads_with_the_same_settings(given: dict[str, Any]) -> None:
    theirs = Torch(**{"dataset": Numbers(), **given})
    ours = like(theirs)
    assert type(ours) is stoker.DataLoader
    for name in inspect.signature(Torch.__init__).parameters:
        if name in ("self", "shuffle"):
            continue
        found, expected = getattr(ours, name), getattr(theirs, name)
        stand_in = isinstance(theirs.dataset, Stream) or "batch_sampler" in given
        if stand_in and name in ("sampler", "batch_sampler") and name not in given:
            assert type(found) is type(expected)  # torch's, and nobody draws from it
        elif name == "batch_sampler" and type(expected) is BatchSampler and theirs.batch_size:
            assert found.sampler is expected.sampler
        else:
            assert found is expected or found == expected, name
    seen = []
    for loader in (theirs, ours):
        torch.manual_seed(1)
        if theirs.generator is not None:
            theirs.generator.manual_seed(1)
        seen.append(lists(loader))
    assert seen[0] == seen[1]


def test_settings_may_be_changed_and_added() -> None:
    theirs = Torch(Numbers(), 4, num_workers=1, persistent_workers=True, prefetch_factor=3)
    ours = like(theirs, num_workers=2, memory="16MB", name="x", persistent_workers=False)
    assert (ours.num_workers, ours.memory, ours.name, ours.prefetch_factor) == (2, "16MB", "x", 3)
    assert not ours.persistent_workers
    ours = like(theirs, num_workers=0)
    assert (ours.num_workers, ours.prefetch_factor, ours.persistent_workers) == (0, None, False)
    assert like(Torch(Numbers()), num_workers="auto").num_workers >= 1
    with pytest.raises(TypeError, match="unheard_of"):
        like(theirs, unheard_of=1)


def test_a_prefetch_that_nobody_asked_for_is_not_asked_for() -> None:
    assert not like(Torch(Numbers(), num_workers=1))._counted
    assert not like(stoker.DataLoader(Numbers(), num_workers=1))._counted
    assert like(stoker.DataLoader(Numbers(), num_workers=1, prefetch_factor=2))._counted


def test_a_loader_of_ours_keeps_its_own_keywords() -> None:
    ours: dict[str, Any] = {"memory": "16MB", "worker_kind": "thread", "on_error": "skip"}
    first = stoker.DataLoader(Numbers(), 4, num_workers=1, name="first", **ours)
    second = like(first, name="second")
    assert own_keywords(second) == {**own_keywords(first), "name": "second"}
    assert set(own_keywords(first)) == {*OWN, "prefetch_factor"}
    assert {name: getattr(second, name) for name in ours} == ours
    assert lists(second) == lists(first)
    assert (first.stats().delivered, second.stats().delivered) == (3, 3)


class Forever(Torch[Any]):
    """As timm's MultiEpochsDataLoader, derived from torch's class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._DataLoader__initialized = False
        self.batch_sampler = _Repeated(self.batch_sampler)
        self._DataLoader__initialized = True
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.batches)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            yield next(self.iterator)


class _Repeated:
    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.batches


def test_a_loader_that_iterates_in_its_own_way_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"class Mine\(Forever, stoker\.DataLoader\)"):
        like(Forever(Numbers(), 4))
    with pytest.raises(ConfigError, match=r"a torch\.utils\.data\.DataLoader"):
        like([1, 2])  # type: ignore[arg-type]


def test_a_loader_class_of_others_takes_our_engine_as_a_second_base() -> None:
    class Mine(Forever, stoker.DataLoader[Any]):
        pass

    loader = Mine(Numbers(), 4, num_workers=1, memory="16MB")
    epochs = [lists(loader) for _ in range(2)]
    assert epochs == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]] * 2
    assert (loader.stats().delivered, loader.stats().worker_kind) == (6, "process")


def test_adopting_gives_our_engine_or_leaves_things_as_they_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours = adopt(Torch(Numbers()), memory="16MB")
    assert ours.memory == "16MB"
    assert adopt(ours) is ours
    with pytest.raises(ConfigError, match="memory"):
        adopt(Torch(Numbers()), memory="a lot")
    assert not caplog.records
    for other in (Forever(Numbers()), object()):
        assert adopt(other) is other
    assert "Forever stays as it is" in caplog.text
    assert len(caplog.records) == 2


def test_with_our_class_in_torchs_place_it_still_knows_what_is_ours() -> None:
    """As a script does that replaces the class before anybody imports it."""
    code = (
        "import torch.utils.data, torch.utils.data.dataloader\n"
        "from stoker.loader.dataloader import DataLoader\n"
        "torch.utils.data.DataLoader = torch.utils.data.dataloader.DataLoader = DataLoader\n"
        "from stoker.integrations.like import OWN, TORCH\n"
        "assert TORCH is not DataLoader and 'memory' in OWN and 'timeout' not in OWN\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


def test_a_loader_answers_accelerates_question_without_accelerate() -> None:
    loader: Any = stoker.DataLoader(Numbers(), num_workers=0)
    before = "accelerate" in sys.modules
    assert loader._is_accelerate_prepared is False
    loader._is_accelerate_prepared = True
    assert loader._is_accelerate_prepared is True
    assert ("accelerate" in sys.modules) is before
