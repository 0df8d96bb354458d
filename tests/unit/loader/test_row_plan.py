"""Row plans: rows written in any order, by several writers, make what `default_collate` makes."""

from __future__ import annotations

import collections
import re
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from stoker.loader.row_plan import RowPlan, Rows, Unfit
from tests.process.test_differential import COLLATABLE, assert_same


class Point(NamedTuple):
    x: Any
    y: Any


FIT = {name: make for name, make in COLLATABLE.items() if name != "subclass"}
_leaves = st.sampled_from(sorted(FIT)).map(lambda name: ("leaf", name))
structures = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["list", "tuple"]), st.lists(inner, max_size=3)),
        st.tuples(
            st.sampled_from(["dict", "ordered"]),
            st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
        ),
        st.tuples(st.just("point"), st.tuples(inner, inner)),
    ),
    max_leaves=8,
)


def make(structure: Any, i: int) -> Any:
    kind, inside = structure
    if kind == "leaf":
        return FIT[inside](i)
    if kind in ("dict", "ordered"):
        pairs = [(key, make(value, i)) for key, value in inside.items()]
        return dict(pairs) if kind == "dict" else collections.OrderedDict(pairs)
    items = [make(value, i) for value in inside]
    if kind == "point":
        return Point(*items)
    return items if kind == "list" else tuple(items)


def filled(samples: list[Any], cuts: list[int]) -> Any:
    """The batch, after its parts were written last first, each by a plan of its own."""
    plan = RowPlan.of(samples[0])
    memory = np.full(plan.nbytes(len(samples)), 0xAA, np.uint8)
    bounds = sorted({0, len(samples), *(cut % len(samples) for cut in cuts)})
    texts = {}
    for first, end in reversed(list(pairwise(bounds))):
        rows = Rows(RowPlan.unpack(plan.packed), memory, len(samples), first, end - first)
        for at, sample in enumerate(samples[first:end]):
            rows.put(sample, at)
        texts[first] = rows.texts
    leaves = zip(*(texts[at] for at in sorted(texts)), strict=True)
    gathered = [list(chain.from_iterable(leaf)) for leaf in leaves]
    return RowPlan.unpack(plan.packed).build(memory, len(samples), gathered)


def collated(samples: list[Any]) -> Any:
    """As in torch's workers, where tensors are stacked into memory that is given."""

    def dense(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part.contiguous()
        if isinstance(part, dict):
            return type(part)((key, dense(value)) for key, value in part.items())
        if isinstance(part, Point):
            return Point(*map(dense, part))
        return type(part)(map(dense, part)) if isinstance(part, (list, tuple)) else part

    return dense(default_collate(samples))


@settings(deadline=None)
@given(structures, st.integers(1, 9), st.lists(st.integers(0, 8), max_size=3))
def test_what_parts_make_is_what_default_collate_makes(
    structure: Any, count: int, cuts: list[int]
) -> None:
    samples = [make(structure, i) for i in range(count)]
    assert_same(filled(samples, cuts), collated(samples))


def test_slabs_are_aligned_apart_and_exactly_as_large_as_they_must_be() -> None:
    plan = RowPlan.of((torch.zeros(3), 1, "text", torch.zeros(0)))
    assert plan.offsets(5) == ([0, 64, 128, 128], 128)
    assert plan.nbytes(1) == 128


def test_an_extent_that_is_too_small_is_never_written_beyond() -> None:
    plan = RowPlan.of(torch.zeros(100))
    with pytest.raises((TypeError, ValueError)):
        Rows(plan, np.zeros(plan.nbytes(4), np.uint8), 5, 0, 5)


@pytest.mark.parametrize(
    ("first", "other", "words"),
    [
        (torch.zeros(3), torch.zeros(4), "shape"),
        (torch.zeros(3), torch.zeros(3, 1), "shape"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float64), "float64 instead of"),
        (torch.zeros(3), torch.zeros(3, requires_grad=True), "can't be copied"),
        (torch.zeros(3), torch.nn.Parameter(torch.zeros(3)), "Parameter instead of Tensor"),
        (torch.zeros(3), np.zeros(3, np.float32), "ndarray instead of Tensor"),
        (torch.zeros(3), torch.zeros(3).to_sparse(), "can't be copied"),
        (np.zeros(3), np.zeros(3, ">f8"), ">f8 instead of"),
        (np.zeros(3), np.zeros(3)[::-1], "can't be copied"),
        (1, 1.0, "float instead of int"),
        (1, True, "bool instead of int"),
        (1, 1 << 64, "64 bits"),
        (np.float32(1), np.float64(1), "float64 instead of float32"),
        ("a", b"a", "bytes instead of str"),
        ({"a": 1, "b": 2}, {"a": 1}, "keys"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "keys"),
        ({"a": 1}, collections.OrderedDict(a=1), "OrderedDict instead of dict"),
        ([1, 2], [1], "1 elements"),
        ([1, 2], (1, 2), "tuple instead of list"),
        (Point(1, 2), (1, 2), "tuple instead of Point"),
    ],
)
def test_a_sample_that_differs_in_anything_is_refused(first: Any, other: Any, words: str) -> None:
    plan = RowPlan.of(first)
    rows = Rows(plan, np.zeros(plan.nbytes(2), np.uint8), 2, 0, 2)
    rows.put(first, 0)
    with pytest.raises(Unfit, match=words):
        rows.put(other, 1)


@pytest.mark.parametrize(
    "sample",
    [
        None,
        {1},
        object(),
        [torch.zeros(2), None],
        torch.zeros(3).to_sparse(),
        torch.zeros(3, requires_grad=True),
        torch.nn.Parameter(torch.zeros(2)),
        np.array(["a"]),
        np.zeros(3)[::-1],
        np.datetime64("2024-01-01"),
        1j,
        collections.defaultdict(int, a=1),
        collections.namedtuple("Unknown", "x")(1),  # noqa: PYI024 - its class can't be pickled
    ],
    ids=lambda sample: re.sub(r" at 0x\w+", "", repr(sample)),
)
def test_of_what_is_not_certain_no_plan_is_made(sample: Any) -> None:
    with pytest.raises(Unfit):
        RowPlan.of(sample)


def test_no_plan_is_made_where_the_user_has_changed_what_torch_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    functions = torch.utils.data._utils.collate.default_collate_fn_map
    monkeypatch.setitem(functions, set, lambda batch, **_: batch)
    with pytest.raises(Unfit, match="map of collate functions"):
        RowPlan.of(torch.zeros(2))


def test_what_is_small_does_not_keep_the_batch() -> None:
    plan = RowPlan.of({"large": torch.zeros(5000), "label": 3})
    memory = np.zeros(plan.nbytes(2), np.uint8)
    batch: Any = plan.build(memory, 2, [])
    memory[:] = 0xFF
    assert batch["label"].tolist() == [0, 0]
    assert batch["large"].isnan().all()
    assert batch["large"].untyped_storage().nbytes() == 40_000
