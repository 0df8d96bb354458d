"""Client code that was written against torch's DataLoader, with ours in its place.

Each part does what a real framework or torch's own tests do, reduced to the lines that matter.
What is delivered is compared elsewhere (test_differential, test_randomness).
"""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import typing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
import torch.utils.data
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

import stoker

Torch = torch.utils.data.DataLoader


class Squares(Dataset[torch.Tensor]):
    def __init__(self, length: int = 12, seconds: float = 0.0) -> None:
        self.length = length
        self.seconds = seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.tensor(index * index)


class Count(IterableDataset[int]):
    def __init__(self, length: int, said: int | None = None) -> None:
        self.length = length
        self.said = length if said is None else said

    def __len__(self) -> int:
        return self.said

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def total(loader: Any) -> int:
    return sum(int(batch.sum()) for batch in loader)


SQUARES = sum(i * i for i in range(12))


# --- what the class is --------------------------------------------------------------------------


def test_it_is_a_torch_loader_by_class_and_by_name() -> None:
    loader = stoker.DataLoader(Squares(), num_workers=0)
    assert isinstance(loader, Torch)
    assert issubclass(stoker.DataLoader, Torch)
    assert type(loader).__name__ == "DataLoader"
    assert isinstance(iter(loader), _BaseDataLoaderIter)


def test_it_is_generic_like_torchs() -> None:
    assert typing.get_args(stoker.DataLoader[int]) == (int,)
    assert typing.get_origin(stoker.DataLoader[int]) is stoker.DataLoader

    class Typed(stoker.DataLoader[torch.Tensor]):
        pass

    def train(loader: stoker.DataLoader[int]) -> None: ...

    assert typing.get_type_hints(train)["loader"] == stoker.DataLoader[int]
    assert total(Typed(Squares(), 4, num_workers=0)) == SQUARES
    assert isinstance(stoker.DataLoader[int](Squares(), num_workers=0), stoker.DataLoader)


def test_its_signature_is_torchs_with_keywords_of_our_own_at_the_end() -> None:
    theirs = inspect.signature(Torch.__init__).parameters
    ours = inspect.signature(stoker.DataLoader.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].kind is parameter.kind
        if name != "num_workers":
            assert ours[name].default == parameter.default
    for name in list(ours)[len(theirs) :]:
        assert ours[name].kind is inspect.Parameter.KEYWORD_ONLY


