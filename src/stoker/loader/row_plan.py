"""Where each value of a sample goes in a batch that several workers fill, and the batch from that.

A plan is made from one sample. It says for every leaf of the structure which type, dtype and
shape a sample must have there, and so where each of its rows lies: every leaf has a slab, slab
after slab in the batch's extent. A sample that is different in anything is refused before a byte
of the differing leaf is written. Strings and bytes have no slab; they travel beside the rows.

Containers of the batch are put together by torch's own ``collate`` from stand-ins, so they are
what ``default_collate`` would have returned. Whatever is not certain to come out as it would from
``default_collate`` makes no plan: ``Unfit``. This module does not fetch, grant, or send.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data._utils import collate as torch_collate

from stoker.loader.codec import SMALL_BYTES
from stoker.loader.collate import _ARRAYS, _SHIPPED, _fit, _is_namedtuple
from stoker.loader.room import TORCH_OF, Memory, aligned, tensor_over

Texts: TypeAlias = "list[list[str | bytes]]"
"""For each leaf without a slab, in order: its values, row by row."""

_TENSOR, _ARRAY, _NUMBER, _TEXT = range(4)
_PLAIN_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
_TEXTS = (str, bytes)


class Unfit(Exception):
    """A sample from which no plan can be made, or that differs from the plan; says in what."""


@dataclass(slots=True)
class Leaf:
    """What every sample must have at one place of the structure."""

    form: int
    kind: type
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    row_bytes: int = 0
    gathered: type = list
    """Of texts: what ``default_collate`` gathers them in, which depends on what is around them."""


@dataclass(slots=True, frozen=True)
class _Stand:
    """Stands for a leaf in the structure of the batch."""

    leaf: int


# The structure of a sample: the number of a leaf, or a container's type, keys and contents.
_Node: TypeAlias = "int | tuple[type, list[Any] | None, list[Any]]"


@dataclass(eq=False)
class RowPlan:
    """Where the rows of a batch lie. Known by identity, and by its bytes between processes."""

    leaves: list[Leaf]
    node: Any
    batch: Any
    """The structure of the batch, with a stand-in for every leaf."""
    packed: bytes = field(default=b"", compare=False)
    _offsets: dict[int, tuple[list[int], int]] = field(default_factory=dict)

    @classmethod
    def of(cls, sample: object) -> RowPlan:
        """The plan for batches of samples like this one."""
        if torch_collate.default_collate_fn_map != _SHIPPED:
            raise Unfit("torch's map of collate functions was changed")
        leaves: list[Leaf] = []
        stands: dict[Any, Callable[..., Any]] = {_Stand: _Gather(leaves)}
        try:
            node, stand = _lay_out(sample, leaves)
            batch = torch_collate.collate([stand, stand], collate_fn_map=stands)
            plan = cls(leaves, node, batch)
            plan.packed = pickle.dumps((leaves, node, batch), 5)
        except Unfit:
            raise
        except Exception as error:
            # The user's own types are at work: what is wrong with them torch will say.
            raise Unfit(f"{type(error).__name__}: {error}") from error
        return plan

    @classmethod
    def unpack(cls, packed: bytes) -> RowPlan:
        """The plan that another process has made."""
        plan = cls(*pickle.loads(packed))
        plan.packed = packed
        return plan

    def nbytes(self, rows: int) -> int:
        """How many bytes a batch of so many rows takes."""
        return self.offsets(rows)[1]

    def offsets(self, rows: int) -> tuple[list[int], int]:
        """Where the slabs of a batch of so many rows begin, and where the last one ends."""
        known = self._offsets.get(rows)
        if known is None:
            at = 0
            starts = []
            for leaf in self.leaves:
                starts.append(at)
                at = aligned(at + leaf.row_bytes * rows)
            known = self._offsets[rows] = starts, at
        return known

    def build(self, memory: Memory, rows: int, texts: Texts) -> object:
        """The batch, over ``memory``; what is small is copied out, as ``codec`` does it."""
        view = memoryview(memory)  # type: ignore[arg-type]
        made: list[Any] = []
        said = iter(texts)
        for leaf, start in zip(self.leaves, self.offsets(rows)[0], strict=True):
            if leaf.dtype is None:
                made.append(leaf.gathered(next(said)))
                continue
            shape = (rows, *leaf.shape)
            nbytes = leaf.row_bytes * rows
            if not nbytes:
                made.append(torch.empty(shape, dtype=leaf.dtype, device="cpu"))
            elif nbytes <= SMALL_BYTES:
                own = bytearray(view[start : start + nbytes])
                made.append(tensor_over(own, 0, leaf.dtype, shape))
            else:
                made.append(tensor_over(view, start, leaf.dtype, shape))
        return _filled_in(self.batch, made)


class Rows:
    """Some rows of one batch, to be written sample by sample."""

    def __init__(self, plan: RowPlan, memory: Memory, rows: int, first: int, count: int) -> None:
        self._plan = plan
        self._slabs: list[Any] = []
        self.texts: Texts = []
        for leaf, start in zip(plan.leaves, plan.offsets(rows)[0], strict=True):
            slab: Any = None
            if leaf.dtype is None:
                slab = []
                self.texts.append(slab)
            elif leaf.row_bytes:
                slab = tensor_over(memory, start, leaf.dtype, (rows, *leaf.shape))
                slab = slab[first : first + count]
                # All rows at once: indexing a tensor costs 2 us each. Numpy's is quick.
                slab = slab.unbind() if leaf.form == _TENSOR else slab.numpy()
            self._slabs.append(slab)

    def put(self, sample: object, row: int) -> None:
        """Write a sample into a row (of these rows). Raises ``Unfit``."""
        self._put(self._plan.node, sample, row)

    def _put(self, node: Any, part: Any, row: int) -> None:
        kind = type(part)
        if type(node) is int:
            leaf = self._plan.leaves[node]
            _compare(leaf, part)
            slab = self._slabs[node]
            if slab is None:
                return
            if leaf.form == _TENSOR:
                slab[row].copy_(part)
            elif leaf.form == _TEXT:
                slab.append(part)
            else:
                try:
                    slab[row] = part
                except OverflowError:
                    raise Unfit("an int of more than 64 bits") from None
            return
        wanted, keys, nodes = node
        if kind is not wanted:
            raise Unfit(f"{kind.__name__} instead of {wanted.__name__}")
        if keys is not None:
            if list(part) != keys:
                raise Unfit(f"keys {_shown(list(part))} instead of {_shown(keys)}")
            part = part.values()
        elif len(part) != len(nodes):
            raise Unfit(f"{len(part)} elements in a {kind.__name__} instead of {len(nodes)}")
        for below, value in zip(nodes, part, strict=True):
            self._put(below, value, row)


class _Gather:
    """In the place of torch's functions: keeps a stand-in, and notes what texts are gathered in."""

    def __init__(self, leaves: list[Leaf]) -> None:
        self._leaves = leaves

    def __call__(self, batch: Sequence[_Stand], **_: Any) -> _Stand:
        stand = batch[0]
        self._leaves[stand.leaf].gathered = type(batch)
        return stand


