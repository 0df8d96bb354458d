"""A batch as bytes in a room plus a small skeleton, and back as views of those bytes.

`encode` runs in the worker: tensors, arrays and large buffers go into the room (or are there
already), everything else into a pickle that says where they are. `decode` runs in the trainer and
lays tensors over the leased memory without copying. Both follow what torch's DataLoader delivers
from its workers, without its shared memory files.

What is deliberately not torch's:

- Only the bytes a plain tensor spans are sent, not its whole storage: `storage_offset()` is 0 on
  arrival. Tensors whose bytes overlap in the worker overlap in the trainer; each has a storage
  object of its own.
- A lone tensor whose span is more than four times its elements arrives contiguous.
- What is small arrives as private memory, so that keeping every batch's labels does not keep
  every batch.
- Conjugate and negative views arrive with the right values (torch's reduction drops the bit), and
  quantized tensors arrive at all.
- A tensor that already lies in shared memory is copied like any other.

This module does not collate, grant memory, or decide when a lease ends.
"""

import ctypes
import io
import marshal
import pickle
from collections.abc import Callable
from functools import lru_cache
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch.multiprocessing import reductions
from torch.nn.parameter import Parameter
from torch.utils.hooks import warn_if_has_hooks

from stoker.loader import plain
from stoker.loader.room import (
    ALIGNMENT,
    CODE_OF,
    DTYPES,
    Memory,
    Room,
    address_of,
    aligned,
    dense_stride,
    span_bytes,
    tensor_over,
)

# Up to here a piece is copied out of the lease on arrival (3 us for 8 KB, 2 us for a view).
SMALL_BYTES = 8192
# Small pieces travel in the skeleton itself up to this many bytes together.
_INLINE_BYTES = 128
# The skeleton is one datagram of less than 32 KB; a longer one goes into the room.
_SKELETON_BYTES = 16 * 1024
# A strided view with wider gaps than this is sent contiguous.
_WIDEST_SPAN = 4
# A buffer of an object that is no ndarray is sent out of band from this size on.
_BUFFER_BYTES = 2048

# What one entry takes in the skeleton, roughly.
_ENTRY_BYTES = 100

# One element of the batch that is not in the pickle, as `_Layout.place` writes and `_build` reads.
_Entry: TypeAlias = tuple[Any, ...]
_Reduced: TypeAlias = str | tuple[Any, ...]

_TENSOR, _PARAMETER, _ARRAY, _STORAGE, _BUFFER = range(5)
# Pickling never makes two arrays share memory again.
_NEVER_SHARED = frozenset({_ARRAY, _BUFFER})
# Instead of an address: no run of bytes, to be copied element by element.
_STRIDED = -1
_INLINE, _IN_ROOM, _PLAIN = b"I", b"R", b"P"

# Each out-of-band element stands in the pickle as one "next buffer" opcode: the unpickler then
# takes whatever object comes next, and a tensor will do as well as a buffer.
_MARK = pickle.PickleBuffer(bytearray(1))


def encode(batch: object, room: Room) -> bytes:
    """Put `batch` into `room` and return the skeleton from which `decode` rebuilds it.

    The bulk lies in `room.memory[:room.used]`. The room is grown at most once. Whatever pickling
    raises comes out as it is.
    """
    tree = plain.describe(batch, room, SMALL_BYTES)
    if tree is not None:
        payload = marshal.dumps(tree, 2)
        if len(payload) <= _SKELETON_BYTES:
            return _PLAIN + payload
    stream = io.BytesIO()
    items: list[_Item] = []
    _Pickler(stream, items).dump(batch)
    pickled = stream.getvalue()
    layout = _Layout(room)
    entries = layout.place(items, len(pickled))
    # Version 2 has no references between equal objects: nothing here is worth looking for them.
    payload = marshal.dumps((entries, layout.private, layout.blob, layout.blob_at, pickled), 2)
    if len(payload) <= _SKELETON_BYTES:
        return _INLINE + payload
    offset = room.reserve(len(payload))
    ctypes.memmove(room.address + offset, payload, len(payload))
    return _IN_ROOM + marshal.dumps((offset, len(payload)))


