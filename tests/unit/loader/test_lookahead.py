"""A known slow batch is found in time; every position is drawn once and given out unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stoker.loader.costs import Costs
from stoker.loader.lookahead import LEEWAY, LookAhead

STEP = 0.125  # a fraction that floats add up exactly


def known(*indices: int, seconds: float = 10.0) -> Costs:
    costs = Costs()
    costs.note([], [(index, seconds) for index in indices])
    return costs


class Sampler:
    """One index a batch; knows how far it was drawn."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.asked: list[int] = []

    def draw(self, position: int) -> Any:
        self.asked.append(position)
        if position >= self.count:
            raise StopIteration
        return [position]


def play(
    look: LookAhead, room: Callable[[], bool] = lambda: True
) -> tuple[list[int], dict[int, int]]:
    """Submit one batch a step to the end: the order of submission, and how early each one was."""
    order: list[int] = []
    early: dict[int, int] = {}
    submitted: set[int] = set()
    line = 0
    while True:
        while line in submitted:
            line += 1
        found = look.slow_one(line, submitted, len(order) * STEP, room=room())
        if found is not None:
            position, index = found
            early[position] = position - line
        else:
            try:
                position, index = line, look.index(line)
            except StopIteration:
                return order, early
        assert index == [position]
        assert position not in submitted
        submitted.add(position)
        order.append(position)


@pytest.mark.parametrize("reach", [0, 5, 50, 500])
def test_every_position_is_submitted_once_and_drawn_once(reach: int) -> None:
    sampler = Sampler(100)
    order, early = play(LookAhead(sampler.draw, known(3, 4, 5, 40, 77, 99), reach))
    assert sorted(order) == list(range(100))
    assert [p for p in sampler.asked if p < 100] == list(range(100))
    assert bool(early) == bool(reach)


def test_a_slow_batch_is_submitted_as_early_as_it_takes_with_some_leeway() -> None:
    _, early = play(LookAhead(Sampler(400).draw, known(300, seconds=20 * STEP)))
    assert early[300] == pytest.approx(20 * LEEWAY, abs=6)


def test_a_slower_batch_further_on_comes_first() -> None:
    costs = known(300, seconds=5 * STEP)
    costs.note([], [(320, 50 * STEP)])
    order, _ = play(LookAhead(Sampler(400).draw, costs))
    assert order.index(320) < order.index(300) < order.index(299)


def test_without_room_nothing_is_submitted_early() -> None:
    order, early = play(LookAhead(Sampler(100).draw, known(50)), room=lambda: False)
    assert order == list(range(100))
    assert not early


def test_while_nothing_is_known_to_be_slow_nothing_is_drawn_early() -> None:
    sampler = Sampler(100)
    look = LookAhead(sampler.draw, Costs())
    assert look.slow_one(0, (), 0.0, room=True) is None
    assert sampler.asked == []
    assert look.index(0) == [0]
    assert sampler.asked == [0]


def test_a_sampler_that_must_not_be_drawn_early_is_not() -> None:
    sampler = Sampler(100)
    look = LookAhead(sampler.draw, known(5), reach=0)
    assert look.slow_one(0, (), 0.0, room=True) is None
    assert sampler.asked == []


def test_drawing_ahead_is_bounded() -> None:
    sampler = Sampler(10_000)
    look = LookAhead(sampler.draw, known(9_999), reach=30)
    for call in range(100):
        assert look.slow_one(7, (), float(call), room=True) is None
    assert max(sampler.asked) == 37


def test_asked_again_after_an_interruption_it_gives_the_same_answer() -> None:
    sampler = Sampler(100)
    look = LookAhead(sampler.draw, known(9))
    first = look.slow_one(2, (), 1.0, room=True)
    assert first == (9, [9])
    assert look.slow_one(2, (), 1.1, room=True) == first
    assert look.index(2) == look.index(2) == [2]
    assert look.slow_one(3, {9}, 1.2, room=True) is None


def test_an_interruption_while_drawing_loses_no_position() -> None:
    sampler = Sampler(30)
    interrupted = []

    def draw(position: int) -> Any:
        if position in (3, 11) and position not in interrupted:
            interrupted.append(position)
            raise KeyboardInterrupt
        return sampler.draw(position)

    look = LookAhead(draw, known(20))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            look.slow_one(0, (), 0.0, room=True)
    order, early = play(look)
    assert sorted(order) == list(range(30))
    assert 20 in early