def _lay_out(part: Any, leaves: list[Leaf]) -> tuple[_Node, Any]:
    """The structure of a (part of a) sample, and the same with stand-ins for its leaves."""
    kind = type(part)
    if kind is dict or kind is OrderedDict:
        keys = list(part)
        below = [_lay_out(value, leaves) for value in part.values()]
        stands = zip(keys, (stand for _, stand in below), strict=True)
        return (kind, keys, [node for node, _ in below]), kind(stands)
    if kind is list or kind is tuple or _is_namedtuple(kind):
        below = [_lay_out(value, leaves) for value in part]
        items = [stand for _, stand in below]
        node: _Node = (kind, None, [node for node, _ in below])
        return node, items if kind is list else tuple.__new__(kind, items)
    leaves.append(_leaf(part))
    return len(leaves) - 1, _Stand(len(leaves) - 1)


def _leaf(part: Any) -> Leaf:
    kind = type(part)
    if kind is torch.Tensor and _fit(part):
        return Leaf(_TENSOR, kind, part.dtype, tuple(part.shape), part.numel() * part.itemsize)
    if kind in _ARRAYS and _fit(part):
        return Leaf(_ARRAY, kind, TORCH_OF[part.dtype], part.shape, part.nbytes)
    if kind in _TEXTS:
        return Leaf(_TEXT, kind)
    dtype = _PLAIN_NUMBERS.get(kind)
    if isinstance(part, np.generic) and part.dtype in TORCH_OF:
        # How torch reads lists of numpy's numbers is its own affair: ask it.
        dtype = torch.as_tensor([part, part]).dtype
        if dtype is not TORCH_OF[part.dtype]:
            dtype = None
    if dtype is None:
        raise Unfit(f"a {kind.__name__} that has no place of its own in a batch")
    return Leaf(_NUMBER, kind, dtype, (), dtype.itemsize)


def _compare(leaf: Leaf, part: Any) -> None:
    """Refuse what is not what the plan says."""
    kind = type(part)
    if kind is not leaf.kind and not (leaf.form == _ARRAY and kind in _ARRAYS):
        raise Unfit(f"{kind.__name__} instead of {leaf.kind.__name__}")
    if leaf.form > _ARRAY:
        return
    dtype = part.dtype if leaf.form == _TENSOR else TORCH_OF.get(part.dtype)
    if dtype is not leaf.dtype:
        raise Unfit(f"{part.dtype} instead of {leaf.dtype}")
    if part.shape != leaf.shape:
        raise Unfit(f"shape {tuple(part.shape)} instead of {leaf.shape}")
    if not _fit(part):
        raise Unfit(f"a {kind.__name__} that can't be copied as it is")


def _filled_in(batch: Any, made: list[Any]) -> Any:
    kind = type(batch)
    if kind is _Stand:
        return made[batch.leaf]
    if kind is dict or kind is OrderedDict:
        return kind((key, _filled_in(value, made)) for key, value in batch.items())
    items = [_filled_in(value, made) for value in batch]
    # As unpickling would make it.
    return items if kind is list else kind.__new__(kind, *items)


def _shown(keys: list[Any]) -> str:
    text = repr(keys)
    return text if len(text) <= 100 else text[:100] + "…"
