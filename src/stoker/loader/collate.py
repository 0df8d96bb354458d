"""Turns samples into a batch, inside the room where that is possible.

In place is possible where the collate function *is* torch's `default_collate` and torch's own
function for tensors is still registered: torch's `collate` then runs as it is, with a function for
tensors that stacks into the room. If the samples are large they are not even gathered: `add` copies
each one's large leaves into its row of a slab while they are hot in cache, so that a worker holds
one sample, not a batch of them.

Results, types and errors are those of torch's *worker* processes (its main process promotes mixed
dtypes and keeps channels_last; its workers do not), but no shared memory file is ever made. One
message differs: where the first tensor is larger than the others torch's workers say "Trying to
resize storage that is not resizable"; here it is "stack expects each tensor to be equal size…", as
in torch's main process.

This module does not fetch samples, and a collate function of the user's runs on the heap.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import memmove
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils import collate as torch_collate

from stoker.loader.codec import SMALL_BYTES
from stoker.loader.room import TORCH_OF, Room, address_of, aligned, tensor_over

# A sample with at least this much in large leaves is copied as it comes.
STREAM_BYTES = 128 * 1024
# A leaf of such a sample is copied at once if it has at least this much.
_LEAF_BYTES = 16 * 1024
# Up to here by memmove; beyond, torch's own copy showed itself at least as quick.
_MOVED_BYTES = 1 << 20

_Function: TypeAlias = Callable[..., Any]
_Map: TypeAlias = dict[Any, _Function]

_registry: _Map = torch_collate.default_collate_fn_map
_torch_tensor_fn: _Function = torch_collate.collate_tensor_fn

# What torch ships. Not a copy of the registry: the user may have changed it before we came.
_SHIPPED: _Map = {
    torch.Tensor: _torch_tensor_fn,
    np.ndarray: torch_collate.collate_numpy_array_fn,
    (np.bool_, np.number, np.object_): torch_collate.collate_numpy_scalar_fn,
    float: torch_collate.collate_float_fn,
    int: torch_collate.collate_int_fn,
    str: torch_collate.collate_str_fn,
    bytes: torch_collate.collate_str_fn,
}


class Collator:
    """Turns samples into a batch, in place where that is possible.

    `begin`, then `add` for each sample in order, then `finish`; or `collate_all` at once.
    """

    add: Callable[[object], None]
    """Take the next sample. A large one is copied now and not kept."""

    def __init__(self, collate_fn: Callable[[Any], Any], batched: bool) -> None:
        self._collate_fn = collate_fn
        self._batched = batched
        self._room: Room | None = None
        self._expected = 0
        self._samples: list[Any] = []
        self._plan: _Plan | None = None
        self._slots: list[_Slot] = []
        self._stack = _Stacking(None)
        self._functions = self._functions_with(_SHIPPED)
        self._reset()

    def begin(self, room: Room, expected: int) -> None:
        """A new batch of `expected` samples; whatever was left of another one is forgotten."""
        self._reset()
        self._room = room
        self._expected = expected
        if self._batched and self._in_place() and _registry == _SHIPPED:
            self.add = self._add

    def finish(self) -> object:
        """The batch; raises what collating raises."""
        assert self._room is not None, "finish() before begin()"
        samples, room = self._samples, self._room
        for slot in self._slots:
            slot.trim()
        try:
            return self.collate_all(samples, room)
        finally:
            self._reset()

    def collate_all(self, samples: object, room: Room) -> object:
        """A batch from samples that came all at once, or from one sample if `batched` is off."""
        if not self._in_place():
            with _off_shared_memory():
                return self._collate_fn(samples)
        self._stack.room = room
        try:
            if self._batched and _registry == _SHIPPED:
                return _collate(samples, self._functions)
            functions = self._functions_with(_registry)
            return torch_collate.collate(samples, collate_fn_map=functions)
        finally:
            self._stack.room = None

    def _functions_with(self, registry: _Map) -> _Map:
        functions = dict(registry)
        functions[torch.Tensor] = self._stack
        functions[_Row] = _collate_rows
        for kind, quick in _QUICK.items():
            if functions.get(kind) is _SHIPPED[kind]:
                functions[kind] = quick
        return functions

    def _in_place(self) -> bool:
        return (
            self._collate_fn is torch_collate.default_collate
            and _registry.get(torch.Tensor) is _torch_tensor_fn
        )

    def _add(self, sample: object) -> None:
        samples = self._samples
        if not samples:
            self._prepare(sample)
        if self._plan is None:
            samples.append(sample)
            # Nothing to decide any more: 256 small samples would spend 40 us on asking.
            self.add = samples.append
        else:
            samples.append(_follow(self._plan, sample, len(samples)))

    def _prepare(self, sample: object) -> None:
        """Decide from a batch's first sample whether, and where, its large leaves are copied."""
        room = self._room
        assert room is not None, "add() before begin()"
        slots: list[_Slot] = []
        plan = _lay_out(sample, room, self._expected, slots)
        if plan is None or sum(slot.row_bytes for slot in slots) < STREAM_BYTES:
            return
        # All at once: growing is a round trip.
        room.used = aligned(room.used)
        sizes = [aligned(slot.row_bytes * self._expected) for slot in slots]
        room.ensure(room.used + sum(sizes))
        for slot, size in zip(slots, sizes, strict=True):
            slot.offset = room.reserve(size)
        self._plan = plan
        self._slots = slots

    def _reset(self) -> None:
        self._room = None
        self._samples = []
        self._plan = None
        self._slots = []
        self.add = self._samples.append


