"""A loader's timeline: what the trainer and each worker did, on one clock."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from stoker import DataLoader, Knobs
from stoker.timeline import Span, to_chrome_trace
from tests.process.datasets import Numbers, Sleepy
from tests.process.epochs import kill, worker_pids

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def of_kind(spans: list[Span], kind: str) -> list[Span]:
    return [span for span in spans if span.kind == kind]


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_every_batch_is_waited_for_delivered_fetched_and_collated(kind: Any) -> None:
    before = time.monotonic_ns()
    loader = DataLoader(Numbers(40, 5000), batch_size=4, num_workers=2, worker_kind=kind)
    list(loader)
    after = time.monotonic_ns()
    spans = loader.timeline()
    for name in ("wait", "deliver", "fetch", "collate"):
        assert sorted(span.step for span in of_kind(spans, name)) == list(range(10))
    assert {span.lane for span in of_kind(spans, "wait")} == {"trainer"}
    assert {span.lane for span in of_kind(spans, "fetch")} <= {"worker-0", "worker-1"}
    assert all(before <= span.start_ns <= span.end_ns <= after for span in spans)
    assert {span.bytes for span in of_kind(spans, "deliver")} == {4 * 5000 * 4}


def test_a_batch_is_fetched_before_it_is_delivered_on_the_same_clock() -> None:
    loader = DataLoader(Sleepy(16, {5}, 0.05), batch_size=2, num_workers=2)
    list(loader)
    spans = loader.timeline()
    for step in range(8):
        [fetch], [collate], [deliver] = (
            [span for span in of_kind(spans, kind) if span.step == step]
            for kind in ("fetch", "collate", "deliver")
        )
        assert fetch.end_ns == collate.start_ns
        assert collate.end_ns <= deliver.start_ns
    [slow] = [span for span in of_kind(spans, "fetch") if span.step == 2]
    assert slow.seconds >= 0.05


def test_the_death_of_a_worker_is_noted_in_its_lane() -> None:
    loader = DataLoader(Numbers(400), batch_size=4, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    kill(worker_pids(iterator)[1])
    list(iterator)
    [death] = of_kind(loader.timeline(), "death")
    assert death.lane == "worker-1"
    assert death.start_ns == death.end_ns


def test_a_resize_is_noted_with_the_new_bound() -> None:
    loader = DataLoader(Numbers(400), batch_size=4, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    loader.apply(Knobs(workers=3, in_flight_bytes=4 << 20))
    list(iterator)
    [resize] = of_kind(loader.timeline(), "resize")
    assert (resize.lane, resize.step, resize.bytes) == ("trainer", -1, 4 << 20)


def test_loading_without_workers_is_the_trainers_own_work() -> None:
    loader = DataLoader(Numbers(12), batch_size=4, num_workers=0)
    list(loader)
    assert [(s.kind, s.lane, s.step) for s in loader.timeline()] == [
        ("fetch", "trainer", step) for step in range(3)
    ]


def test_only_recent_spans_can_be_asked_for() -> None:
    loader = DataLoader(Numbers(12), batch_size=4, num_workers=1)
    list(loader)
    now = time.monotonic_ns()
    assert loader.timeline(since_ns=now) == []
    list(loader)
    assert of_kind(loader.timeline(since_ns=now), "deliver") != []
    assert len(of_kind(loader.timeline(), "deliver")) == 6


def test_another_thread_may_look_while_the_loader_runs() -> None:
    loader = DataLoader(Numbers(4000), batch_size=4, num_workers=2)
    over = threading.Event()
    looks: list[int] = []

    def look() -> None:
        while not over.is_set():
            looks.append(len(loader.timeline()))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        assert len(list(loader)) == 1000
    finally:
        over.set()
        watcher.join()
    assert looks == sorted(looks)


def test_a_recorded_run_can_be_written_as_a_trace() -> None:
    loader = DataLoader(Numbers(40), batch_size=4, num_workers=2)
    list(loader)
    trace = json.loads(json.dumps(to_chrome_trace(loader.timeline(), name="loader")))
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == 40
