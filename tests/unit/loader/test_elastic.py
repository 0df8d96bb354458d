from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

import stoker
from stoker.errors import ConfigError
from stoker.loader.elastic import ElasticSampler, Segment, extended, positions, share


def ranks(length: int, world: int, **options: Any) -> list[ElasticSampler[int]]:
    return [ElasticSampler(range(length), world, rank, **options) for rank in range(world)]  # type: ignore[arg-type]


def epoch_in_segments(
    length: int, plan: Sequence[tuple[int, float]], **options: Any
) -> tuple[list[int], int]:
    """Indices consumed over all ranks if the world changes as planned, and the last world.

    Each entry is a world size and the part of its pass that it consumes; the last consumes all.
    """
    epoch = options.pop("epoch", 0)
    state: dict[str, Any] | None = None
    seen: list[int] = []
    for at, (world, part) in enumerate(plan):
        samplers = ranks(length, world, **options)
        for sampler in samplers:
            sampler.set_epoch(epoch)
            if state is not None:
                sampler.load_state_dict(state)
        count = len(samplers[0]) if at == len(plan) - 1 else int(part * len(samplers[0]))
        dealt = [list(sampler) for sampler in samplers]
        assert {len(indices) for indices in dealt} == {len(samplers[0])}
        seen += [index for indices in dealt for index in indices[:count]]
        states = [sampler.state_dict(delivered=count) for sampler in samplers]
        assert all(other == states[0] for other in states)
        state = json.loads(json.dumps(states[0]))
    return seen, plan[-1][0]


OPTIONS = {
    "shuffle": st.booleans(),
    "seed": st.integers(0, 2**31),
    "drop_last": st.booleans(),
}


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 5), st.fixed_dictionaries(OPTIONS))
def test_it_gives_what_torchs_gives(
    length: int, world: int, epoch: int, options: dict[str, Any]
) -> None:
    for rank in range(world):
        theirs = DistributedSampler(range(length), world, rank, **options)  # type: ignore[arg-type,var-annotated]
        ours = ElasticSampler(range(length), world, rank, **options)  # type: ignore[arg-type,var-annotated]
        theirs.set_epoch(epoch), ours.set_epoch(epoch)
        assert (len(ours), ours.num_samples, ours.total_size) == (
            len(theirs),
            theirs.num_samples,
            theirs.total_size,
        )
        assert list(ours) == list(theirs)


@settings(deadline=None)
@given(
    st.integers(1, 60),
    st.integers(1, 9),
    st.lists(st.floats(0, 1), max_size=4),
    st.fixed_dictionaries(OPTIONS),
)
def test_resumed_in_the_same_world_it_still_gives_what_torchs_gives(
    length: int, world: int, parts: list[float], options: dict[str, Any]
) -> None:
    for rank in range(world):
        theirs = list(DistributedSampler(range(length), world, rank, **options))  # type: ignore[arg-type,var-annotated]
        state: dict[str, Any] | None = None
        seen: list[int] = []
        for part in [*parts, 1.0]:
            ours = ElasticSampler(range(length), world, rank, **options)  # type: ignore[arg-type,var-annotated]
            if state is not None:
                ours.load_state_dict(state)
            assert len(ours) == len(theirs) - len(seen)
            count = int(part * len(ours))
            seen += list(ours)[:count]
            state = ours.state_after(count)
            assert len(state["segments"]) <= 1
        assert seen == theirs


@settings(deadline=None)
@given(
    st.integers(1, 200),
    st.lists(st.tuples(st.integers(1, 9), st.floats(0, 1)), min_size=1, max_size=5),
    st.integers(0, 3),
    st.fixed_dictionaries(OPTIONS),
)
def test_over_all_worlds_every_index_comes_exactly_once(
    length: int, plan: list[tuple[int, float]], epoch: int, options: dict[str, Any]
) -> None:
    seen, last = epoch_in_segments(length, plan, epoch=epoch, **options)
    counts = Counter(seen)
    if options["drop_last"]:
        assert max(counts.values(), default=1) == 1
        assert length - len(counts) < last
    else:
        assert len(counts) == length
        # Padding: the last step of the world that finished the epoch, and of no other.
        assert sum(counts.values()) - length < max(world for world, _ in plan)


