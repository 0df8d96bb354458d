"""A batch that went through a room arrives as torch's workers would have delivered it."""

from __future__ import annotations

import collections
import dataclasses
import gc
import io
import mmap
import multiprocessing
import pickle
import threading
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.parameter import Parameter

from stoker.loader import plain
from stoker.loader.codec import SMALL_BYTES, decode, encode
from stoker.loader.room import DTYPES, Room, address_of, tensor_over

PAGE = 4096


@pytest.fixture(autouse=True, params=["quick way", "general way"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain batches take a quick way through the codec: what holds for one holds for both."""
    if request.param == "general way":
        monkeypatch.setattr(plain, "describe", lambda *_: None)


class Lease(np.ndarray):  # type: ignore[type-arg]
    """What the trainer leases a batch's memory as."""


class Lonely(torch.Tensor):
    """A subclass without anything of its own."""


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Record:
    name: str
    value: Any


class Odd:
    """An ordinary object with a tensor inside and a say in how it is pickled."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return Odd, (self.value,)


def pages(nbytes: int) -> np.ndarray[Any, Any]:
    size = max(PAGE, (nbytes + PAGE - 1) // PAGE * PAGE)
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


class Ground:
    """A room, how often it grew, and the lease of what is in it."""

    def __init__(self, nbytes: int = 1 << 20) -> None:
        self.grown: list[int] = []
        memory = pages(nbytes) if nbytes else np.empty(0, np.uint8)
        self.room = Room(memory, self._grow)

    def _grow(self, nbytes: int) -> np.ndarray[Any, Any]:
        self.grown.append(nbytes)
        return pages(nbytes)

    def lease(self) -> np.ndarray[Any, Any]:
        return self.room.memory[: self.room.used].view(Lease)


def journey(batch: object, nbytes: int = 1 << 20) -> Any:
    ground = Ground(nbytes)
    skeleton = encode(batch, ground.room)
    assert type(skeleton) is bytes
    assert len(skeleton) < 32 * 1024
    assert len(ground.grown) <= 1
    return decode(skeleton, ground.lease())


def raw(tensor: torch.Tensor) -> bytes:
    """The elements as bytes, so that NaN equals NaN and float8 needs no comparison of its own."""
    if not tensor.numel():
        return b""
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload]
    start = tensor.storage_offset() * tensor.itemsize
    found: bytes = whole.numpy()[start : start + tensor.numel() * tensor.itemsize].tobytes()
    return found


def same(one: Any, other: Any) -> None:
    """Equal in type, structure, dtype, shape, strides, flags and bytes."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.layout) == (other.dtype, other.shape, other.layout)
        assert one.requires_grad == other.requires_grad
        assert (one.is_conj(), one.is_neg()) == (other.is_conj(), other.is_neg())
        if one.layout is torch.strided:
            assert one.stride() == other.stride()
            assert raw(one.resolve_conj().resolve_neg()) == raw(other.resolve_conj().resolve_neg())
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.flags.fnc) == (other.dtype, other.shape, other.flags.fnc)
        assert other.flags.writeable
        if one.dtype.hasobject:
            for a, b in zip(one.flat, other.flat, strict=True):
                same(a, b)
        else:
            assert one.tobytes() == other.tobytes()
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    elif isinstance(one, Record | Odd):
        same(vars(one), vars(other))
    else:
        assert one == other or (one != one and other != other)


# --- what a batch may hold ----------------------------------------------------------------------

# Hypothesis shows what failed, and torch can't print the others; they have a test of their own.
PRINTABLE = [
    dtype
    for dtype in DTYPES
    if not str(dtype)[6:].startswith(("bits", "float4", "float8_e8"))
    and not (
        str(dtype)[6:].lstrip("u").startswith("int")
        and str(dtype)[-1] in "1234567"
        and str(dtype)[-2:] not in ("16", "32", "64")
    )
]

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(PRINTABLE))
    shape = draw(shapes)
    if draw(st.integers(0, 9)) == 0:
        shape = (draw(st.integers(2000, 5000)), *shape)
    count = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(count).integers(0, 2, count + 64, dtype=np.uint8)
    tensor = tensor_over(data, 0, dtype, shape) if count else torch.empty(shape, dtype=dtype)
    form = draw(st.sampled_from(["plain", "transposed", "expanded", "sliced", "flat", "offset"]))
    if form == "transposed":
        tensor = tensor.permute(tuple(reversed(range(tensor.dim()))))
    elif form == "expanded":
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    elif form == "sliced" and tensor.dim():
        tensor = tensor[::2]
    elif form == "flat" and tensor.dim():
        tensor = tensor[..., :1]
    elif form == "offset" and tensor.dim() and tensor.shape[0]:
        tensor = tensor[1:]
    if dtype in (torch.float32, torch.complex64) and draw(st.booleans()):
        tensor = tensor.detach().requires_grad_()
    return tensor


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    name = draw(
        st.sampled_from(
            "? i1 <u2 >i4 u8 f2 f4 >f8 c16 M8[ns] m8[D] S5 U3 V7 O i4,f8 f16".split()  # noqa: SIM905
        )
    )
    shape = draw(shapes)
    if draw(st.integers(0, 9)) == 0:
        shape = (draw(st.integers(1000, 2000)), *shape)
    array = np.zeros(shape, name)
    if name != "O" and array.size:
        view = array.reshape(-1).view(np.uint8)
        view[:] = np.arange(view.size) % 2
    form = draw(st.sampled_from(["plain", "fortran", "sliced", "backwards", "read-only"]))
    if form == "fortran":
        array = np.asfortranarray(array)
    elif form == "sliced" and array.ndim:
        array = array[::2]
    elif form == "backwards" and array.ndim:
        array = array[::-1]
    elif form == "read-only":
        array.flags.writeable = False
    return array


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.binary(min_size=3000, max_size=3001).map(bytearray),
    st.sampled_from([np.float32(2.5), np.int64(3), torch.float16, torch.device("cpu"), Point, len]),
    tensors(),
    arrays(),
)
batches = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), inner, max_size=4),
        st.builds(Point, inner, inner),
        st.builds(Record, st.text(max_size=3), inner),
        st.builds(Odd, inner),
        st.lists(st.tuples(st.text(max_size=2), inner), max_size=3).map(collections.OrderedDict),
    ),
    max_leaves=8,
)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))
@given(batches, st.sampled_from([0, PAGE, 1 << 20]))
def test_any_batch_arrives_as_it_was(batch: Any, nbytes: int) -> None:
    arrived = journey(batch, nbytes)
    same(_as_sent(batch), arrived)


