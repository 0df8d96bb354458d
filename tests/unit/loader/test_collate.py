"""Collating in place gives what torch's worker processes give, without their shared memory."""

from __future__ import annotations

import gc
import mmap
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate, default_convert
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from stoker.loader import collate
from stoker.loader.codec import decode, encode
from stoker.loader.collate import Collator
from stoker.loader.room import Room

PAGE = 4096


class Lonely(torch.Tensor):
    pass


class Point(NamedTuple):
    x: Any
    y: Any


class Strict(NamedTuple("Strict", [("x", Any)])):
    """A named tuple whose constructor looks at what it is given."""

    __slots__ = ()

    def __new__(cls, x: Any) -> Strict:  # noqa: PYI034 - Self is not in Python 3.10
        assert isinstance(x, torch.Tensor)
        return super().__new__(cls, x)


def pages(nbytes: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(mmap.mmap(-1, max(PAGE, (nbytes + PAGE - 1) // PAGE * PAGE)), np.uint8)


def room_of(nbytes: int) -> Room:
    return Room(pages(nbytes) if nbytes else np.empty(0, np.uint8), pages)


@pytest.fixture
def in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch believes to be in one of its own workers."""
    monkeypatch.setattr(torch_worker, "_worker_info", object())


def by_torch(samples: Any) -> Any:
    """What a worker of torch makes of these samples: its result or its error."""
    before = torch_worker._worker_info
    torch_worker._worker_info = object()  # type: ignore[assignment]
    try:
        return default_collate(samples)
    finally:
        torch_worker._worker_info = before


def by_stoker(samples: Any, *, stream: bool = False, nbytes: int = 1 << 22, skip: int = 0) -> Any:
    collator = Collator(default_collate, batched=True)
    room = room_of(nbytes)
    with limits(0 if stream else 1 << 60):
        collator.begin(room, len(samples) + skip)
        for sample in samples:
            collator.add(sample)
        batch = collator.finish()
    return decode(encode(batch, room), room.memory[: room.used])


class limits:  # noqa: N801
    """Streams everything, or nothing."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __enter__(self) -> None:
        self.before = collate.STREAM_BYTES, collate._LEAF_BYTES
        collate.STREAM_BYTES = collate._LEAF_BYTES = self.nbytes

    def __exit__(self, *_: object) -> None:
        collate.STREAM_BYTES, collate._LEAF_BYTES = self.before


def same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert one.requires_grad == other.requires_grad
        assert torch.equal(one, other)
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tolist() == other.tolist()
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    else:
        assert one == other


def outcome(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
        return type(error), str(error)


# --- generated samples --------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]
DTYPES += [torch.bfloat16, torch.float16]
NAMES = ["f4", "f8", "i8", "i2", "u1", "?", "c8", ">f4", "U3", "O", "u2"]


@st.composite
def makers(draw: st.DrawFn) -> Callable[[int], Any]:
    """One leaf, as a function of the sample's number."""
    kind = draw(st.sampled_from(["tensor", "array", "int", "float", "bool", "str", "np", "none"]))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    if draw(st.integers(0, 3)) == 0:
        shape = (draw(st.integers(1, 3)) * 1000, *shape)
    if kind == "tensor":
        dtype = draw(st.sampled_from(DTYPES))
        turned = draw(st.booleans())

        def tensor(i: int) -> torch.Tensor:
            made = (torch.arange(int(np.prod(shape))) + i).reshape(shape).to(dtype)
            return made.permute(tuple(reversed(range(made.dim())))) if turned else made

        return tensor
    if kind == "array":
        name = draw(st.sampled_from(NAMES))
        order: Any = draw(st.sampled_from(["C", "F"]))
        return lambda i: (np.arange(int(np.prod(shape))) + i).reshape(shape).astype(name, order)
    return {
        "int": lambda i: i,
        "float": lambda i: i / 3,
        "bool": lambda i: i % 2 == 0,
        "str": str,
        "np": lambda i: np.float32(i),
        "none": lambda i: None,
    }[kind]


structures = st.recursive(
    makers(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda fs: lambda i: [f(i) for f in fs]),
        st.lists(inner, max_size=3).map(lambda fs: lambda i: tuple(f(i) for f in fs)),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(
            lambda fs: lambda i: {k: f(i) for k, f in fs.items()}
        ),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(
            lambda fs: lambda i: OrderedDict((k, f(i)) for k, f in fs.items())
        ),
        st.tuples(inner, inner).map(lambda fs: lambda i: Point(fs[0](i), fs[1](i))),
    ),
    max_leaves=5,
)


# torch warns of it once in a process, so the second of two equal calls would not.
@pytest.mark.filterwarnings("ignore:Creating a tensor from a list of numpy.ndarrays")
@settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))
@given(structures, st.integers(1, 4), st.booleans(), st.sampled_from([0, 1 << 22]))
def test_any_samples_give_what_torch_gives(
    make: Callable[[int], Any], count: int, stream: bool, nbytes: int
) -> None:
    samples = [make(i) for i in range(count)]
    same(
        outcome(lambda: by_torch(samples)),
        outcome(lambda: by_stoker(samples, stream=stream, nbytes=nbytes)),
    )


# torch warns of it once in a process, so the second of two equal calls would not.
@pytest.mark.filterwarnings("ignore:Creating a tensor from a list of numpy.ndarrays")
@settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))
@given(structures, structures, st.integers(1, 3), st.integers(1, 2))
def test_mixed_samples_give_the_same_streamed_or_gathered(
    make: Callable[[int], Any], other: Callable[[int], Any], count: int, odd: int
) -> None:
    samples = [make(i) for i in range(count)] + [other(i) for i in range(odd)] + [make(9)]
    same(
        outcome(lambda: by_stoker(samples, stream=False)),
        outcome(lambda: by_stoker(samples, stream=True)),
    )


