"""The check after every test must be able to fail: one test for each kind of thing it looks for."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import leaks

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="looks into /proc and /dev/shm"
)


def new_since(before: leaks.Holdings) -> str:
    return "\n".join(leaks.left_behind(before, leaks.take_stock()))


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.01)


def test_nothing_is_found_where_nothing_was_left() -> None:
    before = leaks.take_stock()
    assert new_since(before) == ""


def test_a_child_process_is_found() -> None:
    before = leaks.take_stock()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert f"process {child.pid} " in new_since(before)
    finally:
        child.communicate(b"\n")


def test_a_child_that_nobody_waited_for_is_found() -> None:
    before = leaks.take_stock()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert f"process {pid} (zombie" in new_since(before)
    os.waitpid(pid, 0)
    assert new_since(before) == ""


@pytest.mark.parametrize("how", ["forked", "exec'ed"])
def test_an_orphan_in_a_session_of_its_own_is_found(how: str) -> None:
    before = leaks.take_stock()
    told_from, told_to = os.pipe()
    middle = os.fork()
    if middle == 0:
        if os.fork() == 0:
            os.setsid()
            os.write(told_to, b"%d\n" % os.getpid())
            if how == "forked":
                while True:
                    signal.pause()
            os.execv(sys.executable, [sys.executable, "-c", "import signal; signal.pause()"])
        os._exit(0)
    os.waitpid(middle, 0)
    orphan = int(os.read(told_from, 32))
    try:
        wait_until(lambda: f"process {orphan} " in new_since(before))
    finally:
        os.kill(orphan, signal.SIGKILL)
        os.close(told_from)
        os.close(told_to)
    wait_until(lambda: new_since(before) == "")


def test_a_thread_is_found() -> None:
    before = leaks.take_stock()
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="forgotten")
    thread.start()
    try:
        assert "thread 'forgotten'" in new_since(before)
    finally:
        done.set()
        thread.join()


def test_a_descriptor_is_found_by_its_kind() -> None:
    before = leaks.take_stock()
    fd = os.eventfd(0) if hasattr(os, "eventfd") else os.memfd_create("forgotten")
    found = new_since(before)
    os.close(fd)
    assert found.startswith("descriptor ")
    assert found.endswith("(0 before, 1 after)")


def test_a_name_in_shared_memory_is_found() -> None:
    before = leaks.take_stock()
    name = leaks.SHARED_MEMORY / f"stoker_test_{uuid.uuid4().hex}"
    name.write_bytes(b"x")
    try:
        assert new_since(before) == str(name)
    finally:
        name.unlink()


def test_a_name_that_a_stranger_has_mapped_is_not_ours() -> None:
    before = leaks.take_stock()
    name = leaks.SHARED_MEMORY / f"stoker_test_{uuid.uuid4().hex}"
    code = (
        "import mmap, sys; f = open(sys.argv[1], 'w+b'); f.truncate(4096);"
        "m = mmap.mmap(f.fileno(), 4096); f.close(); print('ready', flush=True); input()"
    )
    stranger = subprocess.Popen(
        [sys.executable, "-c", code, str(name)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={key: value for key, value in os.environ.items() if key != leaks.MARK},
    )
    assert stranger.stdout is not None
    try:
        assert stranger.stdout.readline() == b"ready\n"
        with name.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
            assert str(name) in new_since(before)  # as long as it is also our child
        ours = leaks._our_processes
        try:
            leaks._our_processes = lambda: set()
            assert str(name) not in new_since(before)
        finally:
            leaks._our_processes = ours
    finally:
        stranger.communicate(b"\n")
        name.unlink()


def test_the_helpers_that_python_keeps_are_tolerated() -> None:
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=time.sleep, args=(0,))
    process.start()
    process.join()
    assert process.exitcode == 0
    process.close()


def test_a_test_that_leaks_fails_and_says_what(pytester_run: Callable[[str], str]) -> None:
    output = pytester_run(
        "import subprocess, sys\n"
        "def test_leaks():\n"
        "    global kept\n"
        "    kept = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    )
    assert "the test left behind:" in output
    assert "time.sleep(60)" in output


@pytest.fixture
def pytester_run(tmp_path: Path) -> Callable[[str], str]:
    """Runs a test file in a pytest of its own, with this suite's conftest."""
    root = Path(__file__).resolve().parent.parent

    def run(source: str) -> str:
        file = tmp_path / "test_inner.py"
        file.write_text(source)
        (tmp_path / "conftest.py").write_text(
            "from tests.conftest import _nothing_left_behind as check, pytest_configure\n"
        )
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
        command += ["--rootdir", str(tmp_path), "-c", os.devnull]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=root, timeout=60
        )
        assert done.returncode == 1, done.stdout + done.stderr
        return done.stdout

    return run