def _as_sent(batch: Any) -> Any:
    """The batch with the one documented change: wide views come contiguous."""
    if isinstance(batch, torch.Tensor):
        span = sum((n - 1) * s for n, s in zip(batch.shape, batch.stride(), strict=True)) + 1
        wide = batch.numel() and span > 4 * batch.numel()
        if wide and batch.stride() != batch.contiguous().stride():
            return (
                batch.detach()
                .clone(memory_format=torch.contiguous_format)
                .requires_grad_(batch.requires_grad)
            )
        return batch
    if isinstance(batch, dict):
        changed = {key: _as_sent(value) for key, value in batch.items()}
        return type(batch)(changed)
    if isinstance(batch, Point):
        return Point(*map(_as_sent, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(_as_sent, batch))
    if isinstance(batch, Record):
        return Record(batch.name, _as_sent(batch.value))
    if isinstance(batch, Odd):
        return Odd(_as_sent(batch.value))
    return batch


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives(dtype: torch.dtype) -> None:
    for count in (1, 100_000):
        data = np.arange(count * dtype.itemsize, dtype=np.uint8) % 2
        sent = tensor_over(data.copy(), 0, dtype, (count,))
        arrived = journey([sent])[0]
        same(sent, arrived)
        assert not arrived._is_view()


@pytest.mark.parametrize("size", [8, 64])
def test_memory_formats_are_kept(size: int) -> None:
    image = torch.randn(2, 3, size, size)
    for sent in (
        image.to(memory_format=torch.channels_last),
        image.transpose(1, 3),
        image.expand(2, 3, size, size),
        image[:1].expand(7, 3, size, size),
        torch.as_strided(image, (3, 4), (1, 2)),
        image[:, :, ::2],
    ):
        same(sent, journey(sent))


def test_only_the_bytes_a_row_spans_are_sent() -> None:
    ground = Ground()
    big = torch.zeros(64, 1 << 20)
    encode([big[3], big[40]], ground.room)
    assert ground.room.used == 0 or ground.room.used < 3 * big[3].nbytes


def test_rows_of_one_tensor_that_do_not_overlap_do_not_send_what_lies_between() -> None:
    ground = Ground(1 << 22)
    big = torch.randn(1000, 4096)
    encode([big[3], big[800]], ground.room)
    assert ground.grown == []
    assert ground.room.used < 4 * big[3].nbytes


def test_a_view_with_wide_gaps_arrives_contiguous() -> None:
    big = torch.randn(5000, 100)
    for sent in (big[:, :1], big[:50, :1]):
        arrived = journey([sent])[0]
        assert arrived.is_contiguous()
        assert torch.equal(arrived, sent)


@pytest.mark.parametrize("count", [10, 10_000])
def test_tensors_that_share_memory_share_it_on_arrival(count: int) -> None:
    base = torch.zeros(count, dtype=torch.int64)
    batch = [base, base[2:5], base.view(torch.int32)[1:], base[::2], base]
    arrived = journey(batch)
    assert arrived[4] is arrived[0]
    arrived[1][0] = 7
    assert arrived[0][2] == 7
    assert arrived[2][3] == 7
    assert arrived[3][1] == 7
    for sent, got in zip(batch, journey(batch), strict=True):
        same(sent, got)


def test_separate_tensors_stay_separate() -> None:
    one = torch.zeros(5000)
    arrived = journey([one, one.clone()])
    arrived[0].fill_(1)
    assert not arrived[1].any()


def test_a_non_leaf_that_requires_grad_is_refused_as_torch_does() -> None:
    tensor = torch.ones(3, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match="Cowardly refusing to serialize non-leaf tensor"):
        journey([tensor])


def test_parameters_stay_parameters() -> None:
    for count in (3, 30_000):
        arrived = journey(
            [Parameter(torch.ones(count)), Parameter(torch.ones(count), requires_grad=False)]
        )
        assert [type(p) for p in arrived] == [Parameter, Parameter]
        assert [p.requires_grad for p in arrived] == [True, False]


def test_conjugate_and_negative_views_keep_their_values() -> None:
    for count in (3, 30_000):
        z = torch.randn(count, dtype=torch.complex64)
        same(z.conj(), journey(z.conj()))
        same(z.conj().imag, journey(z.conj().imag))


def test_symbolic_zeros_are_refused_in_torchs_words() -> None:
    with pytest.raises(RuntimeError, match="ZeroTensor is not serializable"):
        journey([torch._efficientzerotensor(3)])


@pytest.mark.parametrize("count", [4, 300])
def test_subclasses_arrive_with_type_and_attributes(count: int) -> None:
    sent = torch.randn(count, count).as_subclass(Lonely)
    sent.note = "kept"  # type: ignore[attr-defined]
    arrived = journey({"x": sent})["x"]
    assert type(arrived) is Lonely
    assert arrived.note == "kept"
    assert torch.equal(arrived.as_subclass(torch.Tensor), sent.as_subclass(torch.Tensor))


@pytest.mark.filterwarnings("ignore:Sparse (invariant|CSR|CSC|BSR|BSC)")
@pytest.mark.parametrize("size", [4, 400])
def test_sparse_tensors_arrive(size: int) -> None:
    dense = torch.eye(size)
    for sent in (
        dense.to_sparse(),
        dense.to_sparse_csr(),
        dense.to_sparse_csc(),
        dense.to_sparse_bsr((2, 2)),
    ):
        arrived = journey([sent])[0]
        assert arrived.layout is sent.layout
        assert torch.equal(arrived.to_dense(), dense)
    assert journey(dense.to_sparse().coalesce()).is_coalesced()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("count", [4, 40_000])
def test_quantized_tensors_arrive(count: int) -> None:
    floats = torch.linspace(-1, 1, count).reshape(2, -1)
    per_tensor = torch.quantize_per_tensor(floats, 0.1, 3, torch.quint8)
    arrived = journey([per_tensor])[0]
    assert arrived.q_scale() == per_tensor.q_scale()
    assert torch.equal(arrived.int_repr(), per_tensor.int_repr())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("count", [2, 20_000])
def test_nested_tensors_arrive(count: int) -> None:
    parts = [torch.randn(count), torch.randn(count + 1)]
    arrived = journey(torch.nested.nested_tensor(parts))
    for one, other in zip(parts, arrived.unbind(), strict=True):
        assert torch.equal(one, other)
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    arrived = journey(jagged)
    assert type(arrived) is type(jagged)
    assert torch.equal(arrived.values(), jagged.values())


def test_meta_tensors_and_bare_storages_arrive() -> None:
    meta = journey(torch.empty(3, 4, device="meta", dtype=torch.int16))
    assert (meta.device.type, meta.shape, meta.dtype) == ("meta", (3, 4), torch.int16)
    tensor = torch.arange(10_000)
    arrived, storage = journey([tensor, tensor.untyped_storage()])
    assert storage.tolist() == tensor.untyped_storage().tolist()
    arrived[0] = 9
    assert storage[0] == 9
    assert journey(torch.empty(0).untyped_storage()).nbytes() == 0


@pytest.mark.parametrize("count", [3, 30_000])
def test_numpy_kinds_that_numpy_pickles_itself_arrive(count: int) -> None:
    masked = np.ma.masked_array(np.arange(count), mask=np.arange(count) % 2)
    arrived = journey(masked)
    assert type(arrived) is type(masked)
    assert (arrived == masked).all()
    assert (arrived.mask == masked.mask).all()
    records = np.rec.fromarrays([np.arange(count), np.ones(count)], names="a,b")
    assert (journey(records).a == records.a).all()
    objects = np.array([torch.ones(count), None], dtype=object)
    assert torch.equal(journey(objects)[0], objects[0])


def test_a_read_only_array_arrives_writable_and_owns_itself_if_small() -> None:
    for count in (3, 30_000):
        sent = np.arange(count)
        sent.flags.writeable = False
        arrived = journey(sent)
        arrived += 1
        assert arrived.flags.owndata == (count == 3)


def test_buffers_of_other_objects_go_through_the_room() -> None:
    ground = Ground()
    view = pickle.PickleBuffer(bytearray(b"x" * 100_000))
    skeleton = encode([view], ground.room)
    assert ground.room.used >= 100_000
    arrived = decode(skeleton, ground.lease())
    assert bytes(arrived[0]) == b"x" * 100_000  # type: ignore[index]


def test_what_multiprocessing_can_send_can_be_sent() -> None:
    method = journey({"m": [1, 2].append, "d": list.append})
    assert method["d"] is list.append
    lock = multiprocessing.get_context("spawn").Lock()
    with pytest.raises(RuntimeError, match="should only be shared between processes"):
        journey(lock)


def test_what_pickling_raises_comes_out_as_it_is() -> None:
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        journey([torch.ones(3), lambda: None])


def test_no_shared_memory_file_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **keywords: object) -> None:
        raise AssertionError("a shared memory file")

    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", refuse)
    monkeypatch.setattr(torch.UntypedStorage, "_share_filename_cpu_", refuse)
    journey([torch.randn(1000), torch.randn(10_000).as_subclass(Lonely), Parameter(torch.ones(9))])