def _collate(batch: Any, functions: _Map) -> Any:
    """torch's `collate` for the usual kinds of samples, without its questions (25 us a batch).

    Only where the registry is the one torch ships: a registered type comes before these.
    """
    kind = type(batch[0])
    function = functions.get(kind)
    if function is not None:
        return function(batch, collate_fn_map=functions)
    if kind is tuple and len(set(map(len, batch))) == 1:
        return [_collate(part, functions) for part in zip(*batch, strict=True)]
    if kind is dict:
        return {key: _collate([s[key] for s in batch], functions) for key in batch[0]}
    return torch_collate.collate(batch, collate_fn_map=functions)


# --- stacking -----------------------------------------------------------------------------------


class _Stacking:
    """torch's function for tensors, with the room in the place of its shared memory files."""

    __slots__ = ("room",)

    def __init__(self, room: Room | None) -> None:
        self.room = room

    def __call__(self, batch: Sequence[Any], **_: Any) -> torch.Tensor:
        first = batch[0]
        count = len(batch)
        if type(first) is not torch.Tensor or not _is_plain(first):
            _refuse(first)
            out = _like_torch(first, count)
        else:
            shape = (count, *first.shape)
            dtype = first.dtype
            nbytes = count * first.nbytes
            room = self.room
            if room is None or nbytes <= SMALL_BYTES:
                # What is small is sent as a copy anyway.
                out = first.new_empty(shape)
            else:
                offset = room.reserve(nbytes)  # which may replace the memory
                out = tensor_over(room.memory, offset, dtype, shape)
        return torch.stack(batch, 0, out=out)  # type: ignore[arg-type]


_on_the_heap = _Stacking(None)

_SPARSE = {
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_bsr,
    torch.sparse_csc,
    torch.sparse_bsc,
}


def _is_plain(tensor: torch.Tensor) -> bool:
    return bool(
        tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
    )


def _refuse(tensor: torch.Tensor) -> None:
    """Raise what torch raises for tensors it does not stack."""
    if not tensor.is_nested and tensor.layout is torch.strided:
        return
    for kind, unfit in (("nested", tensor.is_nested), ("sparse", tensor.layout in _SPARSE)):
        if unfit:
            raise RuntimeError(
                f"Batches of {kind} tensors are not currently supported by the default "
                "collate_fn; please provide a custom collate_fn to handle them appropriately."
            )


