"""What a benchmark case is, and what it reports. Runs nothing itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Measurement = dict[str, Any]
"""What one subprocess reports: plain JSON."""

Round = Mapping[str, Measurement]
"""One round of one case: a measurement for each contender that finished."""


@dataclass(frozen=True, slots=True)
class Context:
    """Where a measurement finds its files, and whether it is only a smoke test."""

    folder: Path
    quick: bool = False


@dataclass(frozen=True, slots=True)
class Interval:
    """A median with the bounds of its bootstrap 95 % confidence interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Row:
    """One contender's figure in one variant of a case, and its ratio to torch."""

    contender: str
    variant: str
    value: Interval
    unit: str
    ratio: Interval | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """A goal set before the measurement, and whether this run reached it."""

    text: str
    got: str
    reached: bool


@dataclass(frozen=True, slots=True)
class Summary:
    """What a case found, ready to be written as JSON."""

    rows: list[Row] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    skipped: str = ""

    def as_json(self) -> dict[str, Any]:
        """The summary as plain dictionaries and lists."""
        return asdict(self)


class Case(ABC):
    """One question put to every contender."""

    kind: str
    name: str
    title: str
    contenders: tuple[str, ...] = ("torch", "stoker", "spdl")
    max_rounds: int | None = None
    in_memory_cgroup: bool = False

    @abstractmethod
    def estimated_seconds(self, contender: str, quick: bool) -> float:
        """Roughly how long one subprocess takes, for the progress bar."""

    @abstractmethod
    def measure(
        self, contender: str, context: Context, baseline: Callable[[], None]
    ) -> Measurement:
        """Measure one contender once. Runs in a fresh subprocess.

        `baseline` marks the moment before the loader exists; the memory case calls it.
        """

    @abstractmethod
    def summarise(self, rounds: Sequence[Round]) -> Summary:
        """Turn the rounds into rows and verdicts. Runs in the parent."""

    def prepare(self, context: Context) -> None:
        """Write the files that the dataset reads. Runs once, in the parent."""
        del context