def test_a_shared_tensor_is_copied_like_any_other() -> None:
    sent = torch.randn(10_000).share_memory_()
    same(sent, journey(sent))


# --- the room -----------------------------------------------------------------------------------


def test_what_was_collated_in_place_is_not_copied() -> None:
    ground = Ground()
    offset = ground.room.reserve(40_000)
    inside = tensor_over(ground.room.memory, offset, torch.float32, (100, 100))
    inside.copy_(torch.randn(100, 100))
    used = ground.room.used
    skeleton = encode([inside, inside[3]], ground.room)
    assert ground.room.used == used
    arrived: Any = decode(skeleton, ground.lease())
    assert arrived[0].data_ptr() == inside.data_ptr()
    assert arrived[1].data_ptr() == inside[3].data_ptr()
    assert len(skeleton) < 300


def test_what_was_in_place_before_the_room_grew_is_not_copied_again() -> None:
    ground = Ground(PAGE * 16)
    room = ground.room
    inside = tensor_over(room.memory, room.reserve(40_000), torch.float32, (100, 100))
    inside.copy_(torch.randn(100, 100))
    skeleton = encode([inside, torch.ones(100_000)], room)
    assert len(ground.grown) == 1
    assert room.used < 40_000 + 400_000 + 1000
    arrived: Any = decode(skeleton, ground.lease())
    assert torch.equal(arrived[0], inside)
    assert torch.equal(arrived[1], torch.ones(100_000))


