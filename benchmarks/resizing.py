"""One pass over a sleeping dataset that is resized on its way; for the cases that measure that.

Stoker is told with `apply`, and its iterator goes on. torch's can't be told: it is ended, and
another is started, which is even given the samples that are left, so that it has none to skip.
Measures nothing.
"""

from __future__ import annotations

from dataclasses import replace
from time import sleep
from typing import Any

import numpy as np

from benchmarks.contenders import LoaderSpec, make_loader
from benchmarks.throughput import ENDLESS


class Sleepy:
    """Samples that come late, so that more workers help on any machine."""

    def __init__(self, sample_bytes: int, seconds: float, first: int = 0) -> None:
        self._sample_bytes = sample_bytes
        self._seconds = seconds
        self._first = first

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        sleep(self._seconds)
        return np.full(self._sample_bytes, (self._first + index) % 251, np.uint8)

    def after(self, samples: int) -> Sleepy:
        """What is left after so many samples."""
        return Sleepy(self._sample_bytes, self._seconds, self._first + samples)


class Pass:
    """The batches of a loader, before and after a change."""

    def __init__(self, contender: str, spec: LoaderSpec) -> None:
        self._contender = contender
        self._spec = spec
        self._given = 0
        self._loader = make_loader(contender, spec)
        self._batches = iter(self._loader)

    def next(self) -> Any:
        """The next batch, whoever loads it."""
        self._given += 1
        return next(self._batches)

    def resize(self, knobs: dict[str, Any], torch_arguments: dict[str, Any]) -> None:
        """Resize with Stoker's knobs, or with torch's arguments for a new iterator."""
        if self._contender == "stoker":
            import stoker

            wanted = stoker.Knobs(**knobs)
            got = self._loader.apply(wanted)
            assert wanted.workers in (None, got.workers), f"asked for {wanted}, got {got}"
            return
        left = self._spec.dataset.after(self._given * self._spec.batch_size)
        del self._batches, self._loader  # torch ends its workers here
        self._loader = make_loader(
            self._contender, replace(self._spec, dataset=left, **torch_arguments)
        )
        self._batches = iter(self._loader)
