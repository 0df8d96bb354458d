"""What an engine is given and gives: bounds and rules, a crew, and what ``take`` finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch._utils import ExceptionWrapper

from stoker.loader.platform import say_once
from stoker.loader.pool import Event
from stoker.loader.streams import Saved
from stoker.machine.limits import memory_room
from stoker.units import format_bytes


class Crew(Protocol):
    """What the engine needs of a pool, of processes or of threads."""

    handles: dict[int, Any]

    def start(self) -> None: ...
    def spawn(self, worker: int) -> None: ...
    def send(self, worker: int, *message: Any) -> None: ...
    def recall(self, worker: int) -> tuple[Any, ...] | None: ...
    def forget(self, worker: int) -> None: ...
    def wake(self) -> None: ...
    def wait(self, timeout: float) -> None: ...
    def collect(self) -> list[Event]: ...
    def restart(self) -> None: ...
    def check(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Terms:
    """How one iterator loads: bounds and rules, no objects of the user's."""

    workers: int
    window: int
    ahead: int
    budget_bytes: int
    in_order: bool
    pinned: bool
    iterable: bool
    timeout: float
    cautious: bool
    available_bytes: int
    most_bytes: int = 0
    """What the budget may be raised to later."""
    share: int = 0
    """With shared batches: how many are begun beyond the caller's. 0: batches are not shared."""
    skip_errors: bool = False


class Timed(Protocol):
    """When a worker loaded something, by the clock that all processes share."""

    @property
    def began_ns(self) -> int: ...
    @property
    def fetch_seconds(self) -> float: ...
    @property
    def collate_seconds(self) -> float: ...


class Nothing:
    """A delivered batch of which every sample was skipped."""


@dataclass(frozen=True, slots=True)
class Unsendable:
    """A batch that the dataset delivers but no process can send."""

    payload: object
    error: ExceptionWrapper


class Taken(NamedTuple):
    """What ``take`` found: a batch, Nothing, Unsendable, or an error to raise."""

    position: int
    batch: Any
    origin: tuple[int, Saved] | None = None
    """Of an iterable dataset: which worker loaded it, and where it stood then."""


def plan_budget(memory: int | None, world: int) -> tuple[int, int]:
    """Arena bytes, and what was available to this process when they were chosen.

    Without a wish: two fifths of what this process may use right now, after its local peers
    have taken their equal share. The rest is for the workers, the model and everybody else.
    """
    room = memory_room()
    available = room.available_bytes // max(1, world)
    if memory is None:
        return available * 2 // 5, available
    if memory > room.limit_bytes:
        say_once(
            f"memory={format_bytes(memory)} is more than the {format_bytes(room.limit_bytes)} that "
            "this process may use: taken as that"
        )
    return min(memory, room.limit_bytes), available
