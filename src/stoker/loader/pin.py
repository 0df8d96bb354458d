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


class Pinner:
    """Batches in, pinned batches out, in the same order."""

    def __init__(self, device: str | None) -> None:
        self._device = device
        self._index = torch.accelerator.current_device_index()
        self._in: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._out: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.pending = 0
        self.thread = threading.Thread(target=self._run, name="stoker-pin", daemon=True)
        self.thread.start()
        _running.add(self)

    def put(self, batch: object) -> None:
        """Queue a batch (or an error, which passes through)."""
        self.pending += 1
        self._in.put(batch)

    def get(self) -> Any:
        """The oldest batch, pinned."""
        while True:
            try:
                batch = self._out.get(timeout=_CHECK_SECONDS)
            except queue.Empty:
                if self.thread.is_alive() or not self._out.empty():
                    continue
                raise RuntimeError("Pin memory thread exited unexpectedly") from None
            self.pending -= 1
            return batch

    def clear(self) -> None:
        """Drop what is under way."""
        while self.pending and self.thread.is_alive():
            self.get()

    def close(self) -> None:
        """End the thread."""
        self._in.put(_END)
        if threading.current_thread() is not self.thread:
            self.thread.join()

    def _run(self) -> None:
        torch.set_num_threads(1)  # of this thread: the copy must not take every core
        torch.accelerator.set_device_index(self._index)
        while True:
            batch = self._in.get()
            if batch is _END:
                return
            if not isinstance(batch, (ExceptionWrapper, BaseException, type)):
                try:
                    batch = pin_memory(batch, self._device)
                except Exception:
                    batch = ExceptionWrapper(where=f"in pin memory thread for device {self._index}")
            self._out.put(batch)
            del batch  # or the extent stays leased until the next one comes


_running: weakref.WeakSet[Pinner] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that calls the GPU's driver while the interpreter is taken apart crashes."""
    for pinner in list(_running):
        pinner.close()