# --- particular samples -------------------------------------------------------------------------

T = torch.ones
BIG = 50_000


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "samples",
    [
        [T(3), T(4)],
        [T(BIG), T(BIG + 1)],
        [T(3, 4), T(3, 5)],
        [T(3), T(3).double()],
        [T(3).double(), T(3)],
        [T(3).long(), T(3)],
        [T(BIG).bfloat16(), T(BIG)],
        [T(3, requires_grad=True), T(3, requires_grad=True)],
        [T(3).as_subclass(Lonely), T(3).as_subclass(Lonely)],
        [T(BIG), T(BIG).as_subclass(Lonely)],
        [np.ones(3), T(3).double()],
        [np.ones(3), np.ones(4)],
        [np.ones(BIG), np.ones(BIG, "f4")],
        [np.ones(BIG)[::-1], np.ones(BIG)[::-1]],
        [np.ones(BIG), np.ones(BIG)[::-1]],
        [np.ones(BIG, ">f4"), np.ones(BIG, ">f4")],
        [np.ones(3, object), np.ones(3, object)],
        [np.float64(1), np.float64(2)],
        [np.str_("a"), np.str_("b")],
        [1, 2.5],
        [1.5, 2],
        [True, 2],
        [1, True],
        [2**70, 1],
        [2**63, 1],
        [1, "a"],
        [None, None],
        [b"x", b"y"],
        ["x", "yy"],
        [object, object],
        [{"a": T(3)}, {"b": T(3)}],
        [{"a": T(BIG)}, {"a": T(BIG), "b": 1}],
        [{"a": T(BIG), "b": 1}, {"b": 2, "a": T(BIG)}],
        [(T(3), 1), (T(3),)],
        [(T(BIG), 1), (T(BIG), 1, 2)],
        [[T(BIG), 1], (T(BIG), 1)],
        [Point(T(BIG), 1), Point(T(BIG), 2)],
        [Strict(T(BIG)), Strict(T(BIG))],
        [defaultdict(int, a=T(BIG)), defaultdict(int, a=T(BIG))],
        [range(3), range(3)],
        [T(0), T(0)],
        [torch.tensor(1.5), torch.tensor(2.5)],
        [T(30, 20, 10).permute(2, 0, 1)] * 3,
        [T(3, 100, 100).to(memory_format=torch.contiguous_format)] * 2,
        [T(1, 3, 64, 64).to(memory_format=torch.channels_last)] * 3,
        [T(1).expand(BIG)] * 2,
        [{"a": [(T(BIG), {"b": np.ones(BIG)})], "c": "text"}] * 3,
        [T(BIG)],
        [torch.empty(3, device="meta")] * 2,
    ],
    ids=lambda samples: "samples",
)
def test_these_samples_give_what_torch_gives(samples: list[Any], stream: bool) -> None:
    expected = outcome(lambda: by_torch(samples))
    found = outcome(lambda: by_stoker(samples, stream=stream))
    if isinstance(expected, torch.Tensor) and expected.is_meta:
        assert found.is_meta
        assert found.shape == expected.shape
        return
    same(expected, found)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_nested_and_sparse_samples_are_refused_as_torch_does() -> None:
    for sample in (torch.nested.nested_tensor([T(2), T(3)]), torch.eye(3).to_sparse()):
        expected = outcome(lambda sample=sample: by_torch([sample, sample]))  # type: ignore[misc]
        assert expected[0] is RuntimeError
        assert expected == outcome(lambda sample=sample: by_stoker([sample, sample]))  # type: ignore[misc]


