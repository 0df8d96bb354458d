"""Spans as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing. Pure: writes no file.

The format is Chrome's trace events as JSON: complete events (``X``) and instants (``i``) with times
in microseconds, and metadata (``M``) that names each lane.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stoker.timeline.span import TRAINER, Span

_PID = 1


def to_chrome_trace(spans: Iterable[Span], name: str = "stoker") -> dict[str, Any]:
    """A trace that ``json.dump`` can write; ``name`` stands above its lanes. Begins at time 0."""
    recorded = list(spans)
    begin_ns = min((span.start_ns for span in recorded), default=0)
    lanes = sorted({span.lane for span in recorded}, key=_by_number)
    numbers = {lane: number for number, lane in enumerate(lanes, 1)}
    events = [_named("process_name", 0, name)]
    for lane, number in numbers.items():
        events.append(_named("thread_name", number, lane))
        events.append({**_named("thread_sort_index", number, lane), "args": {"sort_index": number}})
    events += [_event(span, numbers[span.lane], begin_ns) for span in recorded]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(span: Span, lane: int, begin_ns: int) -> dict[str, Any]:
    event: dict[str, Any] = {
        "name": span.kind,
        "cat": "loader",
        "pid": _PID,
        "tid": lane,
        "ts": (span.start_ns - begin_ns) / 1000,
        "args": {"step": span.step, "bytes": span.bytes},
    }
    if span.end_ns > span.start_ns:
        return {**event, "ph": "X", "dur": (span.end_ns - span.start_ns) / 1000}
    return {**event, "ph": "i", "s": "t"}


def _named(what: str, lane: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": _PID, "tid": lane, "args": {"name": name}}


def _by_number(lane: str) -> tuple[bool, int, str]:
    """The trainer first, then worker-2 before worker-10."""
    number = lane.rpartition("-")[2]
    return lane != TRAINER, int(number) if number.isdigit() else -1, lane
