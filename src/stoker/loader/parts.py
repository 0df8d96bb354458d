"""The worker's side of shared batches: loads some rows of a batch into their places.

One part at a time. It reports what became of it and decides nothing: a sample that does not fit
the plan, or that raises, ends the part, and the trainer says what happens to the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch._utils import ExceptionWrapper

from stoker.loader.arena import Bytes
from stoker.loader.fetch import At, Job, wrap_exception
from stoker.loader.row_plan import RowPlan, Rows, Unfit
from stoker.loader.sharing import Verdict

BeginSample = Callable[[int, int, int], None]
"""Called with the epoch, the position of the batch and the row before each sample is loaded."""


class PartReport(NamedTuple):
    """What became of a part. Travels as a bare tuple, as ``Report`` does."""

    verdict: int
    value: Any
    """The packed plan, the texts, words about what does not fit, or the exception."""
    row: int
    fetch_seconds: float
    collate_seconds: float
    slowest: tuple[Any, float] | None
    position: int = -1
    """Of the batch it belongs to; -1 if the part was not begun."""
    began_ns: int = 0
    private_bytes: int = 0
    looked_at_id: bool = False


def not_begun(error: ExceptionWrapper, first: int) -> PartReport:
    """A part that was not even begun."""
    return PartReport(int(Verdict.RAISED), error, first, 0.0, 0.0, None)


class PartFiller:
    """Fills parts. Keeps the sample of a probe, so that its row need not be loaded twice."""

    def __init__(self, job: Job, arena: Bytes, label: str, begin_sample: BeginSample) -> None:
        self._dataset = job.dataset
        self._arena = arena
        self._label = label
        self._begin = begin_sample
        self._plan: RowPlan | None = None
        self._kept: tuple[int, Any] | None = None  # a batch, and the sample of its first row
        self._fetch_seconds = 0.0
        self._slowest: tuple[Any, float] | None = None

    def fill(self, message: tuple[Any, ...]) -> PartReport:
        """Load the rows of a part."""
        _, _, start, size, epoch, position, batch, rows, first, indices, packed = message
        began_ns = time.monotonic_ns()
        began = time.perf_counter()
        self._fetch_seconds = 0.0
        self._slowest = None
        verdict, row = Verdict.FILLED, first
        value: Any = None
        kept, self._kept = self._kept, None
        try:
            if packed is None:
                sample = self._load((epoch, position, first), indices[0])
                plan = RowPlan.of(sample)
                self._kept = batch, sample
                verdict, value = Verdict.PROBED, plan.packed
            else:
                into = Rows(
                    self._plan_of(packed),
                    self._arena[start : start + size],
                    rows,
                    first,
                    len(indices),
                )
                for at, index in enumerate(indices):
                    row = first + at
                    if row == 0 and kept is not None and kept[0] == batch:
                        sample, kept = kept[1], None
                    else:
                        sample = self._load((epoch, position, row), index)
                    into.put(sample, at)
                    del sample
                value = into.texts
        except Unfit as misfit:
            index = indices[row - first]
            verdict, value = Verdict.MISFIT, f"index {index!r:.100}: {misfit}"
        except Exception as error:  # noqa: BLE001 - it reaches the caller of the loader
            verdict, value = Verdict.RAISED, wrap_exception(error, self._label)
        took = time.perf_counter() - began
        return PartReport(
            int(verdict),
            value,
            row,
            self._fetch_seconds,
            took - self._fetch_seconds,
            self._slowest,
            position,
            began_ns,
        )

    def _load(self, place: tuple[int, int, int], index: Any) -> Any:
        self._begin(*place)
        began = time.perf_counter()
        try:
            return self._dataset[index]
        except Exception as error:
            raise At(index) from error
        finally:
            took = time.perf_counter() - began
            self._fetch_seconds += took
            if self._slowest is None or took > self._slowest[1]:
                self._slowest = index, took

    def _plan_of(self, packed: bytes) -> RowPlan:
        if self._plan is None or self._plan.packed != packed:
            self._plan = RowPlan.unpack(packed)
        return self._plan


class RowByRow:
    """The indices of a batch that is loaded whole, seeded by row as those of a shared one are."""

    def __init__(
        self, indices: Sequence[Any], epoch: int, position: int, begin: BeginSample
    ) -> None:
        self._indices = indices
        self._epoch = epoch
        self._position = position
        self._begin = begin

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Any]:
        for row, index in enumerate(self._indices):
            self._begin(self._epoch, self._position, row)
            yield index