def test_small_batches_never_ask_for_memory() -> None:
    ground = Ground(0)
    batch = [torch.arange(256), np.arange(100), torch.tensor(1.5)]
    arrived: Any = decode(encode(batch, ground.room), ground.lease())
    assert ground.grown == []
    for one, other in zip(batch, arrived, strict=True):
        same(one, other)


def test_a_large_pickle_goes_into_the_room() -> None:
    for batch in (
        ["x" * 20 + str(i) for i in range(10_000)],
        [torch.tensor([i]) for i in range(3_000)],
        [torch.full((3000,), i) for i in range(300)],
        {"s": "y" * 100_000, "t": torch.ones(100_000)},
    ):
        for nbytes in (0, 1 << 20):
            same(batch, journey(batch, nbytes))


def test_a_room_as_large_as_the_last_batch_is_large_enough() -> None:
    shared = torch.randn(9000)
    batch = [torch.ones(5000), torch.ones(7777), np.ones(3333), "x" * 40_000, shared, shared[1:]]
    first = Ground(0)
    encode(batch, first.room)
    second = Ground(first.room.used)
    encode(batch, second.room)
    assert second.grown == []


def test_tensors_in_the_room_are_aligned() -> None:
    parts = [torch.ones(n, dtype=torch.uint8) for n in (9_001, 10_003, 8_193)]
    for arrived in journey(parts):
        assert arrived.data_ptr() % 64 == 0