@pytest.mark.parametrize("stream", [False, True])
def test_unequal_sizes_say_so_even_where_torchs_workers_speak_of_their_storage(
    stream: bool,
) -> None:
    samples = [T(BIG + 1), T(BIG)]
    message = r"stack expects each tensor to be equal size, but got \[50001\] at entry 0 and"
    with pytest.raises(RuntimeError, match=message):
        default_collate(samples)
    with pytest.raises(RuntimeError, match=message):
        by_stoker(samples, stream=stream)
    with pytest.raises(TypeError, match="expected Tensor as element 1 in argument 0, but got"):
        by_stoker([T(BIG), np.ones(BIG)], stream=stream)


@pytest.mark.parametrize("stream", [False, True])
def test_conjugate_samples_work_as_in_torchs_main_process(stream: bool) -> None:
    z = torch.randn(BIG, dtype=torch.complex64)
    same(default_collate([z.conj(), z]), by_stoker([z.conj(), z], stream=stream))


# --- where the result lies ----------------------------------------------------------------------


def collated(samples: list[Any], room: Room, expected: int | None = None) -> Any:
    collator = Collator(default_collate, batched=True)
    collator.begin(room, len(samples) if expected is None else expected)
    for sample in samples:
        collator.add(sample)
    return collator.finish()


def inside(tensor: torch.Tensor, room: Room) -> bool:
    return room.locate(tensor.data_ptr(), tensor.nbytes) is not None


@pytest.mark.parametrize("size", [1_000, 100_000])
def test_a_batch_is_made_inside_the_room(size: int) -> None:
    room = room_of(1 << 23)
    batch = collated([(torch.full((size,), float(i)), np.ones(size), i) for i in range(8)], room)
    assert inside(batch[0], room)
    assert inside(batch[1], room)
    used = room.used
    encode(batch, room)
    assert room.used == used


def test_small_results_stay_out_of_the_room() -> None:
    room = room_of(PAGE)
    batch = collated([(T(3), i) for i in range(8)], room)
    assert room.used == 0
    assert not inside(batch[0], room)


def test_a_large_sample_is_copied_as_it_comes_and_not_kept() -> None:
    room = room_of(0)
    collator = Collator(default_collate, batched=True)
    collator.begin(room, 4)
    for i in range(4):
        sample = {"x": torch.full((100_000,), float(i)), "n": np.full(100_000, i), "i": i}
        gone: list[str] = []
        weakref.finalize(sample["x"], gone.append, "x")
        weakref.finalize(sample["n"], gone.append, "n")
        collator.add(sample)
        assert list(sample) == ["x", "n", "i"]
        assert type(sample["x"]) is torch.Tensor
        del sample
        assert sorted(gone) == ["n", "x"]
    batch: Any = collator.finish()
    assert inside(batch["x"], room)
    assert batch["x"][:, 0].tolist() == [0, 1, 2, 3]
    assert batch["n"][:, -1].tolist() == [0, 1, 2, 3]
    assert batch["i"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [1_000, 100_000])
def test_a_room_as_large_as_the_last_batch_is_large_enough(size: int) -> None:
    samples = [(torch.ones(size), np.ones(size), i) for i in range(9)]
    first = room_of(0)
    encode(collated(samples, first), first)
    second = Room(pages(first.used), lambda n: pytest.fail("the room grew"))
    encode(collated(samples, second), second)


def test_a_sample_mapped_from_a_file_is_streamed(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(3, 100_000))
    mapped[:] = np.arange(3)[:, None]
    room = room_of(1 << 22)
    batch = collated([mapped[i] for i in range(3)], room)
    assert type(batch) is torch.Tensor
    assert inside(batch, room)
    assert batch[:, 5].tolist() == [0, 1, 2]


def test_a_short_batch_gives_back_the_end_of_its_slab() -> None:
    room = room_of(1 << 23)
    batch = collated([T(100_000), T(100_000)], room, expected=10)
    assert batch.shape == (2, 100_000)
    assert room.used < 900_000


def test_more_samples_than_expected_are_collated_all_the_same() -> None:
    batch = collated([torch.full((100_000,), float(i)) for i in range(5)], room_of(0), expected=3)
    assert batch[:, 7].tolist() == [0, 1, 2, 3, 4]


