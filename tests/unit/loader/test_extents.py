"""Extents never overlap, none is lost, and the front of the space is used over and over."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from stoker.loader.extents import PAGE_BYTES, Extent, ExtentMap, page_ceil, page_floor

PAGE = PAGE_BYTES


def check(space: ExtentMap, taken: list[Extent]) -> None:
    """Taken and free extents partition the space, and free neighbours have merged."""
    free = space.blocks()
    assert space.free_bytes == space.capacity - sum(extent.size for extent in taken)
    at = 0
    for piece in sorted(taken + free):
        assert piece.start == at
        assert piece.size > 0
        assert piece.size % PAGE == 0
        at = piece.end
    assert at == space.region
    assert all(left.end < right.start for left, right in pairwise(free))


@given(
    pages=st.integers(0, 40),
    steps=st.lists(st.tuples(st.sampled_from("aaft"), st.integers(0, 12 * PAGE)), max_size=60),
)
def test_any_sequence_of_events_partitions_the_space(
    pages: int, steps: list[tuple[str, int]]
) -> None:
    space = ExtentMap(pages * PAGE + 17)
    taken: list[Extent] = []
    for step, number in steps:
        if step == "a":
            largest = max((block.size for block in space.blocks()), default=0)
            extent = space.allocate(number)
            assert (extent is None) == (max(number, 1) > largest)
            if extent is not None:
                assert extent.size == page_ceil(max(number, 1))
                taken.append(extent)
        elif taken and step == "f":
            space.free(taken.pop(number % len(taken)))
        elif taken:
            extent = taken.pop(number % len(taken))
            taken.append(space.trim(extent, number))
            assert taken[-1].start == extent.start
            assert taken[-1].size == min(extent.size, page_ceil(max(number, 1)))
        check(space, taken)


@given(
    steps=st.lists(st.tuples(st.sampled_from("aafr"), st.integers(0, 12 * PAGE)), max_size=60),
)
def test_a_capacity_that_changes_binds_at_once_and_nothing_is_lost(
    steps: list[tuple[str, int]],
) -> None:
    space = ExtentMap(10 * PAGE, 20 * PAGE)
    taken: list[Extent] = []
    touched: set[int] = set()  # pages that cost memory
    for step, number in steps:
        if step == "a":
            extent = space.allocate(number)
            if extent is not None:
                assert extent.end <= space.capacity
                taken.append(extent)
                touched |= set(range(extent.start, extent.end, PAGE))
        elif step == "f":
            if taken:
                space.free(taken.pop(number % len(taken)))
        else:
            space.resize(2 * number)
            assert space.capacity == page_floor(2 * number) <= space.region or (
                space.capacity == space.region
            )
        for piece in space.beyond:
            gone = set(range(piece.start, piece.end, PAGE))
            assert not any(gone & set(range(t.start, t.end, PAGE)) for t in taken)
            touched -= gone
        space.beyond.clear()
        check(space, taken)
        held = {page for extent in taken for page in range(extent.start, extent.end, PAGE)}
        assert all(page < space.capacity for page in touched - held), "free pages cost memory"


def test_while_more_is_held_than_a_lowered_capacity_warm_pages_go_too() -> None:
    space = ExtentMap(10 * PAGE)
    low, high = space.allocate(4 * PAGE), space.allocate(6 * PAGE)
    assert low is not None
    assert high is not None
    space.free(low)
    space.resize(5 * PAGE)
    assert space.free_bytes == -PAGE
    assert space.beyond == [low]
    assert space.allocate(PAGE) is None
    space.beyond.clear()
    space.free(high)
    assert space.beyond == [Extent(5 * PAGE, 5 * PAGE)]
    assert space.allocate(5 * PAGE) == Extent(0, 5 * PAGE)


def test_the_lowest_address_is_handed_out_first() -> None:
    space = ExtentMap(100 * PAGE)
    first, wall, second, _ = (space.allocate(PAGE) for _ in range(4))
    assert first is not None
    assert wall is not None
    assert second is not None
    space.free(first)
    space.free(second)
    assert space.allocate(PAGE) == first
    assert space.allocate(PAGE) == second


def test_untouched_space_comes_last() -> None:
    """A loader that needs two extents touches the pages of two, however large the arena is."""
    space = ExtentMap(1000 * PAGE)
    held = space.allocate(PAGE)
    for _ in range(100):
        extent = space.allocate(PAGE)
        assert held is not None
        assert extent is not None
        assert extent.end <= 2 * PAGE
        space.free(held)
        held = extent


def test_nothing_is_handed_out_of_no_space() -> None:
    assert ExtentMap(0).allocate(0) is None
    assert ExtentMap(PAGE - 1).allocate(1) is None


def test_rounding_is_to_whole_pages() -> None:
    assert [page_ceil(n) for n in (0, 1, PAGE, PAGE + 1)] == [0, PAGE, PAGE, 2 * PAGE]
    assert [page_floor(n) for n in (0, 1, PAGE, 2 * PAGE - 1)] == [0, 0, PAGE, PAGE]