def test_positional_arguments_mean_what_they_mean_in_torch() -> None:
    def collate(samples: Any) -> Any:
        return samples

    def init(worker: int) -> None: ...

    generator = torch.Generator()
    sampler = SequentialSampler(range(12))
    arguments = (5, False, sampler, None, 2, collate, False, True, 3.0, init, "fork", generator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, theirs = stoker.DataLoader(Squares(), *arguments), Torch(Squares(), *arguments)
    for name in inspect.signature(Torch.__init__).parameters:
        if name not in ("self", "dataset", "shuffle", "batch_sampler"):
            assert getattr(ours, name) == getattr(theirs, name), name


# --- what frameworks do to it -------------------------------------------------------------------


class Collater:
    def __init__(self, follow: list[str] | None) -> None:
        self.follow = follow

    def __call__(self, samples: list[Any]) -> Any:
        return torch.stack(samples)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_subclass_may_set_attributes_before_it_is_initialised(workers: int) -> None:
    """As PyG's loader."""

    class GraphLoader(stoker.DataLoader[Any]):
        def __init__(
            self, dataset: Any, batch_size: int = 1, follow: Any = None, **kwargs: Any
        ) -> None:
            kwargs.pop("collate_fn", None)
            self.follow = follow
            self.dataset_size = len(dataset)
            super().__init__(dataset, batch_size, collate_fn=Collater(follow), **kwargs)

    loader = GraphLoader(Squares(), 5, ["x"], num_workers=workers)
    assert loader.follow == ["x"]
    assert total(loader) == SQUARES


class _Repeat:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


@pytest.mark.parametrize("workers", [0, 2])
def test_one_iterator_may_be_kept_for_all_epochs(workers: int) -> None:
    """As timm's MultiEpochsDataLoader and ultralytics' InfiniteDataLoader."""

    class MultiEpochs(stoker.DataLoader[Any]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._DataLoader__initialized = False
            if self.batch_sampler is None:
                self.sampler = _Repeat(self.sampler)
            else:
                self.batch_sampler = _Repeat(self.batch_sampler)
            self._DataLoader__initialized = True
            self.iterator = super().__iter__()

        def __len__(self) -> int:
            if self.batch_sampler is None:
                return len(self.sampler.sampler)
            return len(self.batch_sampler.sampler)

        def __iter__(self) -> Iterator[Any]:
            for _ in range(len(self)):
                yield next(self.iterator)

    class Infinite(stoker.DataLoader[Any]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            object.__setattr__(self, "batch_sampler", _Repeat(self.batch_sampler))
            self.iterator = super().__iter__()

        def __len__(self) -> int:
            return len(self.batch_sampler.sampler)

        def __iter__(self) -> Iterator[Any]:
            for _ in range(len(self)):
                yield next(self.iterator)

    for cls in (MultiEpochs, Infinite):
        loader = cls(Squares(), batch_size=5, num_workers=workers)
        assert [total(loader) for _ in range(3)] == [SQUARES] * 3
        assert len(loader) == 3
        with pytest.raises(ValueError, match="batch_sampler attribute should not be set"):
            loader.batch_sampler = None


def rebuilt_like_lightning(loader: Any, **replaced: Any) -> Any:
    """Keeps the arguments whose attribute differs from the signature's default."""
    attributes = {k: v for k, v in vars(loader).items() if not k.startswith("_")}
    attributes["multiprocessing_context"] = loader.multiprocessing_context
    parameters = dict(inspect.signature(loader.__init__).parameters)
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    kept = {
        name
        for name, parameter in parameters.items()
        if name in attributes and parameter.default is not attributes[name]
    }
    arguments = {name: attributes[name] for name in kept | {"dataset"}}
    arguments |= {"batch_sampler": None, **replaced}
    assert not {
        p.name for p in parameters.values() if p.default is p.empty and p.name not in arguments
    }
    assert arguments.keys() <= parameters.keys()
    return type(loader)(**arguments)


@pytest.mark.parametrize("workers", [0, 2])
def test_lightning_rebuilds_it_with_a_distributed_sampler(workers: int) -> None:
    extra: dict[str, Any] = {"prefetch_factor": 3, "persistent_workers": True} if workers else {}
    loader = stoker.DataLoader(
        Squares(),
        batch_size=4,
        shuffle=True,
        num_workers=workers,
        memory="64MB",
        on_error="skip",
        name="train",
        **extra,
    )
    sampler = DistributedSampler(loader.dataset, num_replicas=2, rank=1, shuffle=False)
    again = rebuilt_like_lightning(loader, sampler=sampler)
    assert type(again) is stoker.DataLoader
    assert (again.memory, again.on_error, again.name) == ("64MB", "skip", "train")
    assert (again.batch_size, again.num_workers) == (4, workers)
    assert again.prefetch_factor == loader.prefetch_factor
    assert total(again) == sum(i * i for i in range(1, 12, 2))


def test_every_keyword_is_an_attribute_that_can_be_read() -> None:
    loader = stoker.DataLoader(Squares(), num_workers=1, memory=1 << 20, name="x")
    for name in inspect.signature(stoker.DataLoader.__init__).parameters:
        if name not in ("self", "shuffle"):  # torch keeps no shuffle either
            getattr(loader, name)


def test_ignite_rebuilds_it_from_its_dict() -> None:
    loader = stoker.DataLoader(Squares(), batch_size=4, num_workers=2, memory="32MB", name="a")
    public = {k: v for k, v in vars(loader).items() if not k.startswith("_")}
    keywords = inspect.signature(stoker.DataLoader.__init__).parameters
    assert public.keys() <= keywords.keys()
    public.pop("sampler"), public.pop("batch_sampler")
    again = stoker.DataLoader(**public, sampler=SequentialSampler(Squares()))
    assert again.memory == "32MB"
    assert total(again) == SQUARES


def test_accelerate_builds_a_subclass_around_its_attributes() -> None:
    class Shard(stoker.DataLoader[Any]):
        def __init__(self, dataset: Any, device: str | None = None, **kwargs: Any) -> None:
            super().__init__(dataset, **kwargs)
            self.device = device

        def __iter__(self) -> Iterator[Any]:
            iterator = super().__iter__()
            current = next(iterator)
            for following in iterator:
                yield current
                current = following
            yield current

    loader = stoker.DataLoader(Squares(), 4, num_workers=2)
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator")
    kept = {name: getattr(loader, name) for name in (*names, "prefetch_factor")}
    shard = Shard(loader.dataset, "cpu", batch_sampler=loader.batch_sampler, **kept)
    assert [total(shard) for _ in range(2)] == [SQUARES] * 2


@pytest.mark.parametrize("workers", [0, 2])
def test_it_may_take_torchs_place_in_torchs_own_module(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.utils.data, "DataLoader", stoker.DataLoader)
    monkeypatch.setattr(torch.utils.data.dataloader, "DataLoader", stoker.DataLoader)
    loader = torch.utils.data.DataLoader(Squares(), 4, num_workers=workers)
    assert [total(loader) for _ in range(2)] == [SQUARES] * 2

    class Mine(torch.utils.data.DataLoader):
        pass

    assert total(Mine(Squares(), 4, num_workers=workers)) == SQUARES
    assert isinstance(loader, torch.utils.data.DataLoader)


# --- what is looked at from outside -------------------------------------------------------------


def test_torchs_private_names_are_there() -> None:
    loader = stoker.DataLoader(Squares(), 4, num_workers=2, persistent_workers=True)
    assert loader._iterator is None
    assert loader._auto_collation
    assert loader._index_sampler is loader.batch_sampler
    assert loader._dataset_kind == _DatasetKind.Map
    assert total(loader) == SQUARES
    iterator = loader._iterator
    assert iterator is not None
    assert iterator is iter(loader)
    assert len(iterator) == len(loader) == 3
    assert iterator._num_workers == 2
    assert not hasattr(iterator, "_pin_memory_thread")
    iterator._shutdown_workers()
    assert not any(worker.is_alive() for worker in iterator._workers)
    loader._iterator = None


def test_without_batching_the_index_sampler_is_the_sampler() -> None:
    loader = stoker.DataLoader(Count(3), batch_size=None, num_workers=0)
    assert not loader._auto_collation
    assert loader._index_sampler is loader.sampler
    assert loader._dataset_kind == _DatasetKind.Iterable


def test_workers_are_processes_that_can_be_watched_from_the_start() -> None:
    loader = stoker.DataLoader(Squares(40, 0.002), 2, num_workers=2)
    iterator = loader._get_iterator()
    workers = iterator._workers
    assert len(workers) == 2
    assert len({worker.pid for worker in workers} - {None, os.getpid()}) == 2
    assert all(worker.is_alive() for worker in workers)
    assert all(worker.exitcode is None for worker in workers)
    assert all(worker.daemon for worker in workers)
    for worker in workers:
        os.kill(worker.pid, 0)
    next(iterator)
    iterator._shutdown_workers()
    for worker in workers:
        worker.join(5)
        assert not worker.is_alive()
        assert worker.exitcode == 0


def test_a_worker_that_is_terminated_is_seen_to_end() -> None:
    iterator = iter(stoker.DataLoader(Squares(40, 0.01), 2, num_workers=2))
    next(iterator)
    worker = iterator._workers[0]
    worker.terminate()
    worker.join(10)
    assert not worker.is_alive()
    assert len(list(iterator)) == 19
    assert worker.exitcode == -signal.SIGTERM


def test_an_iterator_can_not_be_pickled_as_in_torch() -> None:
    iterator = iter(stoker.DataLoader(Squares(), num_workers=1))
    with pytest.raises(NotImplementedError):
        pickle.dumps(iterator)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_can_be_copied_and_pickled_with_its_dataset(workers: int) -> None:
    loader = stoker.DataLoader(Squares(), 5, num_workers=workers, memory="16MB", name="x")
    assert total(loader) == SQUARES
    for other in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert type(other) is stoker.DataLoader
        assert (other.memory, other.name) == ("16MB", "x")
        assert total(other) == SQUARES
        with pytest.raises(ValueError, match="dataset attribute should not be set"):
            other.dataset = Squares()
    assert loader.stats().delivered == 3


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("dataset", Squares()),
        ("batch_size", 3),
        ("sampler", None),
        ("batch_sampler", None),
        ("drop_last", True),
        ("persistent_workers", True),
    ],
)
def test_what_torch_does_not_let_one_change_is_refused_in_its_words(
    attribute: str, value: Any
) -> None:
    words = []
    for cls in (Torch, stoker.DataLoader):
        with pytest.raises(ValueError, match="should not be set") as caught:
            setattr(cls(Squares(), num_workers=0), attribute, value)
        words.append(str(caught.value))
    assert words[0] == words[1]


def test_the_number_of_workers_may_be_changed_before_iterating() -> None:
    loader = stoker.DataLoader(Squares(), 2, num_workers=1)
    loader.num_workers = 2
    iterator = iter(loader)
    assert len(iterator._workers) == 2
    assert total(iterator) == SQUARES
    loader.num_workers = 0
    assert total(loader) == SQUARES


def test_the_collate_fn_may_be_changed_before_iterating() -> None:
    loader = stoker.DataLoader(Squares(), 4, num_workers=1)
    loader.collate_fn = len
    assert list(loader) == [4, 4, 4]


def test_the_multiprocessing_context_reads_as_in_torch() -> None:
    loader = stoker.DataLoader(Squares(), 4, num_workers=1, multiprocessing_context="fork")
    assert loader.multiprocessing_context is torch.multiprocessing.get_context("fork")
    loader.multiprocessing_context = None
    assert loader.multiprocessing_context is None
    assert total(loader) == SQUARES


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_may_be_started_in_every_way_that_torch_knows(method: str) -> None:
    loader = stoker.DataLoader(Squares(), 4, num_workers=2, multiprocessing_context=method)
    assert total(loader) == SQUARES


def test_the_sharing_strategy_of_torch_does_not_matter() -> None:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        loader = stoker.DataLoader(Squares(), 4, num_workers=2)
        kept = list(loader)
        assert sum(int(batch.sum()) for batch in kept) == SQUARES
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def test_several_iterators_of_one_loader_do_not_disturb_each_other() -> None:
    loader = stoker.DataLoader(Squares(), 4, num_workers=1)
    both = [(int(a.sum()), int(b.sum())) for a, b in zip(loader, loader, strict=True)]
    assert sum(a for a, _ in both) == sum(b for _, b in both) == SQUARES


ENDING = """
import torch
import stoker
if __name__ == "__main__":
    kept = []
    for pinned in (False, True):
        if pinned:
            torch.accelerator.is_available = lambda: True
            torch.accelerator.current_accelerator = lambda: torch.device("cuda")
            torch.accelerator.current_device_index = lambda: 0
            torch.accelerator.set_device_index = lambda index: None
            torch.Tensor.pin_memory = lambda tensor, device=None: tensor.clone()
        loader = stoker.DataLoader(
            torch.arange(90), 3, num_workers=1, persistent_workers=True, pin_memory=pinned
        )
        iterator = iter(loader)
        kept.append((loader, iterator, next(iterator)))
    {last}
"""


@pytest.mark.parametrize(
    ("last", "code", "said"),
    [("pass", 0, ""), ("raise SystemExit(3)", 3, ""), ("raise OSError('mine')", 1, "mine")],
)
def test_a_script_may_end_with_iterators_alive(
    last: str, code: int, said: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDING.format(last=last))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == code
    lines = done.stderr.splitlines()
    assert lines == [] if not said else lines[-1] == f"OSError: {said}"


# --- lengths, warnings, errors ------------------------------------------------------------------


def test_lengths_are_those_of_torch() -> None:
    cases: list[tuple[Any, dict[str, Any]]] = [
        (Squares(), {}),
        (Squares(), {"batch_size": 5}),
        (Squares(), {"batch_size": 5, "drop_last": True}),
        (Squares(), {"batch_size": None}),
        (Squares(), {"sampler": RandomSampler(range(7))}),
        (Squares(), {"batch_sampler": BatchSampler(range(7), 2, True)}),
        (Count(7), {"batch_size": 2}),
        (Count(7), {"batch_size": 2, "drop_last": True}),
        (Count(7), {"batch_size": None}),
    ]
    for dataset, options in cases:
        assert len(stoker.DataLoader(dataset, **options)) == len(Torch(dataset, **options))


def heard(act: Callable[[], Any]) -> list[tuple[type[Warning], str]]:
    """The warnings, without what differs between two objects: their addresses."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [(w.category, str(w.message).partition("object at")[0]) for w in caught]


@pytest.mark.parametrize("workers", [0, 2])
def test_warnings_are_those_of_torch(workers: int) -> None:
    def excess(cls: type[Torch]) -> None:
        cls(Squares(), num_workers=workers * 500)

    def pinned(cls: type[Torch]) -> None:
        list(cls(Squares(), 4, pin_memory=True, num_workers=workers))

    def device(cls: type[Torch]) -> None:
        list(cls(Squares(), 4, pin_memory=True, pin_memory_device="cuda", num_workers=workers))

    def too_long(cls: type[Torch]) -> None:
        loader = cls(Count(6, said=4), batch_size=None, num_workers=workers)
        len(loader)
        list(loader)

    for act in (excess, pinned, device, too_long):
        expected = heard(lambda act=act: act(Torch))
        assert heard(lambda act=act: act(stoker.DataLoader)) == expected
        assert expected or (act is excess and not workers)


BAD_ARGUMENTS: list[dict[str, Any]] = [
    {"num_workers": -1},
    {"num_workers": None},
    {"num_workers": 0, "timeout": -1},
    {"num_workers": 1, "timeout": -1},
    {"num_workers": 0, "prefetch_factor": 2},
    {"num_workers": 1, "prefetch_factor": -2},
    {"num_workers": 0, "persistent_workers": True},
    {"num_workers": 0, "shuffle": True, "sampler": [1]},
    {"num_workers": 0, "batch_sampler": [[1]], "batch_size": 2},
    {"num_workers": 0, "batch_sampler": [[1]], "shuffle": True},
    {"num_workers": 0, "batch_sampler": [[1]], "sampler": [1]},
    {"num_workers": 0, "batch_sampler": [[1]], "drop_last": True},
    {"num_workers": 0, "batch_size": None, "drop_last": True},
    {"num_workers": 0, "batch_size": 0},
    {"num_workers": 0, "batch_size": -3},
    {"num_workers": 0, "batch_size": "many"},
    {"num_workers": 0, "multiprocessing_context": "fork"},
    {"num_workers": 1, "multiprocessing_context": "telepathy"},
    {"num_workers": 1, "multiprocessing_context": 3},
    {"num_workers": 0, "dataset": Count(3), "shuffle": True},
    {"num_workers": 0, "dataset": Count(3), "sampler": [1]},
    {"num_workers": 0, "dataset": Count(3), "batch_sampler": [[1]]},
    {"num_workers": 0, "dataset": Squares(0), "shuffle": True},
    {"num_workers": 0, "dataset": object()},
    {"num_workers": 0, "unheard_of": 1},
]


def refusal(cls: type[Torch], arguments: dict[str, Any]) -> tuple[type[BaseException], str] | None:
    try:
        list(cls(**{"dataset": Squares(), **arguments}))
    except Exception as error:  # noqa: BLE001 - whatever it is, ours must be the same
        return type(error), str(error).partition("object at")[0]
    return None


@pytest.mark.parametrize(
    "arguments", BAD_ARGUMENTS, ids=lambda given: re.sub(r" at 0x\w+", "", str(given))
)
def test_arguments_that_torch_refuses_are_refused_in_its_words(arguments: dict[str, Any]) -> None:
    expected = refusal(Torch, arguments)
    assert expected is not None or "batch_size" in arguments or arguments.get("shuffle")
    assert refusal(stoker.DataLoader, arguments) == expected


@pytest.mark.parametrize("number", [2, True])
def test_a_number_of_workers_may_be_of_any_integer_type(number: Any) -> None:
    import numpy as np

    for given in (number, np.int64(number)):
        assert total(stoker.DataLoader(Squares(), 4, num_workers=given)) == SQUARES


class Failing(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise KeyError("no such file")
        return index


@pytest.mark.parametrize("workers", [0, 2])
def test_after_a_samples_exception_the_iteration_goes_on_as_in_torch(workers: int) -> None:
    seen = []
    for cls in (Torch, stoker.DataLoader):
        iterator = iter(cls(Failing(), 2, num_workers=workers))
        found: list[Any] = [next(iterator).tolist()]
        with pytest.raises(KeyError) as caught:
            next(iterator)
        assert "no such file" in str(caught.value)
        if workers:
            # By name, but not by number: an idle worker may have taken the batch over.
            assert "Caught KeyError in DataLoader worker process" in str(caught.value)
        seen.append(found + [batch.tolist() for batch in iterator])
    assert seen[0] == seen[1] == [[0, 1], [4, 5], [6, 7]]


class Unsubscriptable(Dataset[int]):
    __getitem__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return 2


class Wrapper:
    """Forwards attributes to another dataset, but brings its own subscript."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.__getitem__ = self.not_this_one

    def not_this_one(self, index: int) -> Any:
        raise AssertionError("Python looks for __getitem__ in the class")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index] + 1


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_are_taken_by_subscription_as_in_torch(workers: int) -> None:
    assert total(stoker.DataLoader(Wrapper(Squares()), num_workers=workers)) == SQUARES + 12
    for cls in (Torch, stoker.DataLoader):
        with pytest.raises(TypeError, match=r"not subscriptable|not callable"):
            list(cls(Unsubscriptable(), num_workers=workers))


