"""One sample in a hundred takes 100 times as long as the others; batch 32, 8 workers.

`__getitem__` sleeps 0.5 ms, or 50 ms for a fixed pseudo-random 1 %, and returns a view of 1 kB: a
slow disk or a remote store, not a slow CPU. In-order delivery must wait for the slow batch; the
question is what the other workers do meanwhile.
"""

from __future__ import annotations

from pathlib import Path
from time import sleep

import numpy as np
import torch

from benchmarks.cases.views import random_floats
from benchmarks.throughput import ENDLESS, Goal, Throughput

PERIOD = 100_003
USUAL_SECONDS, SLOW_SECONDS, SLOW_SHARE = 0.0005, 0.05, 0.01


class Uneven:
    """Samples whose cost has a heavy tail."""

    def __init__(self) -> None:
        self._base = random_floats(256, 256)
        self._slow = np.random.default_rng(0).random(PERIOD) < SLOW_SHARE

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> torch.Tensor:
        sleep(SLOW_SECONDS if self._slow[index % PERIOD] else USUAL_SECONDS)
        return self._base[index % len(self._base)]


def dataset(folder: Path) -> Uneven:
    """The uneven dataset; it reads no files."""
    del folder
    return Uneven()


CASE = Throughput(
    name="outliers",
    title="1 % of samples 100x slower, 8 workers, batch 32",
    dataset=dataset,
    batch_size=32,
    goal=Goal(None),
    workers=8,
    read_seconds=1.5,
    copy_seconds=0.6,
)
