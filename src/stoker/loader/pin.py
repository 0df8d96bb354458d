"""Pins batches on a thread of its own, through torch's host allocator.

The allocator knows which streams still read a pinned block; an arena page must never be recycled
under a copy that the GPU has not finished, so arena memory itself is not pinned.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils.pin_memory import pin_memory

AHEAD = 2
"""Batches pinned ahead of the caller: one being copied, one waiting."""
_CHECK_SECONDS = 1.0
_END = object()


class _Mark:
    """Goes through the pinner as it is: whatever was put before it has come out before it."""


class Pinner:
    """Batches in, pinned batches out, in the same order."""

    def __init__(self, device: str | None) -> None:
        self._device = device
        self._index = torch.accelerator.current_device_index()
        self._in: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._out: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.pending = 0
        # Not is_alive(): interrupted inside of it, Python 3.11 takes a running thread for stopped.
        self._runs = True
        self.thread = threading.Thread(target=self._run, name="stoker-pin", daemon=True)
        self.thread.start()
        _running.add(self)

    def put(self, position: int, origin: Any, batch: object) -> None:
        """Queue a batch (or an error, which passes through), with what else is known of it."""
        self.pending += 1
        self._in.put((position, origin, batch))

    def get(self) -> tuple[int, Any, Any]:
        """The oldest batch, pinned, with what came along."""
        item: Any = self._next()
        while isinstance(item, _Mark):  # of a ``clear`` that was interrupted
            item = self._next()
        self.pending -= 1
        return item  # type: ignore[no-any-return]

    def clear(self) -> None:
        """Drop what is under way; also after an interruption, which makes ``pending`` a guess."""
        mark = _Mark()
        self._in.put(mark)
        while self._runs and self._next() is not mark:
            pass
        self.pending = 0

    def _next(self) -> Any:
        while True:
            try:
                return self._out.get(timeout=_CHECK_SECONDS)
            except queue.Empty:
                if self._runs or not self._out.empty():
                    continue
                raise RuntimeError("Pin memory thread exited unexpectedly") from None

    def close(self) -> None:
        """End the thread."""
        self._in.put(_END)
        if threading.current_thread() is not self.thread:
            self.thread.join()

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._runs = False

    def _serve(self) -> None:
        torch.set_num_threads(1)  # of this thread: the copy must not take every core
        torch.accelerator.set_device_index(self._index)
        while True:
            item = self._in.get()
            if item is _END:
                return
            if not isinstance(item, _Mark):
                item = (*item[:2], self._pinned(item[2]))
            self._out.put(item)
            del item  # or the extent stays leased until the next one comes

    def _pinned(self, batch: Any) -> Any:
        if isinstance(batch, (ExceptionWrapper, BaseException, type)):
            return batch
        try:
            return pin_memory(batch, self._device)
        except Exception:
            return ExceptionWrapper(where=f"in pin memory thread for device {self._index}")


_running: weakref.WeakSet[Pinner] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that calls the GPU's driver while the interpreter is taken apart crashes."""
    for pinner in list(_running):
        pinner.close()