def _like_torch(first: Any, count: int) -> Any:
    """The `out` torch would make for a tensor that is not plain, off shared memory."""
    like = first._typed_storage()
    nbytes = count * first.numel() * first.itemsize
    storage = torch.empty(nbytes, dtype=torch.uint8, device=first.device).untyped_storage()
    typed = type(like)(wrap_storage=storage, dtype=like.dtype, _internal=True)
    return first.new(typed).resize_(count, *first.size())


@contextmanager
def _off_shared_memory() -> Iterator[None]:
    """Let a collate function that calls `default_collate` in a worker do so on the heap.

    torch's function for tensors makes a shared memory file wherever `get_worker_info()` is not
    None, which a full /dev/shm turns into an error. The registry is torch's documented way to
    replace it. Results must not lie in the room here: the caller may keep them.
    """
    if get_worker_info() is None or _registry.get(torch.Tensor) is not _torch_tensor_fn:
        yield
        return
    _registry[torch.Tensor] = _on_the_heap
    try:
        yield
    finally:
        if _registry.get(torch.Tensor) is _on_the_heap:
            _registry[torch.Tensor] = _torch_tensor_fn


def _numbers(kind: type, dtype: type[np.generic], fallback: _Function) -> _Function:
    """torch's function for int or float, through numpy: 256 of them take 15 us, not 43."""
    only = {kind}

    def collate_numbers(batch: Sequence[Any], **keywords: Any) -> Any:
        if set(map(type, batch)) == only:
            array = np.array(batch)
            # An int beyond 64 bits has another dtype, and torch its own words for it.
            if array.dtype == dtype:
                return torch.from_numpy(array)
        return fallback(batch, **keywords)

    return collate_numbers


_QUICK: _Map = {
    int: _numbers(int, np.int64, _SHIPPED[int]),
    float: _numbers(float, np.float64, _SHIPPED[float]),
}


# --- streaming ----------------------------------------------------------------------------------


class _Slot:
    """One leaf of the structure, and its slab: a row for each sample.

    Rows are addressed through the room, whose memory may be replaced between two samples.
    """

    __slots__ = (
        "_room",
        "_rows",
        "_seen",
        "dtype",
        "expected",
        "filled",
        "kind",
        "offset",
        "row_bytes",
        "shape",
    )

    def __init__(self, leaf: Any, room: Room, expected: int) -> None:
        self.kind: Any = type(leaf)
        self.dtype = leaf.dtype
        self.shape = leaf.shape
        self.row_bytes = int(leaf.nbytes)
        self.expected = expected
        self.offset = 0
        self.filled = 0
        self._room = room
        self._seen: Any = None
        self._rows: Sequence[Any] = ()

    def put(self, leaf: Any, index: int) -> Any:
        """Copy the leaf into its row; the leaf itself if it does not fit there."""
        if (
            type(leaf) is not self.kind
            or leaf.dtype != self.dtype
            or leaf.shape != self.shape
            or index != self.filled
            or index >= self.expected
            or not _fit(leaf)
        ):
            return leaf
        address = _run_of(leaf) if self.row_bytes <= _MOVED_BYTES else 0
        if address:  # a fifth quicker than torch's and numpy's own loops
            at = self.offset + index * self.row_bytes
            memmove(self._room.address + at, address, self.row_bytes)
        elif self.kind in _ARRAYS:
            np.copyto(self.rows()[index], leaf)
        else:
            self.rows()[index].copy_(leaf)
        self.filled = index + 1
        return _Row(self, index)

    def rows(self) -> Sequence[Any]:
        """The rows, each of the kind of thing the leaves were."""
        if self._seen is not self._room.memory:
            self._seen = self._room.memory
            # All at once: indexing one by one costs 2 us each.
            rows = self.slab(self.expected).unbind()
            self._rows = [row.numpy() for row in rows] if self.kind in _ARRAYS else rows
        return self._rows

    def slab(self, count: int) -> torch.Tensor:
        dtype = TORCH_OF[self.dtype] if self.kind in _ARRAYS else self.dtype
        return tensor_over(self._room.memory, self.offset, dtype, (count, *self.shape))

    def trim(self) -> None:
        """Give back the end of the slab if nothing came after it."""
        room = self._room
        if room.used == aligned(self.offset + self.row_bytes * self.expected):
            room.used = aligned(self.offset + self.row_bytes * self.filled)


