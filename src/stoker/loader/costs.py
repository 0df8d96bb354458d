"""Which samples are known to cost far more than the others. Pure: no clock, no process.

``Usual`` says from when on a sample is slow and lives where samples are timed; ``Costs`` remembers
the slow ones from epoch to epoch and lives with the loader. When to load them is not decided here
(see ``lookahead``).
"""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

TIMES_A_SAMPLE = 8.0
"""A sample is slow if it takes this many times as long as the usual one,"""
TIMES_A_BATCH = 1.0
"""and this many times as long as a whole usual batch (what is less, loading ahead absorbs),"""
LEAST_SECONDS = 1e-3
"""and at least this long: below, a busy machine makes any sample look slow now and then."""
MOST_ENTRIES = 100_000
_SMALLEST_STEP = 0.05


class RunningMedian:
    """Where as many values are above as below, without keeping any of them.

    Each value moves it a step up or down, at first a large one: one value in twenty that is ten
    times as large does not shift it.
    """

    __slots__ = ("_count", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self._count = 0

    def update(self, value: float) -> None:
        """Another value, not negative."""
        self._count += 1
        if not self.value:
            self.value = value
            return
        step = 1.0 + max(_SMALLEST_STEP, 1 / self._count)
        self.value *= step if value > self.value else 1 / step


class Usual:
    """What samples and batches of one worker usually take, and so which samples are slow."""

    __slots__ = ("_batch", "_sample", "limit")

    def __init__(self) -> None:
        self.limit = float("inf")
        """What takes longer is slow. Nothing is before the first batch, which is never usual."""
        self._sample = RunningMedian()
        self._batch = RunningMedian()

    def batch(self, total: float, worst: float, count: int) -> None:
        """A batch of ``count`` samples took ``total`` seconds, its slowest one ``worst``."""
        if not count:
            return
        self._sample.update((total - worst) / (count - 1) if count > 1 else total)
        self._batch.update(total)
        self.limit = max(
            LEAST_SECONDS,
            TIMES_A_SAMPLE * self._sample.value,
            TIMES_A_BATCH * self._batch.value,
        )


class Costs:
    """Seconds by index, of slow samples only; the longest unseen is forgotten first.

    Indices that are neither numbers, strings nor tuples of such are ignored: others may not be
    hashable, or be equal to themselves alone.
    """

    def __init__(self, most: int = MOST_ENTRIES) -> None:
        self._most = most
        self.known: dict[Any, float] = {}
        """Seconds by index. Always this dictionary: whoever asks for every batch may keep it."""

    def __len__(self) -> int:
        return len(self.known)

    def note(self, indices: Any, slow: Iterable[tuple[Any, float]]) -> None:
        """A batch was loaded, and these of its samples were slow.

        One that was known to be slow and was not this time counts half as much, and is forgotten
        after a few such times.
        """
        now = dict(pair for pair in slow if _can_be_kept(pair[0]))
        for index in self._known_in(indices):
            if index not in now:
                self._halve(index)
        for index, seconds in now.items():
            self.known.pop(index, None)  # to the end: the order is that of the last visit
            self.known[index] = seconds
        while len(self.known) > self._most:
            del self.known[next(iter(self.known))]

    def of(self, indices: Any) -> float:
        """Seconds that the slow samples of a batch will take together; 0.0 if none is known."""
        return sum(self.known[index] for index in self._known_in(indices))

    def _halve(self, index: Any) -> None:
        left = self.known[index] / 2
        if left < LEAST_SECONDS:
            del self.known[index]
        else:
            self.known[index] = left

    def _known_in(self, indices: Any) -> list[Any]:
        """The known ones of a batch: a list of indices, or a single index."""
        known = self.known
        if not known:
            return []
        if not isinstance(indices, list):
            indices = (indices,)
        try:
            if known.keys().isdisjoint(indices):
                return []
        except TypeError:  # not hashable: the others of the batch may be known all the same
            indices = [index for index in indices if _can_be_kept(index)]
        return [index for index in dict.fromkeys(indices) if index in known]


def _can_be_kept(index: object) -> bool:
    if isinstance(index, tuple):
        return all(map(_can_be_kept, index))
    return isinstance(index, (int, str, bytes, Integral))
