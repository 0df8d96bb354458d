"""Whatever torch's DataLoader delivers, ours delivers: types, nesting, bytes, strides, aliasing.

Cases are drawn by a seeded generator: each loader carries many structures at once, because the
reference needs worker processes of torch's own. Random draws inside a dataset are elsewhere
(test_randomness), and so are failures.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils.data
from PIL import Image
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
Make = Callable[[int], Any]

# --- what samples are made of -------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    tensor: torch.Tensor
    label: str


class Marked(torch.Tensor):
    """A subclass that keeps its type through torch functions."""


class Mapping(dict[str, Any]):
    """A dict with something of its own."""


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Plain:
    """An arbitrary picklable object, with a tensor inside."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.inner = torch.full((300,), number)


def floats(i: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = int(np.prod(shape))
    return (torch.arange(count, dtype=torch.float32) * 0.5 + i).to(dtype).reshape(shape)


def structured(i: int) -> np.ndarray:
    return np.array([(i, 1.5, b"ab"), (i + 1, 2.5, b"cd")], dtype="i4,f8,S2")


def holed(i: int) -> np.ndarray:
    array = np.zeros(4, dtype=[("a", "i4"), ("b", "f4", (2, 3))])
    array["a"] = i
    return array


# Leaves that torch's default_collate can batch.
COLLATABLE: dict[str, Make] = {
    "float": lambda i: floats(i, 3, 4),
    "large": lambda i: floats(i, 3, 40, 50),
    "double": lambda i: floats(i, 7, dtype=torch.float64),
    "half": lambda i: floats(i, 5, dtype=torch.float16),
    "bfloat16": lambda i: floats(i, 33, 65, dtype=torch.bfloat16),
    "int": lambda i: torch.arange(6) + i,
    "uint8": lambda i: torch.full((3, 32, 32), i % 256, dtype=torch.uint8),
    "bool": lambda i: torch.tensor([True, i % 2 == 0]),
    "complex": lambda i: torch.complex(floats(i, 4), floats(i + 1, 4)),
    "scalar tensor": lambda i: torch.tensor(i),
    "empty": lambda i: torch.empty(0, 4),
    "empty middle": lambda i: torch.empty(3, 0, 2, dtype=torch.int16),
    "channels last": lambda i: floats(i, 2, 3, 8, 8).to(memory_format=torch.channels_last),
    "expand": lambda i: floats(i, 5, 1).expand(5, 64),
    "transposed": lambda i: floats(i, 20, 30).t(),
    "slice": lambda i: floats(i, 40, 10)[::2, 1:7],
    "subclass": lambda i: floats(i, 6).as_subclass(Marked),
    "array": lambda i: np.full((4, 5), i, dtype=np.float32),
    "large array": lambda i: np.full((64, 65), i, dtype=np.int64),
    "half array": lambda i: np.full(3, i, dtype=np.float16),
    "bool array": lambda i: np.array([i % 2 == 0, True]),
    "fortran array": lambda i: np.asfortranarray(np.arange(12.0).reshape(3, 4) + i),
    "strided array": lambda i: (np.arange(24) + i)[::3],
    "0-d array": lambda i: np.array(i),
    "numpy float": lambda i: np.float64(i),
    "numpy int": lambda i: np.int32(i),
    "numpy bool": lambda i: np.bool_(i % 2),
    "number": lambda i: i,
    "big number": lambda i: i + (1 << 40),
    "real": lambda i: i / 7,
    "truth": lambda i: i % 3 == 0,
    "text": lambda i: f"sample {i} ü",
    "bytes": lambda i: bytes([i % 256]) * 5000,
    "no keys": lambda i: {},
    "no items": lambda i: [],
    "no fields": lambda i: (),
}

# Arrays that torch makes no tensors of, and refuses to try: for a collate_fn of the user's only.
ARRAYS: dict[str, Make] = {
    "object array": lambda i: np.array([i, "x", None, (1, 2)], dtype=object),
    "structured": structured,
    "structured large": lambda i: np.tile(structured(i), 500),
    "nested fields": holed,
    "dates": lambda i: np.array(["2024-01-01", "NaT"], dtype="M8[D]"),
    "big endian": lambda i: np.arange(5, dtype=">i4") + i,
    "masked": lambda i: np.ma.masked_array([1.0, float(i)], mask=[True, False]),
    "numpy date": lambda i: np.datetime64("2024-01-01") + i,
}

# Leaves that only arrive unbatched (batch_size=None) or through a collate_fn of the user's.
OTHER: dict[str, Make] = {
    "none": lambda i: None,
    "grad": lambda i: floats(i, 300).requires_grad_(),
    "parameter": lambda i: torch.nn.Parameter(floats(i, 2, 3)),
    "frozen parameter": lambda i: torch.nn.Parameter(floats(i, 900), requires_grad=False),
    "module": lambda i: torch.nn.Linear(3, 2),
    "sparse": lambda i: floats(i, 4, 5).to_sparse(),
    "csr": lambda i: floats(i, 4, 5).to_sparse_csr(),
    "size": lambda i: torch.Size([i, 2]),
    "dtype": lambda i: torch.float16,
    "device": lambda i: torch.device("cpu"),
    "text array": lambda i: np.array([f"a{i}", "longer"]),
    "bytes array": lambda i: np.array([b"a", b"bcd"] * 400),
    "image": lambda i: Image.new("RGB", (40, 30), (i % 256, 2, 3)),
    "dataclass": lambda i: Record(floats(i, 400), f"r{i}"),
    "object": lambda i: Plain(i),
    "set": lambda i: {i, "x"},
    "frozenset": lambda i: frozenset({i}),
    "decimal": lambda i: decimal.Decimal(i) / 7,
    "fraction": lambda i: Fraction(i, 7),
    "date": lambda i: dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc),
    "path": lambda i: Path("/data") / str(i),
    "enum": lambda i: Colour.BLUE,
    "range": lambda i: range(i),
    "bytearray": lambda i: bytearray(b"x" * 9000),
    "large bytes": lambda i: bytes(200_000),
    "deque": lambda i: collections.deque([torch.tensor(i)], maxlen=3),
    "counter": lambda i: collections.Counter({"a": i}),
    "defaultdict": lambda i: collections.defaultdict(list, a=[torch.tensor(i)]),
    "function": lambda i: floats,
    "class": lambda i: Plain,
    "ellipsis": lambda i: ...,
    "complex number": lambda i: complex(i, 1),
}