def decode(skeleton: bytes | memoryview, lease: Memory) -> object:
    """Rebuild the batch; what is laid over `lease` keeps that very object alive, nothing else does.

    May be called from several threads, and from within itself.
    """
    if type(lease.base) is np.ndarray:
        lease = lease.view(_Anchor)
    memory = memoryview(lease)  # type: ignore[arg-type]
    body = memoryview(skeleton)
    if skeleton[0] == _PLAIN[0]:
        return plain.rebuild(marshal.loads(body[1:]), memory)
    if body[:1] == _IN_ROOM:
        offset, nbytes = marshal.loads(body[1:])
        entries, private, blob, blob_at, stream = marshal.loads(memory[offset : offset + nbytes])
    else:
        entries, private, blob, blob_at, stream = marshal.loads(body[1:])
    if not entries:
        return pickle.loads(stream)
    source = memory if blob_at is not None else memoryview(blob)
    start = blob_at or 0
    # bytearray, not bytes: what is built over it must be writable.
    pieces = [bytearray(source[start + at : start + at + size]) for at, size in private]
    return pickle.loads(stream, buffers=[_build(entry, memory, pieces) for entry in entries])


class _Anchor(np.ndarray[Any, Any]):
    """Goes between a lease that is a view of an array and what is laid over it.

    Numpy would look through the lease and keep the innermost array instead; it does not look
    through a type that differs from the view's own.
    """


def _same(element: object) -> object:
    """Stands in a pickle before an element that comes from outside of it."""
    return element


# --- worker side --------------------------------------------------------------------------------


class _Item:
    """One out-of-band element before it has a place.

    `address` and `nbytes` are the range of memory to send; `owner` keeps it alive until then.
    It ends up at `offset` of the lease, or of a private `piece` if that is not -1. The `stride` of
    a tensor is None if it is the ordinary one; of an array it says whether its order is Fortran's.
    """

    __slots__ = (
        "address",
        "dtype",
        "kind",
        "nbytes",
        "offset",
        "owner",
        "piece",
        "requires_grad",
        "shape",
        "stride",
    )

    def __init__(self, kind: int, owner: Any, address: int, nbytes: int) -> None:
        self.kind = kind
        self.owner = owner
        self.address = address
        self.nbytes = nbytes
        self.dtype: Any = None
        self.shape: tuple[int, ...] = ()
        self.stride: Any = None
        self.requires_grad = False
        self.piece = -1
        self.offset = 0


class _Pickler(pickle.Pickler):
    """Pickles a batch as torch's worker would, but collects bulk in `items`.

    `reducer_override` is not called for exact str, int, list, dict and the like, so it costs
    nothing where there is nothing to do.
    """

    def __init__(self, stream: io.BytesIO, items: list[_Item]) -> None:
        # Not a bound method: a cycle would keep the batch until the next garbage collection.
        super().__init__(stream, 5, buffer_callback=_Buffers(items))
        self.items = items

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.Tensor or kind is Parameter:
            return self._tensor(obj, _TENSOR if kind is torch.Tensor else _PARAMETER)
        if kind is np.ndarray:
            return self._array(obj)
        if kind is torch.UntypedStorage and obj.device.type == "cpu":
            return self._slot(_Item(_STORAGE, obj, obj.data_ptr(), obj.nbytes()))
        if kind is torch.storage.TypedStorage:
            return _reduce_typed_storage(obj)
        # Queues, sockets, CUDA events, methods: whatever torch could send. Storages of a legacy
        # type are here as well and come apart into the untyped one above.
        reduce = _extra_reducers().get(kind)
        return NotImplemented if reduce is None else reduce(obj)

    def _tensor(self, tensor: torch.Tensor, kind: int) -> Any:
        dtype = tensor.dtype
        code = CODE_OF.get(dtype)
        requires_grad = tensor.requires_grad
        if (
            not tensor.is_cpu
            or tensor.layout is not torch.strided
            or tensor.is_nested
            or (requires_grad and not tensor.is_leaf)
        ):
            # Shares a handle, comes apart into plain tensors, or refuses: as torch does.
            return _reduce_tensor(tensor)
        if code is None or tensor.is_neg() or tensor.is_conj():
            # torch's reduction would lose the quantizer or the bit; pickling keeps them.
            return _reduce_whole(tensor)
        if requires_grad:
            warn_if_has_hooks(tensor)
        shape = tuple(tensor.shape)
        nbytes = tensor.numel() * dtype.itemsize
        stride: tuple[int, ...] | None = None
        # Where no size is 1 or 0 there is but one way to be contiguous: the common, quick case.
        if 1 in shape or not nbytes or not tensor.is_contiguous():
            stride = tensor.stride()
            if not nbytes:
                pass
            elif stride == dense_stride(shape):
                stride = None
            else:
                nbytes = span_bytes(shape, stride, dtype.itemsize)
        address = tensor.data_ptr()
        if nbytes and not address:
            return _reduce_whole(tensor)  # torch's symbolic zeros
        item = _Item(kind, tensor, address, nbytes)
        item.dtype = code
        item.shape = shape
        item.stride = stride
        item.requires_grad = requires_grad
        return self._slot(item)

    def _array(self, array: np.ndarray[Any, Any]) -> Any:
        dtype = array.dtype
        if dtype.hasobject or dtype.kind not in "biufcmMSUV" or not dtype.itemsize:
            # Protocol 4, as torch has it: the array arrives writable even if it was not.
            return array.__reduce_ex__(4)
        fortran = array.flags.fnc
        if not (fortran or array.flags.c_contiguous):
            array = np.ascontiguousarray(array)
        item = _Item(_ARRAY, array, address_of(array), array.nbytes)
        item.dtype = _dtype_name(dtype)
        item.shape = array.shape
        item.stride = fortran
        return self._slot(item)

    def _slot(self, item: _Item) -> _Reduced:
        self.items.append(item)
        return _same, (_MARK,)