def test_a_room_hands_out_aligned_pieces_until_it_is_full() -> None:
    room = Ground(PAGE).room
    assert [room.take(1), room.take(64), room.take(65), room.take(0)] == [0, 64, 128, 256]
    assert room.take(PAGE) is None
    assert room.used == 256
    assert room.take(PAGE - 256) == 256
    assert room.take(1) is None
    assert room.used == PAGE


def test_a_room_that_grows_keeps_what_is_in_use_where_it_was() -> None:
    ground = Ground(PAGE)
    room = ground.room
    room.take(100)
    room.memory[:100] = 7
    room.ensure(PAGE)
    assert ground.grown == []
    room.ensure(PAGE + 1)
    assert ground.grown == [PAGE + 1]
    assert (room.memory[:100] == 7).all()
    assert room.used == 128
    assert room.address == address_of(room.memory)


def test_a_room_refuses_less_memory_than_it_asked_for() -> None:
    room = Room(np.empty(0, np.uint8), lambda n: pages(n)[: n - 1])
    with pytest.raises(ValueError, match="asked for a memory of 100 bytes, got 99"):
        room.ensure(100)


# --- the lease ----------------------------------------------------------------------------------


def arrive(batch: object) -> tuple[Any, list[str]]:
    """The batch, and a list that says when its lease has ended."""
    ground = Ground()
    skeleton = encode(batch, ground.room)
    lease = ground.lease()
    ended: list[str] = []
    weakref.finalize(lease, ended.append, "ended")
    return decode(skeleton, lease), ended


