"""The writable memory a worker fills with one batch, and tensors laid over it.

A room hands out 64-byte aligned pieces from the front and can ask for a larger memory. It does
not know what is put into it, who granted the memory, or when it ends.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Memory: TypeAlias = npt.NDArray[np.uint8]

ALIGNMENT = 64


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the next 64-byte boundary."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


class Room:
    """Writable memory for one batch: a bump allocator that can grow.

    `grow(n)` returns another memory of at least `n` bytes and copies nothing. The former one must
    stay readable until the batch is sent: the room copies its used part over, at the same offsets,
    and still recognises tensors that lie in it.
    """

    __slots__ = ("_former", "_grow", "address", "memory", "used")

    def __init__(self, memory: Memory, grow: Callable[[int], Memory]) -> None:
        self.memory = memory
        self.address = address_of(memory)
        self.used = 0
        self._grow = grow
        self._former: list[tuple[int, Memory]] = []

    def take(self, nbytes: int) -> int | None:
        """The offset of a fresh aligned piece, or None if it does not fit."""
        offset = self.used
        if offset + nbytes > self.memory.size:
            return None
        # A memory whose size is no multiple of 64 ends in a shorter piece.
        self.used = min(aligned(offset + nbytes), self.memory.size)
        return offset

    def ensure(self, total: int) -> None:
        """Make `memory` hold at least `total` bytes; what is in use keeps its offsets."""
        if self.memory.size >= total:
            return
        old = self.memory
        new = self._grow(total)
        if new.size < total:
            raise ValueError(f"asked for a memory of {total} bytes, got {new.size}")
        address = address_of(new)
        if self.used and address != self.address:
            np.copyto(new[: self.used], old[: self.used])
        if old.size:
            self._former.append((self.address, old))
        self.memory = new
        self.address = address

    def reserve(self, nbytes: int) -> int:
        """The offset of a fresh aligned piece, growing the memory if it has to."""
        offset = self.take(nbytes)
        if offset is None:
            # The bump pointer may stand at an unaligned end of a memory that is being replaced.
            self.used = aligned(self.used)
            self.ensure(self.used + nbytes)
            offset = self.take(nbytes)
            assert offset is not None
        return offset

    def locate(self, address: int, nbytes: int) -> int | None:
        """Where these bytes lie in this room (or lay before it grew), or None."""
        offset = address - self.address
        if offset >= 0 and offset + nbytes <= self.memory.size:
            return offset
        for start, memory in self._former:
            offset = address - start
            if offset >= 0 and offset + nbytes <= memory.size:
                return offset
        return None


def address_of(memory: Memory) -> int:
    """The address of the first byte."""
    return int(memory.__array_interface__["data"][0])


def dense_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, torch gives to a fresh contiguous tensor of this shape."""
    step = 1
    stride = []
    for size in reversed(shape):
        stride.append(step)
        step *= size or 1
    stride.reverse()
    return tuple(stride)


# Quantized tensors carry more than bytes; they are never laid over memory from here.
DTYPES: tuple[torch.dtype, ...] = tuple(
    sorted(
        {
            value
            for name, value in vars(torch).items()
            if isinstance(value, torch.dtype) and not name.startswith("q")
        },
        key=str,
    )
)

CODE_OF = {dtype: code for code, dtype in enumerate(DTYPES)}

_NUMPY_NAMES = {"bool", "complex64", "complex128", "float16", "float32", "float64"} | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}

# What numpy knows under the same layout, and torch.from_numpy accepts.
NUMPY_OF: dict[torch.dtype, np.dtype[np.generic]] = {
    dtype: np.dtype(name)
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and name in _NUMPY_NAMES
}
TORCH_OF: dict[np.dtype[np.generic], torch.dtype] = {v: k for k, v in NUMPY_OF.items()}

_BYTE = np.dtype(np.uint8)


def tensor_over(
    memory: Memory | memoryview | bytearray,
    offset: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """A tensor over the bytes at `offset`; it keeps `memory` alive.

    Its storage covers its own bytes only, so saving it does not write its neighbours. Numpy makes
    the view because it takes 2 microseconds where torch's own ways take 5; a dtype numpy lacks
    goes the longer way, which leaves no view relation behind as `Tensor.view(dtype)` would.
    """
    known = NUMPY_OF.get(dtype)
    if known is not None:
        if stride is None:
            return torch.from_numpy(np.ndarray(shape, known, memory, offset))
        size = known.itemsize
        return torch.from_numpy(
            np.ndarray(shape, known, memory, offset, tuple([step * size for step in stride]))
        )
    if stride is None:
        stride = dense_stride(shape)
    span = span_bytes(shape, stride, dtype.itemsize)
    carrier = torch.from_numpy(np.ndarray((span,), _BYTE, memory, offset))
    empty = torch.empty(0, dtype=dtype, device="cpu")
    return empty.set_(carrier.untyped_storage(), 0, shape, stride)


def span_bytes(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """How many bytes lie between the first and past the last element."""
    last = 0
    for size, step in zip(shape, stride, strict=True):
        if not size:
            return 0
        last += (size - 1) * step
    return (last + 1) * itemsize
