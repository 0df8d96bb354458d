"""Spans are kept within bounds, read from any thread, and drawn by the usual viewers."""

from __future__ import annotations

import dataclasses
import json
import threading

import pytest

from stoker.timeline import TRAINER, Ring, Span, to_chrome_trace, worker_lane


def test_a_span_is_a_value() -> None:
    span = Span("fetch", "worker-1", 3, 1_000, 2_500_001_000, 64)
    assert span.seconds == 2.5
    assert span == Span("fetch", "worker-1", 3, 1_000, 2_500_001_000, 64)
    assert not hasattr(span, "__dict__")
    with pytest.raises(dataclasses.FrozenInstanceError):
        span.step = 4  # type: ignore[misc]


def test_the_ring_keeps_the_most_recent_spans_in_order() -> None:
    ring = Ring(size=3)
    for step in range(5):
        ring.add("wait", TRAINER, step, step * 10, step * 10 + 5)
    assert [span.step for span in ring.spans()] == [2, 3, 4]
    assert ring.spans()[0] == Span("wait", TRAINER, 2, 20, 25, 0)


def test_the_two_spans_of_a_delivery_and_of_loading_are_noted_together() -> None:
    ring = Ring()
    ring.add_delivery(TRAINER, 4, 10, 20, 25, 64)
    ring.add_loading("worker-1", 5, 1, 8, 9, 32)
    assert ring.spans() == [
        Span("wait", TRAINER, 4, 10, 20, 64),
        Span("deliver", TRAINER, 4, 20, 25, 64),
        Span("fetch", "worker-1", 5, 1, 8, 32),
        Span("collate", "worker-1", 5, 8, 9, 32),
    ]
    assert [span.kind for span in ring.spans(since_ns=9)] == ["wait", "deliver", "collate"]


def test_only_what_ended_since_a_moment_can_be_asked_for() -> None:
    ring = Ring()
    for step in range(5):
        ring.add("wait", TRAINER, step, step * 10, step * 10 + 5)
    assert [span.step for span in ring.spans(since_ns=25)] == [2, 3, 4]


def test_a_snapshot_can_be_taken_while_another_thread_writes() -> None:
    ring = Ring(size=500)
    over = threading.Event()

    def write() -> None:
        step = 0
        while not over.is_set():
            ring.add("deliver", TRAINER, step, step, step + 1, step)
            step += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = 0
        while seen < 20_000:
            steps = [span.step for span in ring.spans()]
            assert steps == list(range(steps[0], steps[0] + len(steps))) if steps else True
            assert len(steps) <= 500
            seen = steps[-1] if steps else 0
    finally:
        over.set()
        writer.join()


def test_lanes_of_workers_are_named_by_their_number() -> None:
    assert worker_lane(3) == "worker-3"


SPANS = [
    Span("wait", TRAINER, 0, 5_000_000, 9_000_000),
    Span("fetch", "worker-10", 1, 1_000_000, 2_000_000, 512),
    Span("collate", "worker-2", 0, 2_000_000, 2_500_500, 256),
    Span("death", "worker-2", -1, 7_000_000, 7_000_000, 99),
]


def test_a_trace_is_json_with_one_named_lane_each_and_times_in_microseconds() -> None:
    trace = json.loads(json.dumps(to_chrome_trace(SPANS, name="train")))
    events = trace["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [names[tid] for tid in sorted(names)] == [TRAINER, "worker-2", "worker-10"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["train"]
    drawn = [e for e in events if e["ph"] in "Xi"]
    assert [(e["name"], names[e["tid"]], e["ts"]) for e in drawn] == [
        ("wait", TRAINER, 4000.0),
        ("fetch", "worker-10", 0.0),
        ("collate", "worker-2", 1000.0),
        ("death", "worker-2", 6000.0),
    ]
    assert [e.get("dur") for e in drawn] == [4000.0, 1000.0, 500.5, None]
    assert drawn[1]["args"] == {"step": 1, "bytes": 512}
    assert drawn[3]["ph"] == "i"


def test_no_spans_are_an_empty_trace() -> None:
    trace = to_chrome_trace([])
    assert [e["ph"] for e in trace["traceEvents"]] == ["M"]
