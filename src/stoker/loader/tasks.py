"""The words of the state machine: a batch on its way, what is to be done, what is delivered.

Data only. Who decides is ``dispatch``, who acts is ``engine``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from stoker.loader.extents import Extent


class State(Enum):
    """Where a batch is."""

    WAITING = "waiting"  # for space or for a worker
    ASSIGNED = "assigned"  # in a worker's queue or hands
    PARKED = "parked"  # its worker waits for a larger extent
    FILLED = "filled"  # finished, not yet delivered
    FAILED = "failed"  # brought down MAX_STRIKES workers


# Commands, tasks and deliveries are made for every batch: plain slots, as freezing them takes
# four times as long to construct. Nobody but this module writes to them.


@dataclass(slots=True, eq=False)
class Task:
    """One batch on its way. ``extent`` is None for memory of the worker's own (overdraft).

    Before any size is known a batch ``asks``: its worker gets no space and asks for what it
    needs, so that the first batches stand side by side and not a guess apart.

    ``outgrown`` are extents that proved too small: the worker still copies out of them, so
    they stay reserved until it is done. An ``abandoned`` task is nobody's batch any more; it
    lives on in its worker's queue only because the worker may still write.
    """

    seq: int
    payload: object
    home: int
    state: State = State.WAITING
    worker: int = -1
    extent: Extent | None = None
    need: int = 0
    strikes: int = 0
    result: object = None
    abandoned: bool = False
    asks: bool = False
    held: bool = False
    outgrown: tuple[Extent, ...] = ()


@dataclass(slots=True)
class Assign:
    """Send a batch to a worker; without an extent it uses memory of its own."""

    worker: int
    task: Task


@dataclass(slots=True)
class Grant:
    """Answer a worker that asked for more space."""

    worker: int
    task: Task


@dataclass(slots=True)
class Recall:
    """Take the next unread batch out of a worker's queue; answer with ``recalled``."""

    worker: int


@dataclass(slots=True)
class Spawn:
    """Start a worker with this id (again)."""

    worker: int


@dataclass(slots=True)
class Retire:
    """Let a worker go; it has nothing left to do. Answer with ``left`` once it is gone."""

    worker: int


@dataclass(slots=True)
class GiveBack:
    """Return the pages of free extents to the system."""

    extents: list[Extent]


Command = Assign | Grant | Recall | Spawn | Retire | GiveBack


class How(Enum):
    """In what form a finished batch reaches the caller."""

    LEASE = "lease"
    COPY = "copy"
    PLAIN = "plain"  # no arena bytes: tiny, failed, or in memory of its own


@dataclass(slots=True)
class Delivery:
    """A finished batch. LEASE: call ``release`` when the caller lets go; COPY: once copied."""

    task: Task
    how: How