@pytest.mark.parametrize(
    "last",
    [
        lambda b: b["x"],
        lambda b: b["x"][3:5],
        lambda b: b["x"].numpy(),
        lambda b: b["x"].view(-1).numpy()[7:],
        lambda b: b["bf"],
        lambda b: b["bf"].untyped_storage(),
        lambda b: b["n"],
        lambda b: b["n"][2:].T,
        lambda b: b["f"],
        lambda b: b["p"].data,
        lambda b: memoryview(b["n"]),
        lambda b: b["c"],
        lambda b: b["s"].as_subclass(torch.Tensor)[1:],
        lambda b: torch.utils.dlpack.from_dlpack(b["x"]),
    ],
)
def test_the_lease_lasts_exactly_as_long_as_the_last_alias(last: Any) -> None:
    big = torch.randn(100, 100)
    batch, ended = arrive(
        {
            "x": big,
            "bf": big.clone().bfloat16(),
            "n": np.ones((100, 100)),
            "f": np.asfortranarray(np.ones((100, 90))),
            "p": Parameter(big.clone()),
            "c": torch.randn(9000, dtype=torch.complex64).conj(),
            "s": big.clone().as_subclass(Lonely),
            "label": torch.arange(64),
        }
    )
    kept = last(batch)
    assert ended == []
    del batch
    gc.collect()
    assert ended == []
    del kept
    assert ended == ["ended"]


def test_the_lease_ends_without_a_garbage_collection() -> None:
    gc.disable()
    try:
        batch, ended = arrive([torch.randn(10_000), np.ones(10_000)])
        del batch
        assert ended == ["ended"]
    finally:
        gc.enable()


def test_small_tensors_do_not_keep_the_lease() -> None:
    labels = []
    for step in range(3):
        batch, ended = arrive({"x": torch.randn(10_000), "label": torch.full((64,), step)})
        labels.append(batch["label"])
        del batch
        assert ended == ["ended"]
    assert [int(label[0]) for label in labels] == [0, 1, 2]


def test_a_batch_without_bulk_does_not_keep_the_lease() -> None:
    for batch in ("text", [torch.arange(SMALL_BYTES // 8)], ["long" * 10_000], [np.ones(3)]):
        arrived, ended = arrive(batch)
        assert ended == ["ended"]
        same(batch, arrived)


def test_encoding_lets_go_of_the_batch_at_once() -> None:
    gc.disable()
    try:
        tensor = torch.randn(10_000)
        gone: list[int] = []
        weakref.finalize(tensor, gone.append, 1)
        encode([tensor, np.ones(10_000)], Ground().room)
        del tensor
        assert gone == [1]
    finally:
        gc.enable()


def test_saving_one_tensor_does_not_write_the_whole_batch() -> None:
    arrived = journey({"x": torch.randn(50_000), "y": torch.randn(3_000)})
    for name, count in (("x", 50_000), ("y", 3_000)):
        file = io.BytesIO()
        torch.save(arrived[name], file)
        assert len(file.getvalue()) < count * 4 + 5_000


def test_batches_can_be_written_to() -> None:
    arrived = journey([torch.zeros(10_000), torch.zeros(3), np.zeros(10_000)])
    for part in arrived:
        part += 1
        assert part.sum() == part.size if isinstance(part, np.ndarray) else part.numel()


def test_decoding_works_in_many_threads_and_within_itself() -> None:
    ground = Ground()
    inner = encode([torch.full((5000,), 3)], ground.room)
    lease = ground.lease()

    outer_ground = Ground()
    outer = encode([Nested(inner), torch.full((5000,), 4)], outer_ground.room)
    outer_lease = outer_ground.lease()
    Nested.lease = lease
    wrong: list[object] = []

    def work() -> None:
        for _ in range(50):
            arrived: Any = decode(outer, outer_lease)
            if int(arrived[0].value[0][9]) != 3 or int(arrived[1][9]) != 4:
                wrong.append(arrived)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


class Nested:
    """Decodes another batch while it is unpickled."""

    lease: Any = None

    def __init__(self, skeleton: bytes) -> None:
        self.skeleton = skeleton
        self.value: Any = None

    def __reduce__(self) -> Any:
        return _unnest, (self.skeleton,)


def _unnest(skeleton: bytes) -> Nested:
    nested = Nested(skeleton)
    nested.value = decode(skeleton, Nested.lease)
    return nested


def test_arbitrary_objects_arrive() -> None:
    arrived = journey([Path("/a/b"), collections.Counter("aab"), range(3), {1, 2}, 1 + 2j])
    assert arrived == [Path("/a/b"), collections.Counter("aab"), range(3), {1, 2}, 1 + 2j]
    same(Odd([torch.ones(5000)]), journey(Odd([torch.ones(5000)])))
