"""The quick way through the codec: batches of nothing but plain tensors in lists, tuples and dicts.

Most batches are like that, and small ones feel what pickling costs. Whatever is not entirely plain
(a string, a subclass, two tensors that overlap, an unusual stride) is not touched: `describe`
says None and the codec takes its general way. Copies nothing but what is small.
"""

import ctypes
from itertools import pairwise
from typing import Any, TypeAlias

import torch

from stoker.loader.room import CODE_OF, DTYPES, Room, dense_stride, tensor_over

# What `marshal` can write. A tensor is (dtype, shape, offset in the room or its own bytes), a
# tuple is (None, items).
Tree: TypeAlias = tuple[Any, ...] | list[Any] | dict[str, Any]

_COPIED_BYTES = 4096
"""So much of a batch may travel in the message itself."""


class _NotPlain(Exception):
    """Found something for the general way."""


class _Description:
    """One walk through a batch."""

    __slots__ = ("copied", "room", "seen", "small_bytes", "spans")

    def __init__(self, room: Room, small_bytes: int) -> None:
        self.room = room
        self.small_bytes = small_bytes
        self.copied = 0
        self.spans: list[tuple[int, int]] = []
        self.seen: set[int] = set()

    def of(self, part: Any) -> Tree:
        kind = type(part)
        if kind is torch.Tensor:
            return self._tensor(part)
        if kind is dict:
            self._once(part)
            if not all(type(key) is str for key in part):
                raise _NotPlain
            return {key: self.of(value) for key, value in part.items()}
        if kind is list:
            self._once(part)
            return [self.of(item) for item in part]
        if kind is tuple:
            self._once(part)
            return None, [self.of(item) for item in part]
        raise _NotPlain

    def _once(self, container: object) -> None:
        """A container that is in the batch twice must arrive as one."""
        if id(container) in self.seen:
            raise _NotPlain
        self.seen.add(id(container))

    def _tensor(self, tensor: torch.Tensor) -> Tree:
        if tensor.is_nested or tensor.layout is not torch.strided:
            raise _NotPlain
        code = CODE_OF.get(tensor.dtype)
        shape = tuple(tensor.shape)
        nbytes = tensor.nbytes
        if (
            code is None
            or not nbytes
            or not tensor.is_cpu
            or tensor.requires_grad
            or not tensor.is_contiguous()
            or tensor.is_neg()
            or tensor.is_conj()
            or (1 in shape and tensor.stride() != dense_stride(shape))
        ):
            raise _NotPlain
        address = tensor.data_ptr()
        where = self.room.locate(address, nbytes)
        self.spans.append((address, address + nbytes))
        if where is not None:
            return code, shape, where
        self.copied += nbytes
        if nbytes > self.small_bytes or self.copied > _COPIED_BYTES or not address:
            raise _NotPlain
        return code, shape, ctypes.string_at(address, nbytes)

    def any_overlap(self) -> bool:
        spans = self.spans
        if len(spans) < 2:
            return False
        spans.sort()
        return any(end > start for (_, end), (start, _) in pairwise(spans))


def describe(batch: object, room: Room, small_bytes: int) -> Tree | None:
    """Where each tensor of the batch lies; None if the batch is not plain.

    Up to `small_bytes` a tensor that is not in the room is copied, a larger one is not plain.
    """
    description = _Description(room, small_bytes)
    try:
        tree = description.of(batch)
    except (_NotPlain, RecursionError):
        return None
    return None if description.any_overlap() else tree


def rebuild(tree: Any, memory: memoryview) -> object:
    """The batch that `describe` saw, over (what was the room's) memory."""
    kind = type(tree)
    if kind is tuple:
        code = tree[0]
        if code is None:
            return tuple([rebuild(item, memory) for item in tree[1]])
        where = tree[2]
        if type(where) is int:
            return tensor_over(memory, where, DTYPES[code], tree[1])
        return tensor_over(bytearray(where), 0, DTYPES[code], tree[1])
    if kind is list:
        return [rebuild(item, memory) for item in tree]
    return {key: rebuild(item, memory) for key, item in tree.items()}