# --- who a worker is ----------------------------------------------------------------------------


class Introduced(Dataset[Any]):
    def __init__(self, length: int, seconds: float) -> None:
        self.length = length
        self.seconds = seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        time.sleep(self.seconds * (index % 3))
        assert info.dataset is self
        return info.id, info.num_workers, os.getpid()


def ids(loader: Any) -> list[int]:
    return [int(batch[0][0]) for batch in loader]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("seconds", [0.0, 0.002])
def test_a_dataset_that_looks_at_worker_ids_sees_torchs_assignment(seconds: float) -> None:
    loader = stoker.DataLoader(Introduced(36, seconds), 2, num_workers=3)
    found = ids(loader)
    # Before the first report nobody knew that ids matter: what waited then may have moved.
    assert set(found) <= {0, 1, 2}
    assert found[6:] == [batch % 3 for batch in range(6, 18)]


def no_op(worker: int) -> None:
    pass


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_with_a_worker_init_fn_every_batch_stays_with_torchs_worker() -> None:
    loader = stoker.DataLoader(Introduced(36, 0.002), 2, num_workers=3, worker_init_fn=no_op)
    assert ids(loader) == [batch % 3 for batch in range(18)]


def test_there_is_no_worker_info_in_the_trainer() -> None:
    loader = stoker.DataLoader(Squares(), num_workers=1)
    iterator = iter(loader)
    next(iterator)
    assert get_worker_info() is None


class Nested(Dataset[Any]):
    """Loads with a loader of its own, as a preprocessing step may."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        inner = stoker.DataLoader(Squares(index + 1), batch_size=4)
        return index, inner.num_workers, total(inner)


def test_a_loader_inside_a_worker_loads_without_workers() -> None:
    loader = stoker.DataLoader(Nested(), batch_size=None, num_workers=2)
    assert list(loader) == [[0, 0, 0], [1, 0, 1], [2, 0, 5], [3, 0, 14]]