class _Row:
    """Stands in a sample for a leaf that is in its slab already."""

    __slots__ = ("index", "slot")

    def __init__(self, slot: _Slot, index: int) -> None:
        self.slot = slot
        self.index = index


def _collate_rows(batch: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
    slot = batch[0].slot
    # A slot takes rows in order only, so these are all of them.
    if slot.filled == len(batch) and all(type(row) is _Row and row.slot is slot for row in batch):
        return slot.slab(len(batch))
    # Some sample did not fit: torch decides what that means.
    leaves = [row.slot.rows()[row.index] if type(row) is _Row else row for row in batch]
    return torch_collate.collate(leaves, collate_fn_map=collate_fn_map)


# The large leaves of a structure, by their way down to them; a part without any is left out.
_Plan: TypeAlias = "_Slot | dict[Any, Any]"


def _lay_out(part: Any, room: Room, expected: int, slots: list[_Slot]) -> "_Plan | None":
    """Where the large leaves of this (part of a) sample are; adds a slot for each."""
    kind = type(part)
    if kind is torch.Tensor or kind in _ARRAYS:
        if not _fit(part) or part.nbytes < _LEAF_BYTES:
            return None
        slot = _Slot(part, room, expected)
        slots.append(slot)
        return slot
    if kind in _MAPPINGS:
        pairs = list(part.items())
    elif kind in _SEQUENCES or _is_namedtuple(kind):
        pairs = list(enumerate(part))
    else:
        return None
    plans = {key: _lay_out(value, room, expected, slots) for key, value in pairs}
    found = {key: plan for key, plan in plans.items() if plan is not None}
    return found or None


def _follow(plan: "_Plan", part: Any, index: int) -> Any:
    """The (part of a) sample with rows in the place of its large leaves; never the same container.

    Where the structure is not the planned one, the part is kept as it is.
    """
    if isinstance(plan, _Slot):
        return plan.put(part, index)
    kind = type(part)
    if kind in _MAPPINGS:
        mapping: Mapping[Any, Any] = part
        return kind(
            (key, _follow(plan[key], value, index) if key in plan else value)
            for key, value in mapping.items()
        )
    if kind in _SEQUENCES or _is_namedtuple(kind):
        items = [
            _follow(plan[i], value, index) if i in plan else value for i, value in enumerate(part)
        ]
        # tuple's own constructor: a named tuple's may be the user's, and look at the values.
        return items if kind is list else tuple.__new__(kind, items)
    return part


_ARRAYS = frozenset({np.ndarray, np.memmap})
_MAPPINGS = frozenset({dict, OrderedDict})
_SEQUENCES = frozenset({list, tuple})


def _is_namedtuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _run_of(leaf: Any) -> int:
    """The address of a leaf whose bytes are one run, in the order of its elements; otherwise 0."""
    if type(leaf) is torch.Tensor:
        plain = leaf.is_contiguous() and not leaf.is_neg() and not leaf.is_conj()
        return leaf.data_ptr() if plain else 0
    return address_of(leaf) if leaf.flags.c_contiguous else 0


def _fit(leaf: Any) -> bool:
    """Whether copying this tensor or array does what stacking it would do."""
    kind = type(leaf)
    if kind is torch.Tensor:
        return _is_plain(leaf) and not leaf.requires_grad
    if kind not in _ARRAYS or leaf.dtype not in TORCH_OF:
        return False
    # torch refuses arrays with steps backwards or between elements.
    size = leaf.itemsize
    return all(step >= 0 and step % size == 0 for step in leaf.strides)
