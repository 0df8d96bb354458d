"""8 LiDAR scans of 1.5 MB a sample (a tenth of a real one), read and scaled; batch 4.

`__getitem__` reads eight files (in the page cache: no disk is measured) with np.fromfile and
multiplies them by a scale into one float32 array of 12 MB.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from benchmarks.throughput import ENDLESS, Goal, Throughput

SCANS, POINTS, SEQUENCES = 8, 93_750, 4
SCAN_BYTES = POINTS * 4 * 4
SAMPLE_BYTES = SCANS * SCAN_BYTES
SCALE = np.array([0.01, 0.01, 0.02, 1.0], dtype=np.float32)


def write_scans(folder: Path) -> None:
    """Four sequences of eight scans (x, y, z, reflectance), left in the page cache."""
    rng = np.random.default_rng(0)
    for sequence in range(SEQUENCES):
        for scan in range(SCANS):
            points = rng.random((POINTS, 4), dtype=np.float32)
            points.tofile(folder / f"scan_{sequence}_{scan}.bin")


class Scans:
    """Sequences of LiDAR scans, four of them visited in turn."""

    def __init__(self, folder: Path) -> None:
        self._sequences = [
            [str(folder / f"scan_{sequence}_{scan}.bin") for scan in range(SCANS)]
            for sequence in range(SEQUENCES)
        ]

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor | int]:
        scans = np.empty((SCANS, POINTS, 4), dtype=np.float32)
        for scan, path in zip(scans, self._sequences[index % SEQUENCES], strict=True):
            np.multiply(np.fromfile(path, dtype=np.float32).reshape(-1, 4), SCALE, out=scan)
        return {"scans": torch.from_numpy(scans), "frame": index}


CASE = Throughput(
    name="lidar",
    title="LiDAR: 8 scans of 1.5 MB read and scaled, batch 4",
    dataset=Scans,
    batch_size=4,
    goal=Goal(2.2),
    files=write_scans,
    read_seconds=2.0,
    copy_seconds=0.8,
)