def test_a_room_that_grows_in_between_loses_nothing() -> None:
    room = room_of(0)
    collator = Collator(default_collate, batched=True)
    collator.begin(room, 3)
    for i in range(3):
        collator.add((torch.full((100_000,), float(i)), torch.full((5_000,), i)))
        room.ensure(room.memory.size + 1)
    batch = collator.finish()
    arrived: Any = decode(encode(batch, room), room.memory[: room.used])
    assert arrived[0][:, 3].tolist() == [0, 1, 2]
    assert arrived[1][:, 3].tolist() == [0, 1, 2]


def test_an_error_leaves_the_collator_ready_for_the_next_batch() -> None:
    collator = Collator(default_collate, batched=True)
    for bad in ([T(100_000), T(100_001)], [T(3), T(4)], [None]):
        collator.begin(room_of(0), 2)
        for sample in bad:
            collator.add(sample)
        with pytest.raises((RuntimeError, TypeError)):
            collator.finish()
    collator.begin(room_of(0), 2)
    collator.add(T(3))
    collator.begin(room_of(0), 1)
    collator.add(T(4))
    assert collator.finish().shape == (1, 4)  # type: ignore[attr-defined]


def test_a_finished_batch_is_not_kept() -> None:
    gc.disable()
    try:
        collator = Collator(list, batched=True)
        collator.begin(room_of(0), 1)
        sample = T(10)
        gone: list[int] = []
        weakref.finalize(sample, gone.append, 1)
        collator.add(sample)
        batch = collator.finish()
        del sample, batch
        assert gone == [1]
    finally:
        gc.enable()


# --- other collate functions --------------------------------------------------------------------


def test_a_collate_function_of_the_users_gets_the_samples_themselves() -> None:
    samples = [T(100_000), T(100_000)]
    seen: list[Any] = []
    collator = Collator(seen.append, batched=True)
    collator.begin(room_of(0), 2)
    for sample in samples:
        collator.add(sample)
    assert collator.finish() is None
    assert seen[0][0] is samples[0]
    assert type(seen[0]) is list


def test_without_batches_the_sample_is_converted() -> None:
    collator = Collator(default_convert, batched=False)
    batch: Any = collator.collate_all({"a": np.arange(3), "b": (1, "x")}, room_of(0))
    same(batch, {"a": torch.arange(3), "b": [1, "x"]})


def test_samples_that_come_all_at_once_are_collated_in_place() -> None:
    room = room_of(1 << 22)
    batch: Any = Collator(default_collate, batched=True).collate_all([T(10_000)] * 3, room)
    assert inside(batch, room)


class Special:
    pass


@pytest.fixture
def registry() -> Iterator[dict[Any, Any]]:
    before = dict(torch_collate.default_collate_fn_map)
    yield torch_collate.default_collate_fn_map
    torch_collate.default_collate_fn_map.clear()
    torch_collate.default_collate_fn_map.update(before)


def test_what_the_user_registered_is_used(registry: dict[Any, Any]) -> None:
    registry[Special] = lambda batch, *, collate_fn_map: "special"
    registry[int] = lambda batch, *, collate_fn_map: "ints"
    room = room_of(1 << 22)
    batch = collated([(Special(), T(100_000), 1)] * 2, room)
    assert batch[0] == "special"
    assert batch[2] == "ints"
    assert inside(batch[1], room)


def test_a_function_for_tensors_of_the_users_replaces_ours(registry: dict[Any, Any]) -> None:
    registry[torch.Tensor] = lambda batch, *, collate_fn_map: torch.cat(list(batch))
    assert collated([T(100_000)] * 2, room_of(0)).shape == (200_000,)


def test_no_shared_memory_is_made_in_a_worker(
    in_a_worker: None, monkeypatch: pytest.MonkeyPatch, registry: dict[Any, Any]
) -> None:
    def refuse(*args: object, **keywords: object) -> None:
        raise AssertionError("a shared memory file")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", refuse)
    shipped = dict(registry)
    room = room_of(0)
    samples = [(T(BIG), T(3).as_subclass(Lonely), np.ones(4)) for _ in range(2)]
    collated(samples, room)

    def of_the_users(samples: Any) -> Any:
        return {"inner": default_collate(samples)}

    for failing in (False, True):
        collator = Collator(of_the_users, batched=True)
        collator.begin(room, 2)
        for sample in samples:
            collator.add(sample)
        if failing:
            collator.add(None)
            with pytest.raises(TypeError):
                collator.finish()
        else:
            batch: Any = collator.finish()
            assert batch["inner"][0].shape == (2, BIG)
            assert not inside(batch["inner"][0], room)
        assert list(registry.items()) == list(shipped.items())


def test_torch_ships_what_we_take_for_its_registry() -> None:
    assert torch_collate.default_collate_fn_map == collate._SHIPPED
