"""Any thread may ring; one thread hears; nobody writes to a descriptor that is closed."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator

import pytest

from stoker.loader.requests import Bell, Request
from stoker.plan import Knobs


@pytest.fixture
def bell() -> Iterator[Bell]:
    bell = Bell()
    yield bell
    bell.close()


def rings(bell: Bell, milliseconds: int = 0) -> bool:
    poll = select.poll()
    poll.register(bell, select.POLLIN)
    return bool(poll.poll(milliseconds))


def test_it_rings_until_it_is_heard(bell: Bell) -> None:
    assert not rings(bell)
    bell.ring()
    bell.ring()
    assert rings(bell)
    assert rings(bell)
    bell.heard()
    assert not rings(bell)
    bell.heard()


def test_it_wakes_a_thread_that_polls(bell: Bell) -> None:
    heard: list[bool] = []
    thread = threading.Thread(target=lambda: heard.append(rings(bell, 20_000)))
    thread.start()
    bell.ring()
    thread.join()
    assert heard == [True]


def test_a_bell_that_nobody_hears_never_blocks(bell: Bell) -> None:
    for _ in range(100_000):
        bell.ring()
    bell.heard()


def test_after_close_nobody_writes_to_what_has_its_number_now() -> None:
    bell = Bell()
    numbers = {bell._read, bell._write}
    bell.close()
    bell.close()
    read, write = os.pipe()
    assert {read, write} == numbers
    os.set_blocking(read, False)
    bell.ring()
    with pytest.raises(BlockingIOError):
        os.read(read, 1)
    os.close(read)
    os.close(write)


def test_a_forked_child_closes_its_copy_though_a_thread_was_ringing(bell: Bell) -> None:
    with bell._lock:  # as a thread that the child does not have
        pid = os.fork()
        if not pid:
            code = 1
            try:
                bell.disown()
                bell.ring()
                bell.close()
                code = 0
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    bell.ring()
    assert rings(bell)


def test_a_request_waits_for_its_answer() -> None:
    request = Request(Knobs(2))
    request.wait(0)
    assert request.achieved is None
    threading.Thread(target=request.answer, args=(Knobs(1),)).start()
    request.wait(20)
    assert request.achieved == Knobs(1)
