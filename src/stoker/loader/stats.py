"""What a loader says about itself: a frozen snapshot, and the counters it is taken from."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from stoker.loader.costs import Costs
from stoker.timeline import Ring

_RECENT = 512
_SLOWEST = 10
_LISTED_SKIPS = 1000


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles in seconds over the most recent batches; all 0.0 before the first."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, seconds: list[float]) -> Quantiles:
        """Nearest-rank quantiles of a list (sorted here)."""
        if not seconds:
            return cls()
        ordered = sorted(seconds)
        last = len(ordered) - 1
        p50, p90, p99 = (ordered[round(q * last)] for q in (0.5, 0.9, 0.99))
        return cls(p50, p90, p99, ordered[last])


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """One moment of one loader. Bytes are bytes, times are seconds."""

    name: str
    worker_kind: str
    """``process``, ``thread``, ``torch`` (a fallback) or ``main`` (``num_workers=0``)."""
    fallback: str | None
    """Why something else than asked for runs, or None."""
    workers: int
    """Workers alive now."""
    worker_pids: tuple[int, ...]
    delivered: int
    """Batches handed to the caller since the loader was made."""
    ready: int
    """Batches that are finished and wait for the caller."""
    in_flight_bytes: int
    """Arena bytes reserved, filled or held by the caller now.

    More than ``arena_bytes`` only after that was lowered, until the caller lets go.
    """
    in_flight_peak_bytes: int
    """The most there ever were, in any iteration."""
    leased_bytes: int
    """The part of ``in_flight_bytes`` that the caller still holds."""
    arena_bytes: int
    """The bound: what the arena may hold at most now (of the last iteration, if none runs)."""
    overdraft_bytes: int
    """Bytes now held outside the arena because a batch could not be placed in it."""
    overdraft_batches: int
    copied_batches: int
    """Batches copied out on delivery because the caller holds nearly all of the arena."""
    worker_private_bytes: int
    """Private memory of all workers, as they last reported it."""
    wait_seconds: float
    """Time the caller spent waiting in ``next()``."""
    fetch_seconds: Quantiles
    """Per batch: the dataset's part."""
    collate_seconds: Quantiles
    """Per batch: collating and placing into shared memory."""
    slowest: tuple[tuple[Any, float], ...]
    """``(index, seconds)`` of the slowest samples, slowest first."""
    early_batches: int
    """Batches begun before their turn, because they hold samples known to be slow."""
    deaths: int
    """Workers that died and were replaced."""
    skipped: int
    """Samples dropped by ``on_error="skip"``."""
    skips: tuple[tuple[Any, str], ...]
    """``(index, error)`` of the dropped samples (the first 1000)."""


@dataclass(slots=True)
class Counters:
    """The loader's running counters; not thread-safe, written by the consumer's thread."""

    delivered: int = 0
    in_flight_peak_bytes: int = 0
    arena_bytes: int = 0
    wait_seconds: float = 0.0
    overdraft_batches: int = 0
    copied_batches: int = 0
    early_batches: int = 0
    deaths: int = 0
    skipped: int = 0
    skips: list[tuple[Any, str]] = field(default_factory=list)
    fetch: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    collate: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    costs: Costs = field(default_factory=Costs)
    timeline: Ring = field(default_factory=Ring)
    _slow_floor: float = 0.0
    _slow: dict[Any, float] = field(default_factory=dict)

    def batch(self, fetch: float, collate: float) -> None:
        """Note what one batch cost."""
        self.fetch.append(fetch)
        self.collate.append(collate)

    def slow_sample(self, index: Any, seconds: float) -> None:
        """Remember the sample if it is among the slowest seen."""
        if seconds <= self._slow_floor:
            return
        try:
            hash(index)
            key = index
        except TypeError:  # also a tuple that holds a list, which says that it is hashable
            key = repr(index)
        if self._slow.get(key, 0.0) >= seconds:
            return
        self._slow[key] = seconds
        if len(self._slow) > 4 * _SLOWEST:
            self._slow = dict(self.slowest())
            self._slow_floor = min(self._slow.values())

    def slowest(self) -> list[tuple[Any, float]]:
        """The slowest samples, slowest first."""
        return heapq.nlargest(_SLOWEST, self._slow.items(), key=lambda pair: pair[1])

    def skip(self, index: Any, error: str) -> None:
        """Count one dropped sample, and list it while the list is short."""
        self.skipped += 1
        if len(self.skips) < _LISTED_SKIPS:
            self.skips.append((index, error))
