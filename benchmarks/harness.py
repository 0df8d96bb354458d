"""Runs measurements: each in a fresh subprocess, contenders interleaved. Judges nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from benchmarks.case import Case, Context, Measurement
from benchmarks.memory_group import MemoryGroup, private_bytes

TIMEOUT_SECONDS = 180.0
POLL_SECONDS = 0.01
PRIVATE_EVERY_SECONDS = 1.0
"""How often the workers' private memory is read; a look holds a process' mmap lock for a while."""


class MeasurementFailed(Exception):
    """A subprocess gave no result; the message has the end of what it wrote on stderr."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One measurement to take."""

    case: Case
    contender: str
    round: int


def schedule(case: Case, contenders: list[str], rounds: int) -> Iterator[Unit]:
    """A B C, C A B, B C A, …: whatever drifts on the machine meets each contender in each place."""
    for number in range(min(rounds, case.max_rounds or rounds)):
        turn = number % len(contenders)
        for contender in contenders[-turn:] + contenders[:-turn] if turn else contenders:
            yield Unit(case, contender, number)


def measure(unit: Unit, context: Context) -> Measurement:
    """Take one measurement in a fresh subprocess; raise MeasurementFailed if it gives none."""
    begun = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.child", unit.case.name, unit.contender]
    command += [str(context.folder), *(["quick"] if context.quick else [])]
    with contextlib.ExitStack() as stack:
        watch: _MemoryWatch | None = None
        if unit.case.in_memory_cgroup:
            group = stack.enter_context(MemoryGroup(f"{unit.contender}-{unit.round}"))
            command, watch = group.command(command), _MemoryWatch(group)
        complaints = stack.enter_context(tempfile.TemporaryFile("w+"))
        process = stack.enter_context(_session(command, complaints))
        try:
            result = _converse(process, watch)
        except _NoResult:
            complaints.seek(0)
            raise MeasurementFailed(_last_lines(complaints.read())) from None
        return {**result, "took_seconds": round(time.monotonic() - begun, 2)}


class _NoResult(Exception):
    pass


@contextlib.contextmanager
def _session(command: list[str], stderr: IO[str]) -> Iterator[subprocess.Popen[str]]:
    """A subprocess that leads a session of its own; all that is left of it at the end is killed."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
        cwd=Path(__file__).resolve().parent.parent,
    )
    overdue = threading.Timer(TIMEOUT_SECONDS, _kill_session, [process.pid])
    overdue.start()
    members: set[int] = set()
    try:
        yield process
        members |= _session_pids(process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
    finally:
        overdue.cancel()
        members |= _session_pids(process.pid)
        _kill_session(process.pid)
        process.wait()
        _remove_shared_files(members)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _kill_session(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _session_pids(leader: int) -> set[int]:
    """The processes of a session: its leader, its workers, their helpers."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(int(entry.name)) == leader:
                found.add(int(entry.name))
    return found


def _remove_shared_files(pids: set[int]) -> None:
    """A torch worker that is killed while it makes a shared memory file leaves it in /dev/shm."""
    for pid in pids:
        for left in Path("/dev/shm").glob(f"torch_{pid}_*"):
            left.unlink(missing_ok=True)


def _converse(process: subprocess.Popen[str], watch: _MemoryWatch | None) -> Measurement:
    assert process.stdin is not None
    assert process.stdout is not None
    for line in process.stdout:
        word, _, rest = line.partition(" ")
        if word.strip() == "BASE":
            if watch is not None:
                watch.start(trainer=process.pid)
            process.stdin.write("\n")
            process.stdin.flush()
        elif word == "RESULT":
            result: Measurement = json.loads(rest)
            if watch is not None:
                result["memory"] = watch.stop()
            return result
    raise _NoResult


def _last_lines(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-600:] or "it ended without a word (killed, or out of time)"


@dataclass(slots=True)
class _MemoryWatch:
    """Polls a group's memory from the moment before the loader exists, on a thread of its own."""

    group: MemoryGroup
    _ended: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _peaks: dict[str, int] = field(default_factory=dict)
    _private: dict[int, int] = field(default_factory=dict)

    def start(self, trainer: int) -> None:
        """Take the base, and begin to poll."""
        base = self.group.usage()
        self._peaks = {
            "base_bytes": base.total_bytes,
            "base_shared_bytes": base.shared_bytes,
            "peak_bytes": base.total_bytes,
            "peak_shared_bytes": base.shared_bytes,
        }
        loops: list[tuple[float, Callable[[], None]]] = [
            (POLL_SECONDS, self._poll),
            (PRIVATE_EVERY_SECONDS, lambda: self._look_into_workers(trainer)),
        ]
        for period, step in loops:
            thread = threading.Thread(target=self._repeat, args=(period, step), daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> Measurement:
        """The peaks, and each worker's largest private memory added up."""
        self._ended.set()
        for thread in self._threads:
            thread.join()
        workers = sum(self._private.values())
        return {**self._peaks, "workers": len(self._private), "workers_private_bytes": workers}

    def _repeat(self, period: float, step: Callable[[], None]) -> None:
        while not self._ended.wait(period):
            step()

    def _poll(self) -> None:
        now = self.group.usage()
        peaks = self._peaks
        peaks["peak_bytes"] = max(peaks["peak_bytes"], now.total_bytes)
        peaks["peak_shared_bytes"] = max(peaks["peak_shared_bytes"], now.shared_bytes)

    def _look_into_workers(self, trainer: int) -> None:
        for pid in self.group.pids():
            if pid != trainer:
                self._private[pid] = max(self._private.get(pid, 0), private_bytes(pid))


def pause() -> None:
    """Let the machine settle between two measurements: exiting processes give their memory back."""
    time.sleep(0.1)
