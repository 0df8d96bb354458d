"""After every test, nothing may be left: see tests/leaks.py for what is looked at, and how."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator

import psutil
import pytest

from tests import leaks

# A process that was told to end needs a moment; only a real leak ever waits this long.
GRACE_SECONDS = 3.0


def pytest_configure() -> None:
    leaks.mark_this_run()


def _end(pids: list[int]) -> None:
    """So that the next test is judged for itself."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        psutil.wait_procs([psutil.Process(pid) for pid in pids], timeout=GRACE_SECONDS)
    except (ProcessLookupError, psutil.Error):
        pass  # it has ended meanwhile
    except RuntimeError:
        pass  # torch's handler of SIGCHLD, about a worker of its own loader


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("may_leak"):
        yield
        return
    leaks.start_thread_pools()
    before = leaks.take_stock()
    yield
    after = leaks.take_stock()
    found = leaks.left_behind(before, after)
    deadline = time.monotonic() + GRACE_SECONDS
    while found and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
        after = leaks.take_stock()
        found = leaks.left_behind(before, after)
    if found:
        _end([pid for pid, _ in after.processes - before.processes])
        pytest.fail("the test left behind:\n  " + "\n  ".join(found), pytrace=False)