class _Buffers:
    """Asked about each buffer of the pickle; true keeps it there."""

    __slots__ = ("items",)

    def __init__(self, items: list[_Item]) -> None:
        self.items = items

    def __call__(self, buffer: pickle.PickleBuffer) -> bool:
        if buffer is _MARK:
            return False
        raw = buffer.raw()
        if raw.nbytes < _BUFFER_BYTES:
            return True
        owner = np.frombuffer(raw, np.uint8)
        self.items.append(_Item(_BUFFER, owner, address_of(owner), raw.nbytes))
        return False


# torch leaves these untyped.
_reduce_tensor: Callable[[torch.Tensor], _Reduced] = reductions.reduce_tensor
_reduce_typed_storage: Callable[[object], _Reduced] = reductions.reduce_typed_storage


def _reduce_whole(tensor: Any) -> Any:
    return tensor.__reduce_ex__(2)


def _extra_reducers() -> dict[type, Callable[[Any], _Reduced]]:
    reducers: dict[type, Callable[[Any], _Reduced]] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    return reducers


@lru_cache(maxsize=256)
def _dtype_name(dtype: np.dtype[Any]) -> str | bytes:
    """The dtype's short name if that says everything, its pickle otherwise."""
    if dtype.fields is None and dtype.metadata is None and np.dtype(dtype.str) is dtype:
        return dtype.str
    return pickle.dumps(dtype)


