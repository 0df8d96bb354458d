"""A worker process as clients of torch's ``_workers`` know one: asked, waited for, signalled."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

from stoker.loader.process_worker import STACK_SIGNAL


class WorkerHandle:
    """A worker process as clients of torch's ``_workers`` know one."""

    daemon = True

    def __init__(self, worker: int) -> None:
        self.id = worker
        self.name = f"stoker-worker-{worker}"
        self.pid: int | None = None
        self.exitcode: int | None = None
        self._pidfd = -1

    def started(self, pid: int, pidfd: int) -> None:
        """The process runs."""
        self.pid = pid
        self.exitcode = None
        self._pidfd = pidfd

    def ended(self, status: int | None) -> None:
        """The process is gone. Without a status (its parent died first) it was killed."""
        if self.exitcode is None and self.pid is not None:
            self.exitcode = status if status is not None else -signal.SIGKILL
        self.disown()

    def disown(self) -> None:
        """In a forked child: close our copy of the descriptor."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def is_alive(self) -> bool:
        """Does the process still run?"""
        if self.pid is None or self.exitcode is not None:
            return False
        return not self.wait(0.0)

    def wait(self, timeout: float | None) -> bool:
        """Wait for the end of the process; True if it has ended."""
        if self.pid is None or self.exitcode is not None:
            return True
        if self._pidfd >= 0:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            return bool(poll.poll(None if timeout is None else timeout * 1000))
        deadline = None if timeout is None else time.monotonic() + timeout
        while _exists(self.pid):
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(0.005)
        return True

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the process."""
        self.wait(timeout)

    def signal(self, number: int) -> None:
        """Send a signal to the process if it still runs, and to no other."""
        if self.pid is None or self.exitcode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, number)
            else:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.signal(signal.SIGKILL)

    def dump_stack(self) -> None:
        """Have the process write the stacks of its threads to stderr."""
        if STACK_SIGNAL is not None:
            self.signal(STACK_SIGNAL)

    def __repr__(self) -> str:
        state = "running" if self.exitcode is None else f"exit {self.exitcode}"
        return f"<WorkerHandle {self.id} pid {self.pid} {state}>"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
