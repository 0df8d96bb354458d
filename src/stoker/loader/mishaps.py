"""What went wrong, as errors and in words. Decides nothing and touches no worker."""

from __future__ import annotations

import signal
from typing import Any

from stoker.errors import WorkerDied, WorkerError, WorkerStartError, WorkerTimeout

LOST_POSITION = (
    "The position in an iterable dataset is lost with its worker, so this epoch can't go on; "
    "start a new iteration."
)


def end_of_worker(
    worker: int,
    pid: int,
    status: int | None,
    indices: Any,
    *,
    attempts: int,
    timeout: float | None,
    private_bytes: int | None,
    hint: str,
) -> WorkerError:
    """Why a batch can't be had: its worker ended so often, or (with a timeout) did not get on."""
    if indices is not None and not isinstance(indices, (list, tuple)):
        indices = [indices]
    if timeout is not None:
        return WorkerTimeout(timeout=timeout, worker=worker, pid=pid, indices=indices)
    return WorkerDied(
        worker=worker,
        pid=pid,
        signal_name=signal_name(-status) if status is not None and status < 0 else None,
        exit_code=status if status is not None and status >= 0 else None,
        indices=indices,
        attempts=attempts,
        private_bytes=private_bytes,
        hint=hint,
    )


def could_not_start(cause: str) -> WorkerStartError:
    """The system would not start a worker."""
    return WorkerStartError(
        cause=cause,
        hint="Try fewer workers, or raise the limits on open files (ulimit -n) and processes "
        "(ulimit -u); each worker takes three descriptors.",
    )


def signal_name(number: int) -> str:
    """As ``SIGKILL``; most real-time signals have a number only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def how_it_ended(status: int) -> str:
    """An exit status in words."""
    if status < 0:
        return f"was killed by {signal_name(-status)}"
    return f"exited with code {status}"


def process_state(pid: int | None) -> str:
    """Running, sleeping, stopped…, as the kernel says; for people."""
    names = {"R": "running", "S": "sleeping", "D": "in disk wait", "T": "stopped", "Z": "dead"}
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return names.get(stat.read().rpartition(")")[2].split()[0], "alive")
    except (OSError, IndexError):
        return "gone"