class _Layout:
    """Finds a place for every item, copies it there, and writes the entries of the skeleton."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.private: list[tuple[int, int]] = []
        self.blob = bytearray()
        self.blob_at: int | None = None
        self._moves: list[tuple[list[_Item], int, int]] = []

    def place(self, items: list[_Item], stream_bytes: int) -> list[_Entry]:
        room = self.room
        total = 0
        for group in _overlapping(items):
            total += self._sort_out(group)
        if total:
            room.used = aligned(room.used)
            if room.used + total > room.memory.size:
                # Growing is a round trip: foresee what else will go into the room. Only then,
                # since asking for more than is used would make every batch grow its room.
                foreseen = stream_bytes + len(self.blob) + len(items) * _ENTRY_BYTES
                room.ensure(room.used + total + foreseen)
        for group, start, nbytes in self._moves:
            self._move(group, start, nbytes)
        if len(self.blob) > _INLINE_BYTES:
            self.blob_at = room.take(len(self.blob))
            if self.blob_at is not None:
                at = self.blob_at
                room.memory[at : at + len(self.blob)] = np.frombuffer(self.blob, np.uint8)
                self.blob = bytearray()
        return [
            (i.kind, i.dtype, i.shape, i.stride, i.requires_grad, i.piece, i.offset, i.nbytes)
            for i in items
        ]

    def _sort_out(self, group: list[_Item]) -> int:
        """Decide how a group of overlapping items travels; how much of the room it will take."""
        first = group[0]
        start = first.address
        if len(group) == 1:
            nbytes = first.nbytes
            if first.kind <= _PARAMETER and first.stride is not None:
                dense = first.owner.numel() * first.owner.itemsize
                if nbytes > _WIDEST_SPAN * dense:
                    first.owner = first.owner.detach()
                    first.nbytes = nbytes = dense
                    first.stride = None
                    if nbytes <= SMALL_BYTES:
                        first.owner = first.owner.contiguous()
                        first.address = start = first.owner.data_ptr()
                    else:
                        first.address = _STRIDED
                        self._moves.append((group, start, nbytes))
                        return aligned(nbytes)
        else:
            nbytes = max(item.address + item.nbytes for item in group) - start
        inside = self.room.locate(start, nbytes)
        if inside is not None:
            for item in group:
                item.offset = inside + item.address - start
            return 0
        if nbytes > SMALL_BYTES:
            self._moves.append((group, start, nbytes))
            return aligned(_phase(group) + nbytes)
        phase = _phase(group)
        piece = len(self.private)
        at = len(self.blob)
        self.blob += bytes(phase) + ctypes.string_at(start, nbytes)
        self.private.append((at, phase + nbytes))
        for item in group:
            item.piece = piece
            item.offset = phase + item.address - start
        return 0

    def _move(self, group: list[_Item], start: int, nbytes: int) -> None:
        room = self.room
        first = group[0]
        if first.address == _STRIDED:
            first.offset = room.reserve(nbytes)
            dtype = first.owner.dtype
            tensor_over(room.memory, first.offset, dtype, first.shape).copy_(first.owner)
            return
        phase = _phase(group)
        offset = room.reserve(phase + nbytes) + phase
        ctypes.memmove(room.address + offset, start, nbytes)
        for item in group:
            item.offset = offset + item.address - start


def _phase(group: list[_Item]) -> int:
    """How far past an aligned place a group must start to keep each member's own alignment."""
    return group[0].address % ALIGNMENT if len(group) > 1 else 0


def _overlapping(items: list[_Item]) -> list[list[_Item]]:
    """Groups of items whose bytes overlap. Rows of one large tensor that do not are apart."""
    groups: list[list[_Item]] = []
    rest: list[_Item] = []
    for item in items:
        if not item.nbytes:
            continue
        if item.kind in _NEVER_SHARED:
            groups.append([item])
        else:
            rest.append(item)
    if len(rest) > 1:
        rest.sort(key=_address)
    end = 0
    for item in rest:
        if item.address < end:
            groups[-1].append(item)
        else:
            groups.append([item])
        end = max(end, item.address + item.nbytes)
    return groups


def _address(item: _Item) -> int:
    return item.address


# --- trainer side -------------------------------------------------------------------------------


def _build(entry: _Entry, lease: memoryview, pieces: list[bytearray]) -> object:
    kind, dtype, shape, stride, requires_grad, piece, offset, nbytes = entry
    memory = lease if piece < 0 else pieces[piece]
    if kind <= _PARAMETER:
        if nbytes:
            tensor = tensor_over(memory, offset, DTYPES[dtype], shape, stride)
        else:
            tensor = torch.empty_strided(shape, stride, dtype=DTYPES[dtype], device="cpu")
        if kind == _PARAMETER:
            return Parameter(tensor, requires_grad)
        if requires_grad:
            tensor.requires_grad_()
        return tensor
    if kind == _ARRAY:
        named = np.dtype(dtype) if type(dtype) is str else pickle.loads(dtype)
        order: Literal["F", "C"] = "F" if stride else "C"
        if not nbytes:
            return np.empty(shape, named, order)
        array = np.ndarray(shape, named, memory, offset, order=order)
        # A small one owns its memory, as it would after unpickling.
        return array if piece < 0 else array.copy("K")
    if kind == _STORAGE:
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()
        return tensor_over(memory, offset, torch.uint8, (nbytes,)).untyped_storage()
    return np.ndarray((nbytes,), np.uint8, memory, offset)