def _containers(rng: random.Random, parts: list[Make]) -> Make:
    """Some nesting around the parts."""
    kind = rng.choice(["dict", "ordered", "mapping", "list", "tuple", "pair", "deep"])
    if kind == "pair":
        left, right = parts[0], parts[-1]
        return lambda i: Pair(left(i), right(i))
    if kind in ("list", "tuple"):
        build = list if kind == "list" else tuple
        return lambda i: build(part(i) for part in parts)
    if kind == "deep":
        return lambda i: {"a": [{"b": (tuple(part(i) for part in parts), i)}]}
    make = {"dict": dict, "ordered": collections.OrderedDict, "mapping": Mapping}[kind]
    return lambda i: make((f"k{n}", part(i)) for n, part in enumerate(parts))


class Structures:
    """Every leaf at least once, in random nestings; the first field is the index."""

    def __init__(self, seed: int, leaves: dict[str, Make]) -> None:
        rng = random.Random(seed)
        names = list(leaves)
        rng.shuffle(names)
        self.makers: dict[str, Make] = {}
        while names:
            taken = [names.pop() for _ in range(min(len(names), rng.randint(1, 6)))]
            parts = [leaves[name] for name in taken]
            for _ in range(rng.randint(0, 2)):
                parts = [_containers(rng, parts)]
            for place, part in enumerate(parts):
                self.makers[f"{'+'.join(taken)}/{place}"] = part

    def sample(self, index: int) -> dict[str, Any]:
        shared = floats(index, 2000)
        return {
            "index": index,
            **{name: make(index) for name, make in self.makers.items()},
            "twice": [shared, shared],
            "overlap": [shared[:1000], shared[500:]],
        }


class Samples(Dataset[Any]):
    def __init__(self, structures: Structures, length: int = 17) -> None:
        self.structures = structures
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.structures.sample(int(index))


class ManySamples(Samples):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.structures.sample(int(i)) for i in indices]


class Stream(IterableDataset[Any]):
    """Shards itself over its workers, unevenly."""

    def __init__(self, structures: Structures, length: int = 17) -> None:
        self.structures = structures
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        for index in range(first, self.length, step):
            yield self.structures.sample(index)


# --- what "the same" means ----------------------------------------------------------------------