@given(
    st.integers(1, 10**12),
    st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 10**6)), max_size=6),
)
def test_the_arithmetic_alone(length: int, steps: list[tuple[int, int]]) -> None:
    history: tuple[Segment, ...] = ()
    front = 0
    for world, wanted in steps:
        count = min(wanted, share(length, front, world, drop_last=False))
        # One row for each step: a step takes the next `world` places, whole and in order.
        if count:
            first = [positions(front, world, rank, count)[0] for rank in (0, world - 1)]
            last = [positions(front, world, rank, count)[-1] for rank in (0, world - 1)]
            assert first == [front, front + world - 1]
            assert last == [front + world * (count - 1), front + world * count - 1]
        history = extended(history, world, count)
        front += world * count
        assert sum(world * consumed for world, consumed in history) == front
        assert front < length + max(world for world, _ in steps)
    assert len(history) <= len(steps)
    assert all(a.world != b.world for a, b in pairwise(history))


def test_four_then_two_then_three_ranks_share_one_epoch() -> None:
    seen, _ = epoch_in_segments(103, [(4, 0.5), (2, 0.5), (3, 1.0)], seed=7)
    assert set(seen) == set(range(103))
    # 4 ranks took 13 each and left 51, 2 took 13 each and left 25: by 3 that is 9, 9 and 7 + 2.
    assert len(seen) == 103 + 2


def test_length_and_torchs_attributes_are_those_of_the_segment() -> None:
    state = ranks(100, 4)[0].state_dict(delivered=10)
    sampler = ranks(100, 3)[1]
    assert len(sampler) == 34
    sampler.load_state_dict(state)
    assert (len(sampler), sampler.num_samples, sampler.total_size) == (20, 20, 60)
    sampler.set_epoch(1)
    assert (len(sampler), sampler.total_size) == (34, 102)


def test_set_epoch_to_the_same_epoch_keeps_what_was_consumed() -> None:
    state = ranks(40, 4, seed=3)[0].state_dict(delivered=5)
    sampler = ranks(40, 2, seed=0)[0]
    sampler.load_state_dict(state)
    assert (sampler.seed, sampler.epoch) == (3, 0)
    sampler.set_epoch(0)
    assert len(list(sampler)) == 10


def test_the_pass_after_a_finished_one_is_whole_also_without_set_epoch() -> None:
    sampler = ranks(40, 2, shuffle=False)[0]
    sampler.load_state_dict(ranks(40, 4, shuffle=False)[0].state_dict(delivered=5))
    assert list(sampler) == list(range(20, 40, 2))
    assert list(sampler) == list(range(0, 40, 2))
    assert len(sampler) == 20


def test_a_pass_that_was_not_finished_begins_again_where_it_began() -> None:
    sampler = ranks(40, 2, shuffle=False)[0]
    sampler.load_state_dict(ranks(40, 4, shuffle=False)[0].state_dict(delivered=5))
    drawing = iter(sampler)
    assert next(drawing) == 20
    assert next(iter(sampler)) == 20


def test_an_old_pass_that_ends_late_does_not_end_the_new_one() -> None:
    sampler = ranks(40, 2, shuffle=False)[0]
    old = iter(sampler)
    next(old)
    sampler.load_state_dict(sampler.state_after(15))
    assert len(list(old)) == 19
    assert list(sampler) == list(range(30, 40, 2))


def test_where_nothing_is_said_of_deliveries_what_was_drawn_counts() -> None:
    sampler = ranks(40, 2)[0]
    sampler.load_state_dict({**sampler.state_dict(), "segments": [[4, 3]]})
    assert sampler.state_dict()["segments"] == [[4, 3]]
    drawing = iter(sampler)
    next(drawing)
    assert sampler.state_dict()["segments"] == [[4, 3], [2, 1]]
    assert sampler.state_dict(delivered=0)["segments"] == [[4, 3]]
    assert len(list(drawing)) == 13
    # At the end until another pass begins: only then is it known that there is one.
    assert sampler.state_dict()["segments"] == [[4, 3], [2, 14]]
    iter(sampler)
    assert sampler.state_dict()["segments"] == [[4, 3], [2, 14]]
    drawing = iter(sampler)
    next(drawing)
    assert sampler.state_dict()["segments"] == [[2, 1]]


