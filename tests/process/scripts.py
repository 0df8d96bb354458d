"""Training scripts run as a user runs them: in a process of their own, told nothing of tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
_PRELUDE = """
import warnings
warnings.filterwarnings("ignore", "This DataLoader will create")
import os, signal, sys, time
import torch
from stoker import DataLoader
from tests.process.datasets import *
from tests.process.epochs import counted, numbers, worker_pids
"""


def _command(body: str) -> list[str]:
    return [sys.executable, "-c", _PRELUDE + body]


def _environment() -> dict[str, str]:
    # The source beside these tests, whichever copy is installed.
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}


def run(
    body: str, *, prefix: list[str] | None = None, seconds: float = 40
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end. Its standard output and error are kept apart."""
    return subprocess.run(
        (prefix or []) + _command(body),
        env=_environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


class Script:
    """A script that runs in a session of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid
        self.errors = ""

    def wait_for(self, word: str) -> None:
        """Until it prints a line that begins so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return
        raise AssertionError(f"ended without saying {word!r}:\n{self.process.stderr.read()}")  # type: ignore[union-attr]

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)

    def end(self, seconds: float) -> int:
        """Wait for its end; `errors` is then what it wrote to stderr."""
        _, self.errors = self.process.communicate(timeout=seconds)
        return self.process.returncode

    def interrupt(self) -> None:
        """Ctrl-C at its terminal."""
        os.killpg(self.pid, signal.SIGINT)


@contextmanager
def running(body: str) -> Iterator[Script]:
    """A script in mid-run; it is killed at the end if it still runs."""
    process = subprocess.Popen(
        _command(body),
        env=_environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
        start_new_session=True,
    )
    script = Script(process)
    try:
        yield script
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait for all of them to end; those that have not."""
    deadline = time.monotonic() + seconds
    while True:
        alive = [process for process in processes if _runs(process)]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.01)
