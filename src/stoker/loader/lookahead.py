"""Which batch to load next: the next in line, or one further on that is known to be slow. Pure.

Delivery is in order, so a batch that takes much longer than the others holds everybody up, unless
it is begun as much earlier. For that the sampler is asked for indices further ahead than batches
are loaded, but only once slow samples are known, and only where ``draws_own_stream`` says that
this changes nothing for anybody. How many may be under way early is for ``dispatch`` to say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container
from typing import Any

from stoker.loader.costs import Costs, RunningMedian

REACH = 256
"""Batches that are drawn ahead at most."""
LEEWAY = 2.0
"""A slow batch is begun this many times earlier than it should take."""
_DRAWN_AT_ONCE = 16
"""Batches that are drawn ahead for each one that is submitted: no call may take long."""


class LookAhead:
    """The drawn order of one epoch, as far as it is known.

    Asked for a position again, as after an interruption, it gives the same answer; that a position
    was submitted is known to the caller alone (``submitted``).
    """

    def __init__(self, draw: Callable[[int], Any], costs: Costs, reach: int = REACH) -> None:
        """``draw(position)`` asks the sampler; ``reach`` is 0 where that must not be done early."""
        self._draw = draw
        self._costs = costs
        self._reach = reach
        self._drawn: dict[int, Any] = {}
        self._next = 0  # position that the sampler has next
        self._ended = False
        self._slow: deque[tuple[int, float]] = deque()  # by position, with the seconds it takes
        self._asked_at = 0.0
        self._pace = RunningMedian()  # seconds between two batches of the caller

    def index(self, position: int) -> Any:
        """The indices of the batch at this position. Raises StopIteration at the end."""
        drawn = self._drawn
        while drawn:
            first = next(iter(drawn))
            if first < position:
                del drawn[first]  # submitted: nobody asks for it again
            elif position in drawn:
                return drawn[position]
            else:
                break
        if self._ended:
            raise StopIteration
        index = self._draw(position)
        self._next = position + 1
        return index

    def slow_one(
        self, position: int, submitted: Container[int], now: float, *, room: bool
    ) -> tuple[int, Any] | None:
        """A position beyond the next one, ``position``, to be submitted before it; its indices.

        ``room``: may one be? If not, this is a chance to draw ahead and to see the caller's pace.
        """
        if not self._reach or not self._costs:
            return None
        if self._asked_at:
            self._pace.update(now - self._asked_at)
        self._asked_at = now
        self._draw_ahead(position)
        if not room:
            return None
        slow = self._slow
        while slow and (slow[0][0] <= position or slow[0][0] in submitted):
            slow.popleft()
        pace = self._pace.value
        for at, seconds in slow:
            if (at - position) * pace <= LEEWAY * seconds and at not in submitted:
                return at, self._drawn[at]
        return None

    def _draw_ahead(self, position: int) -> None:
        for _ in range(_DRAWN_AT_ONCE):
            at = max(self._next, position)
            if self._ended or at > position + self._reach:
                return
            try:
                index = self._draw(at)
            except StopIteration:
                self._ended = True
                return
            self._drawn[at] = index
            self._next = at + 1
            seconds = self._costs.of(index)
            if seconds:
                self._slow.append((at, seconds))
