"""How another thread asks the one that loads for something: a box of requests, and a bell.

Carries nothing out (see ``engine``) and knows no locks of an iterator (see ``iterator``).
"""

from __future__ import annotations

import contextlib
import os
import threading

from stoker.plan.knobs import Knobs


class Request:
    """New knobs for a loader that runs, and what became of them."""

    __slots__ = ("_answered", "achieved", "knobs")

    def __init__(self, knobs: Knobs) -> None:
        self.knobs = knobs
        self.achieved: Knobs | None = None
        self._answered = threading.Event()

    def answer(self, achieved: Knobs) -> None:
        """It is done."""
        self.achieved = achieved
        self._answered.set()

    def wait(self, seconds: float) -> None:
        """Until it is answered, or for so long."""
        self._answered.wait(seconds)


class Bell:
    """Wakes the one thread that polls ``fileno()``; any other may ring.

    A lock stands between ringing and closing, so that nobody writes to a descriptor that is
    somebody else's by now.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read, self._write = os.pipe()
        for fd in (self._read, self._write):
            os.set_blocking(fd, False)

    def fileno(self) -> int:
        """What to poll for reading."""
        return self._read

    def ring(self) -> None:
        """Wake whoever polls; heard later if nobody does right now."""
        with self._lock:
            if self._write >= 0:
                with contextlib.suppress(BlockingIOError):  # full: it rings as it is
                    os.write(self._write, b"!")

    def heard(self) -> None:
        """Be silent until it rings again."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)

    def close(self) -> None:
        """Safe beside ``ring``, and to call twice."""
        with self._lock:
            self._close()

    def disown(self) -> None:
        """In a forked child: close our copies. The lock may be held by a thread we don't have."""
        self._lock = threading.Lock()
        self._close()

    def _close(self) -> None:
        # Forgotten first: closing twice after an interruption might close somebody else's.
        fds, self._read, self._write = (self._read, self._write), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)
