"""The engine for shared batches: sends parts, and puts batches together from them.

All else (deaths, timeouts, leases, interruptions, batches that are loaded whole) is ``Engine``.
"""

from __future__ import annotations

from typing import Any

from torch._utils import ExceptionWrapper

from stoker.errors import WorkerError
from stoker.loader.dispatch import Dispatch
from stoker.loader.engine import Engine, log
from stoker.loader.parts import PartReport
from stoker.loader.pool import Event
from stoker.loader.row_plan import RowPlan, Texts
from stoker.loader.sharing import Batch, Part, Sharing, Verdict
from stoker.loader.tasks import Delivery, Task
from stoker.loader.wire import Kind


class SharingEngine(Engine):
    """An engine whose workers fill one batch together."""

    _dispatch: Sharing

    def _new_dispatch(self) -> Dispatch:
        terms = self._terms
        self._said_why = False
        return Sharing(
            workers=terms.workers,
            budget=self._arena.nbytes,
            window=terms.window,
            ahead=terms.ahead,
            lead=terms.share,
            in_order=terms.in_order,
            skips=terms.skip_errors,
            region=self._arena.region_bytes,
        )

    def _send_task(self, worker: int, task: Task) -> None:
        if not isinstance(task, Part):
            super()._send_task(worker, task)
            return
        batch = task.batch
        assert isinstance(task.payload, tuple)
        epoch, position, indices = task.payload
        packed = None
        if not task.probe:
            assert isinstance(batch.layout, RowPlan)
            packed = batch.layout.packed
        start, size = (0, 0) if batch.extent is None else batch.extent
        place = (start, size, epoch, position, batch.seq, batch.rows, task.first)
        self._crew.send(worker, Kind.PART, task.seq, *place, indices, packed)

    def _handle(self, event: Event) -> None:
        if event.kind == Kind.PART_DONE:
            self._on_part_done(event.worker, event.message[1], PartReport._make(event.message[2]))
        else:
            super()._handle(event)

    def _on_part_done(self, worker: int, seq: int, report: PartReport) -> None:
        if report.private_bytes:
            self._note_private(worker, report.private_bytes)
        self._host_deaths = 0
        self._unready_deaths.clear()  # loading gets on
        if report.began_ns:
            self._note_spans(worker, report.position, report, 0)
        verdict = Verdict(report.verdict)
        value: Any = report.value
        if verdict is Verdict.PROBED:
            try:
                value = RowPlan.unpack(value)
            except Exception as error:  # noqa: BLE001 - the user's own classes are looked up here
                verdict, value = Verdict.MISFIT, f"{type(error).__name__}: {error}"
        elif verdict is Verdict.FILLED:
            value = report
        self._act(self._dispatch.part_done(worker, seq, verdict, value, report.row))
        if self.wished is not None:
            self._grant_wish()
        if self._dispatch.given_up is not None and not self._said_why:
            self._said_why = True
            log.warning(
                "batches of this loader can't be filled by several workers (%s): from now on each "
                "is loaded by one of them, as with share_batches=False",
                self._dispatch.given_up,
            )

    def _failure_of(self, task: Task) -> WorkerError:
        if isinstance(task, Batch) and task.culprit is not None:
            return super()._failure_of(task.culprit)
        return super()._failure_of(task)

    def _forget(self, task: Task) -> None:
        super()._forget(task)
        if isinstance(task, Batch):
            for part in task.parts:
                super()._forget(part)

    def _batch_of(self, delivery: Delivery) -> object:
        batch = delivery.task
        if not isinstance(batch, Batch) or batch.whole:
            return super()._batch_of(delivery)
        if isinstance(batch.result, ExceptionWrapper):
            return batch.result
        assert isinstance(batch.layout, RowPlan)
        reports: list[PartReport] = [batch.filled[first] for first in sorted(batch.filled)]
        counters = self._counters
        counters.batch(
            sum(report.fetch_seconds for report in reports),
            sum(report.collate_seconds for report in reports),
        )
        for report in reports:
            if report.slowest is not None:
                counters.slow_sample(*report.slowest)
        texts: Texts = [
            [text for piece in pieces for text in piece]
            for pieces in zip(*(report.value for report in reports), strict=True)
        ]
        memory = self._memory_of(delivery, batch.layout.nbytes(batch.rows))
        try:
            return batch.layout.build(memory, batch.rows, texts)
        except Exception:  # noqa: BLE001 - the user's own classes are put together here
            return ExceptionWrapper(where="while a batch of DataLoader workers was put together")