def assert_same(ours: Any, theirs: Any, where: str = "batch") -> None:
    assert type(ours) is type(theirs), f"{where}: {type(ours)} for {type(theirs)}"
    if isinstance(theirs, torch.Tensor):
        _assert_same_tensor(ours, theirs, where)
    elif isinstance(theirs, np.ma.MaskedArray):
        assert_same(ours.data, theirs.data, where)
        assert_same(ours.mask, theirs.mask, where)
    elif isinstance(theirs, np.ndarray):
        assert ours.dtype == theirs.dtype, where
        assert ours.shape == theirs.shape, where
        assert ours.strides == theirs.strides or theirs.size <= 1, where
        assert ours.flags.writeable == theirs.flags.writeable, where
        if theirs.dtype.hasobject:
            assert ours.tolist() == theirs.tolist(), where
        else:
            assert ours.tobytes() == theirs.tobytes(), where
    elif isinstance(theirs, collections.abc.Mapping):
        assert list(ours) == list(theirs), where
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{where}[{key!r}]")
        if isinstance(theirs, collections.defaultdict):
            assert ours.default_factory is theirs.default_factory, where
    elif isinstance(theirs, (list, tuple, collections.deque)):
        assert len(ours) == len(theirs), where
        for place, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(mine, other, f"{where}[{place}]")
    elif isinstance(theirs, torch.nn.Module):
        assert list(ours.state_dict()) == list(theirs.state_dict()), where
    elif isinstance(theirs, Image.Image):
        assert (ours.mode, ours.size) == (theirs.mode, theirs.size), where
        assert ours.tobytes() == theirs.tobytes(), where
    elif isinstance(theirs, (Record, Plain)):
        assert_same(vars(ours), vars(theirs), where)
    elif isinstance(theirs, np.generic):
        assert ours.dtype == theirs.dtype, where
        assert ours.tobytes() == theirs.tobytes(), where
    else:
        assert ours == theirs, where


def _assert_same_tensor(ours: torch.Tensor, theirs: torch.Tensor, where: str) -> None:
    for name in ("dtype", "shape", "layout", "device", "requires_grad", "is_leaf", "is_quantized"):
        assert getattr(ours, name) == getattr(theirs, name), f"{where}.{name}"
    assert ours.is_conj() == theirs.is_conj(), where
    if theirs.is_quantized:
        assert ours.qscheme() == theirs.qscheme(), where
        assert torch.equal(ours.dequantize(), theirs.dequantize()), where
    elif theirs.layout is not torch.strided:
        assert torch.equal(ours.to_dense(), theirs.to_dense()), where
    else:
        assert ours.stride() == theirs.stride(), f"{where}: {ours.stride()} / {theirs.stride()}"
        assert torch.equal(ours, theirs), where


def overlaps(batch: Any) -> list[tuple[int, int]]:
    """Which tensors of a batch, counted in order, have bytes in common."""
    spans = []
    for tensor in _tensors(batch):
        if tensor.layout is torch.strided and tensor.numel():
            last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            spans.append((start, start + (last + 1) * tensor.itemsize))
        else:
            spans.append((0, 0))
    return [
        (a, b)
        for (a, x), (b, y) in itertools.combinations(enumerate(spans), 2)
        if x[0] < y[1] and y[0] < x[1]
    ]


def _tensors(part: Any) -> Iterator[torch.Tensor]:
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, collections.abc.Mapping):
        for value in part.values():
            yield from _tensors(value)
    elif isinstance(part, (list, tuple)):
        for value in part:
            yield from _tensors(value)


def batches(cls: type[Torch], seed: int, *args: Any, **kwargs: Any) -> list[Any]:
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 5 workers are more than this machine has cores
        return list(cls(*args, **kwargs))


