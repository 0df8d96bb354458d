"""One stretch of time of one lane. Does not measure, keep or draw it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Kind = Literal["wait", "deliver", "fetch", "collate", "resize", "death"]
"""``wait``: the trainer waits for a batch. ``deliver``: it is put together as tensors over shared
memory. ``fetch``: the dataset works for a batch. ``collate``: it is collated and placed into
shared memory. ``resize``: the loader's knobs are changed. ``death``: a worker ended (a moment).
"""

TRAINER = "trainer"


@dataclass(frozen=True, slots=True)
class Span:
    """What a lane did from ``start_ns`` to ``end_ns`` on the monotonic clock.

    Processes of one machine share that clock, so spans of different lanes can be compared. A worker
    that collates sample by sample fetches in between: its ``fetch`` is shown as one stretch from
    the batch's beginning, as long as the dataset took in all, and its ``collate`` as the rest.
    """

    kind: Kind
    lane: str
    """``trainer`` or ``worker-3``."""
    step: int
    """Position of the batch in its epoch, from 0; -1 where there is none."""
    start_ns: int
    end_ns: int
    bytes: int = 0
    """Of the batch; of a ``death``, private memory of the worker as last reported; of a
    ``resize``, the bound from then on."""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end_ns - self.start_ns) / 1e9


@lru_cache(maxsize=1024)
def worker_lane(worker: int) -> str:
    """The lane of a worker."""
    return f"worker-{worker}"