def test_a_pass_that_was_left_counts_for_nothing() -> None:
    sampler = ranks(40, 2)[0]
    drawing = iter(sampler)
    next(drawing)
    other = iter(sampler)
    next(other), next(other)
    del drawing
    assert sampler.state_dict()["segments"] == [[2, 2]]
    del other
    assert sampler.state_dict()["segments"] == []


def test_a_loader_may_hold_on_to_the_origin_of_its_pass() -> None:
    sampler = ranks(40, 2)[0]
    sampler.set_epoch(4)
    sampler.load_state_dict({**sampler.state_dict(), "segments": [[4, 3]]})
    list(sampler)
    origin = sampler.state_after(0)
    sampler.set_epoch(5)
    state = sampler.state_after(6, origin)
    assert (state["epoch"], state["segments"]) == (4, [[4, 3], [2, 6]])
    assert sampler.state_after(6)["segments"] == [[2, 6]]


@pytest.mark.parametrize("samples", [-1, 21, 2.0, None])
def test_a_number_that_this_rank_can_not_have_got_is_refused(samples: Any) -> None:
    with pytest.raises(ConfigError, match="0 to 20: what rank 1 of 2 has"):
        ranks(40, 2)[1].state_after(samples)


def test_states_of_ranks_that_did_not_step_together_are_refused() -> None:
    states = [s.state_dict(delivered=n) for s, n in zip(ranks(40, 4), (5, 5, 6, 5), strict=True)]
    sampler = ranks(40, 2)[0]
    with pytest.raises(ConfigError, match="rank 2's is not rank 0's"):
        sampler.load_state_dict(states)
    with pytest.raises(ConfigError, match="at least one"):
        sampler.load_state_dict([])
    sampler.load_state_dict([states[0], states[1], states[3]])
    assert len(sampler) == 10


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"length": 41}, "this one had 41"),
        ({"shuffle": False}, "shuffle=True as here"),
        ({"version": 2}, "version 1"),
        ({"segments": [[4, 11]]}, "4 ranks can't have consumed 11 samples each of the 40"),
        ({"segments": [[4, 10], [2, 1]]}, "of the 0 that were left"),
        ({"segments": [[0, 1]]}, "0 ranks can't"),
        ({"segments": [[4, -1]]}, "consumed -1"),
        ({"segments": 3}, "what state_dict"),
        ({"seed": None}, "what state_dict"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    change: dict[str, Any], words: str
) -> None:
    sampler = ranks(40, 2)[0]
    before = sampler.state_dict()
    with pytest.raises(ConfigError, match=words):
        sampler.load_state_dict({**before, **change})
    assert sampler.state_dict() == before
    with pytest.raises(ConfigError, match="what state_dict"):
        sampler.load_state_dict({})


def test_a_finished_epoch_leaves_nothing_and_the_next_is_whole() -> None:
    state = ranks(10, 4)[0].state_dict(delivered=3)
    sampler = ranks(10, 3)[2]
    sampler.load_state_dict(state)
    assert (len(sampler), list(sampler)) == (0, [])
    sampler.set_epoch(1)
    assert len(sampler) == 4


def test_it_feeds_a_loader_that_draws_ahead() -> None:
    sampler = ElasticSampler(range(24), 2, 0, shuffle=False)  # type: ignore[arg-type,var-annotated]
    loader = stoker.DataLoader(range(24), 3, sampler=sampler, num_workers=1)  # type: ignore[arg-type,var-annotated]
    batches = iter(loader)
    got = next(batches).tolist() + next(batches).tolist()
    state = sampler.state_after(len(got))  # whatever was drawn meanwhile
    del batches
    rest = []
    for rank in range(3):
        other = ElasticSampler(range(24), 3, rank, shuffle=False)  # type: ignore[arg-type,var-annotated]
        other.load_state_dict(state)
        rest += list(other)
    assert got == [0, 2, 4, 6, 8, 10]
    assert sorted(rest) == list(range(12, 24))