def compare(seed: int, dataset: Any, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    expected = batches(Torch, seed, dataset, **theirs)
    delivered = batches(stoker.DataLoader, seed, dataset, **ours)
    if ours.get("in_order") is False:
        delivered.sort(key=_first_index)
        expected.sort(key=_first_index)
    assert len(delivered) == len(expected)
    for place, (mine, other) in enumerate(zip(delivered, expected, strict=True)):
        assert_same(mine, other, f"batch {place}")
        assert overlaps(mine) == overlaps(other)


def _first_index(batch: Any) -> int:
    part = batch
    while not isinstance(part, dict):
        part = part[0]
    index = part["index"]
    return int(index if isinstance(index, int) else index[0])


# --- how it is loaded ---------------------------------------------------------------------------


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def as_sums(samples: list[Any]) -> dict[str, Any]:
    """A collate_fn with results of its own making, beside samples that pass through."""
    return {
        "index": samples[0]["index"],
        "first": samples[0],
        "sums": torch.stack([s["twice"][0].sum() for s in samples]),
        "views": torch.arange(len(samples) * 500).reshape(len(samples), 500).unbind(),
        "stack": np.stack([s["overlap"][0].numpy() for s in samples]),
    }


class Halves:
    """A batch sampler that is no Sampler, yields tuples of numpy ints, uneven."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[tuple[np.int64, ...]]:
        indices = np.random.default_rng(5).permutation(self.length)
        for cut in range(0, self.length, 5):
            yield tuple(indices[cut : cut + 1 + cut % 5])


@dataclasses.dataclass(frozen=True)
class Case:
    """One drawn way to load. `batched` says whether the collate_fn sees lists."""

    number: int
    workers: int
    reference_workers: int
    style: str
    order: dict[str, Any]
    options: dict[str, Any]
    batched: bool

    def __str__(self) -> str:
        options = "-".join(f"{k}={getattr(v, '__name__', v)}" for k, v in self.options.items())
        kinds = "-".join(f"{k}={type(v).__name__}" for k, v in self.order.items())
        return f"{self.number}-{self.workers}w-{self.style}-{kinds}-{options}"


def _draw_order(rng: random.Random, length: int) -> dict[str, Any]:
    weights = [1.0 + i % 3 for i in range(length)]
    batch_size = rng.choice([None, 1, 3, 4, 100])
    plain: dict[str, Any] = {"batch_size": batch_size}
    if batch_size is not None and batch_size > 1:
        plain["drop_last"] = rng.random() < 0.4
    choices: list[dict[str, Any]] = [
        plain,
        {**plain, "shuffle": True},
        {**plain, "shuffle": True, "generator": 11},
        {**plain, "sampler": RandomSampler(range(length), replacement=True, num_samples=9)},
        {**plain, "sampler": SubsetRandomSampler(range(3, 12))},
        {**plain, "sampler": WeightedRandomSampler(weights, 12)},
        {**plain, "sampler": [3, 1, 4, 1, 5, 9, 2, 6]},
        {"batch_sampler": Halves(length)},
        {"batch_sampler": BatchSampler(SequentialSampler(range(length)), 6, True)},
        {"batch_sampler": [[1, 2, 3], [4], [2, 2]]},
    ]
    return rng.choice(choices)


def _draw(number: int) -> Case:
    rng = random.Random(number)
    workers = [0, 1, 2, 5][number % 4]
    style = rng.choice(["map", "map", "getitems", "iterable"])
    order = _draw_order(rng, 17)
    if style == "iterable":
        size = rng.choice([None, 1, 3, 4])
        order = {"batch_size": size}
        if size is not None:
            order["drop_last"] = rng.random() < 0.4
    batched = "batch_sampler" in order or order["batch_size"] is not None
    options: dict[str, Any] = {}
    if batched:
        options["collate_fn"] = rng.choice([None, None, as_list, as_sums])
    if workers:
        options["prefetch_factor"] = rng.choice([None, 1, 2, 4])
        options["in_order"] = rng.random() < 0.75
    # A stream depends on the number of workers. A map does not; two show most of the difference.
    reference = workers if style == "iterable" else min(workers, 2)
    return Case(number, workers, reference, style, order, options, batched)


STYLES = {"map": Samples, "getitems": ManySamples, "iterable": Stream}


@pytest.mark.parametrize("case", [_draw(n) for n in range(32)], ids=str)
def test_batches_are_those_of_torch(case: Case) -> None:
    leaves = dict(COLLATABLE)
    if not case.batched:
        leaves |= OTHER
    elif case.options["collate_fn"] is not None:
        leaves |= {**OTHER, **ARRAYS}
    dataset = STYLES[case.style](Structures(case.number, leaves))

    def arguments(workers: int) -> dict[str, Any]:
        order = dict(case.order)
        if "generator" in order:
            order["generator"] = torch.Generator().manual_seed(order["generator"])
        options = dict(case.options)
        if not workers:
            options.pop("prefetch_factor", None)
        return {"num_workers": workers, **order, **options}

    compare(case.number, dataset, arguments(case.reference_workers), arguments(case.workers))


# torch's own way between processes loses these; without workers it delivers them.
LOST_IN_TORCH: dict[str, Make] = {
    "quantized": lambda i: torch.quantize_per_tensor(floats(i, 4, 5), 0.1, 3, torch.quint8),
    "per channel": lambda i: torch.quantize_per_channel(
        floats(i, 2, 5), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8
    ),
    "conjugate": lambda i: torch.complex(floats(i, 4), floats(1, 4)).conj(),
    "negative": lambda i: torch.complex(floats(i, 4), floats(1, 4)).conj().imag,
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.filterwarnings("ignore:.*quantize:")
@pytest.mark.parametrize("workers", [1, 2])
def test_what_torch_loses_on_the_way_arrives_as_without_workers(workers: int) -> None:
    dataset = Samples(Structures(0, LOST_IN_TORCH), 4)
    compare(0, dataset, {"batch_size": None}, {"batch_size": None, "num_workers": workers})


class Keyed(Dataset[Any]):
    def __getitem__(self, key: Any) -> Any:
        return {"key": key, "length": torch.tensor(len(str(key)))}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "keys",
    [["a", "bb", "ccc"], [("a", 1), ("b", 2)], [None, 3.5], [torch.tensor(3), torch.tensor(7)]],
    ids=["text", "tuples", "odd", "tensors"],
)
def test_indices_may_be_anything(keys: list[Any], workers: int) -> None:
    for options in ({"batch_size": 2, "collate_fn": as_list}, {"batch_size": None}):
        arguments = {"sampler": keys, **options}
        compare(0, Keyed(), arguments, {"num_workers": workers, **arguments})


class Uneven(Dataset[Any]):
    """Sizes, dtypes and structures that differ from batch to batch."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        group = index // 4
        if group == 1:
            return [torch.zeros(group, 70_000), "x"]
        if group == 3:
            return torch.full((200_000,), index, dtype=torch.float64)
        return {"a": torch.full((group * 400 + 1,), index), "b": {"c": index}}


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_batches_may_differ_from_each_other_in_structure_and_size(workers: int) -> None:
    compare(
        0,
        Uneven(),
        {"num_workers": 1, "batch_size": 4},
        {"num_workers": workers, "batch_size": 4, "memory": "4MB"},
    )


class Ragged(Dataset[Any]):
    """Samples that default_collate refuses, each in its own way."""

    bad: tuple[Make, ...] = (
        lambda i: torch.zeros(i + 1),
        lambda i: {"a": 1} if i % 2 else {"b": 1},
        lambda i: [1] * (i + 1),
        lambda i: None,
        lambda i: object(),
        lambda i: np.array(["a"]),
        lambda i: torch.zeros(2, requires_grad=True),
        lambda i: torch.zeros(2).to_sparse(),
        lambda i: (torch.zeros(2), "x")[i % 2],
        lambda i: torch.zeros(2, dtype=[torch.int32, torch.float64][i % 2]),
        lambda i: [np.zeros(2), np.zeros(3)][i % 2],
        lambda i: (1, torch.tensor(1))[i % 2],
    )

    def __len__(self) -> int:
        return 2 * len(self.bad)

    def __getitem__(self, index: int) -> Any:
        return self.bad[index // 2](index % 2)


def outcomes(cls: type[Torch], workers: int) -> list[Any]:
    """Each batch, or the type and last words of what was raised instead."""
    iterator = iter(cls(Ragged(), batch_size=2, num_workers=workers))
    found: list[Any] = []
    while True:
        try:
            found.append(next(iterator))
        except StopIteration:
            return found
        except Exception as error:  # noqa: BLE001 - whatever it is, ours must be the same
            name = type(error).__name__
            found.append((name, str(error).strip().splitlines()[-1].removeprefix(f"{name}: ")))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("workers", [1, 2])
def test_what_torch_refuses_to_collate_is_refused_in_the_same_words(workers: int) -> None:
    apart, here = outcomes(Torch, 1), outcomes(Torch, 0)
    assert sum(isinstance(outcome, tuple) for outcome in apart) >= 8
    for place, outcome in enumerate(outcomes(stoker.DataLoader, workers)):
        # torch itself says two things of a tensor beside something else: either will do.
        if isinstance(outcome, tuple) and outcome == here[place]:
            continue
        assert_same(outcome, apart[place], f"batch {place}")
