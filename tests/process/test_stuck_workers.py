"""Workers that do not die but do not get on either."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from stoker import DataLoader
from stoker.errors import WorkerTimeout
from stoker.loader import engine, pool
from tests.process.datasets import Augmented, Gated, Numbers, Sleepy
from tests.process.epochs import (
    counted,
    epoch,
    going_on,
    kill,
    numbers,
    same,
    seeded,
    worker_pids,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def test_a_stopped_worker_is_replaced_after_the_timeout(caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"batch_size": 4, "num_workers": 2}
    expected = epoch(DataLoader(Augmented(80), **settings))
    loader = DataLoader(Augmented(80), timeout=1, **settings)
    iterator = seeded(loader)
    batches = [next(iterator) for _ in range(3)]
    os.kill(worker_pids(iterator)[1], signal.SIGSTOP)
    assert same(batches + list(iterator), expected)
    assert loader.stats().deaths == 1
    assert "stuck" in caplog.text


def test_all_stopped_workers_are_replaced_after_the_timeout() -> None:
    settings: dict[str, Any] = {"batch_size": 4, "num_workers": 2}
    expected = epoch(DataLoader(Augmented(80), **settings))
    iterator = seeded(DataLoader(Augmented(80), timeout=0.5, **settings))
    batches = [next(iterator) for _ in range(3)]
    for pid in worker_pids(iterator):
        os.kill(pid, signal.SIGSTOP)
    assert same(batches + list(iterator), expected)


def test_without_a_timeout_a_stopped_worker_is_reported_and_not_touched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine, "REPORT_AFTER_SECONDS", 0.2)
    loader = DataLoader(Numbers(80), batch_size=4, num_workers=2)
    iterator = iter(loader)
    batches = [next(iterator) for _ in range(3)]
    stopped = worker_pids(iterator)[1]
    os.kill(stopped, signal.SIGSTOP)
    awake = threading.Timer(1.5, os.kill, (stopped, signal.SIGCONT))
    awake.start()
    batches += list(iterator)
    awake.join()
    assert numbers(batches) == counted(80, 4)
    assert loader.stats().deaths == 0
    record = next(r for r in caplog.records if "waiting for" in r.getMessage())
    assert record.levelno == logging.WARNING
    assert f"pid {stopped}, stopped" in record.getMessage()
    assert "timeout=" in record.getMessage()


def test_a_slow_batch_is_reported_with_its_indices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine, "REPORT_AFTER_SECONDS", 0.1)
    dataset = Gated(16, at=5, folder=tmp_path)
    iterator = iter(DataLoader(dataset, batch_size=4, num_workers=2))
    next(iterator)
    opener = threading.Timer(1.2, dataset.open_gate)
    opener.start()
    assert next(iterator)["index"].tolist() == [4, 5, 6, 7]
    opener.join()
    assert "[4, 5, 6, 7]" in caplog.text


def test_a_sample_slower_than_the_timeout_is_an_error_that_names_it_and_the_rest_comes() -> None:
    dataset = Sleepy(32, slow={9}, seconds=60)
    iterator = iter(DataLoader(dataset, batch_size=4, num_workers=2, timeout=0.4))
    batches, errors = going_on(iterator)
    assert numbers(batches) == counted(32, 4, without=[2])
    assert len(errors) == 1
    assert isinstance(errors[0], WorkerTimeout)
    assert "DataLoader timed out after 0.4 seconds" in str(errors[0])
    assert "[8, 9, 10, 11]" in str(errors[0])


def test_the_stack_of_a_stuck_worker_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    dataset = Sleepy(8, slow={5}, seconds=60)
    iterator = iter(DataLoader(dataset, batch_size=4, num_workers=1, timeout=0.4))
    _, errors = going_on(iterator)
    assert len(errors) == 1
    assert "in __getitem__" in capfd.readouterr().err


def test_a_slow_batch_holds_delivery_and_not_the_other_worker(tmp_path: Path) -> None:
    dataset = Gated(48, at=0, folder=tmp_path)
    loader = DataLoader(dataset, batch_size=4, num_workers=2, prefetch_factor=4)
    iterator: Any = seeded(loader)
    dataset.who_waits()
    while iterator._engine.dispatch.ready < 4:
        iterator._engine.has_next()
    dataset.open_gate()
    found = [batch["index"].tolist() for batch in iterator]
    assert found == counted(48, 4)


def test_a_stopped_worker_that_is_killed_at_last_is_replaced() -> None:
    iterator = iter(DataLoader(Numbers(80), batch_size=4, num_workers=2))
    batches = [next(iterator)]
    stopped = worker_pids(iterator)[0]
    os.kill(stopped, signal.SIGSTOP)
    killer = threading.Timer(0.3, kill, (stopped,))
    killer.start()
    batches += list(iterator)
    killer.join()
    assert numbers(batches) == counted(80, 4)


def test_a_stopped_host_that_can_not_report_a_death_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine, "CHECK_SECONDS", 0.2)
    settings: dict[str, Any] = {"batch_size": 4, "num_workers": 2}
    expected = epoch(DataLoader(Augmented(80), **settings))
    iterator = seeded(DataLoader(Augmented(80), **settings))
    batches = [next(iterator) for _ in range(3)]
    pids = worker_pids(iterator)
    os.kill(psutil.Process(pids[0]).ppid(), signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert same(batches + list(iterator), expected)
    assert "does not answer" in caplog.text


def test_a_stopped_worker_does_not_keep_the_iterator_from_closing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "_GRACE_SECONDS", 0.5)
    iterator: Any = iter(DataLoader(Numbers(400), batch_size=4, num_workers=2))
    next(iterator)
    pids = worker_pids(iterator)
    os.kill(pids[0], signal.SIGSTOP)
    iterator._shutdown_workers()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
