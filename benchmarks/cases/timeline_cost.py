"""What the timeline costs the training process: CPU time for the spans of one batch.

It is always on, so this is a part of what trainer_cost shows. Measured is what the engine does for
a batch: two spans of its worker (with the lane's name and the arithmetic on times), two of its own,
and the clock. On Linux reading that clock is no system call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic_ns, process_time
from types import SimpleNamespace
from typing import Any

from benchmarks.case import Case, Context, Measurement, Round, Row, Summary, Target
from benchmarks.intervals import interval, values_of

MOST_MICROSECONDS = 5.0


class TimelineCost(Case):
    """Microseconds of CPU for each batch."""

    kind = "trainer_cost"
    name = "timeline_cost"
    title = "Of that, the timeline's part"
    contenders = ("stoker",)

    def estimated_seconds(self, contender: str, quick: bool) -> float:
        del contender
        return 3.0 if quick else 5.0

    def measure(
        self, contender: str, context: Context, baseline: Callable[[], None]
    ) -> Measurement:
        from stoker.loader.engine import Engine
        from stoker.loader.tasks import Task
        from stoker.loader.worker import Report
        from stoker.timeline import TRAINER, Ring

        del contender
        baseline()
        ring = Ring()
        task = Task(0, (0, [0]), 0)
        engine: Any = SimpleNamespace(_dispatch=SimpleNamespace(tasks={0: task}), _timeline=ring)
        values = {"used": 4096, "fetch_seconds": 0.01, "collate_seconds": 0.001}
        rest = dict.fromkeys(Report._fields) | values | {"began_ns": monotonic_ns()}
        report = Report(**rest)
        count = 20_000 if context.quick else 200_000
        began = process_time()
        for batch in range(count):
            Engine._note_spans(engine, batch % 8, 0, report, report.used)
            asked_ns = monotonic_ns()
            found_ns = monotonic_ns()
            ring.add_delivery(TRAINER, batch, asked_ns, found_ns, monotonic_ns(), 4096)
        spent = process_time() - began
        assert ring.spans()[-1].step == count - 1
        return {"microseconds": spent / count * 1e6}

    def summarise(self, rounds: Sequence[Round]) -> Summary:
        costs = values_of(rounds, "stoker", lambda got: float(got["microseconds"]))
        if not costs:
            return Summary()
        cost = interval(costs)
        target = Target(
            f"below {MOST_MICROSECONDS:g} us a batch",
            f"{cost.median:.1f} us",
            cost.median < MOST_MICROSECONDS,
        )
        return Summary([Row("stoker", "cpu", cost, "us")], [target])


CASE = TimelineCost()
