"""JPEG decoding: the dataset's own work dominates, so no loader can gain much; batch 64.

`__getitem__` opens a 320x256 JPEG file (in the page cache), decodes it with PIL, resizes it to
224x224 and makes a float32 tensor of it. The pictures are smooth shapes with fine grain.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.throughput import ENDLESS, Goal, Throughput

FILES = 64


def write_pictures(folder: Path) -> None:
    """64 JPEG files of a photograph's entropy: large smooth shapes and a little grain."""
    rng = np.random.default_rng(0)
    for number in range(FILES):
        shapes = Image.fromarray(rng.integers(0, 256, (8, 10, 3), dtype=np.uint8))
        smooth = np.asarray(shapes.resize((320, 256), Image.Resampling.BICUBIC), dtype=np.int16)
        grain = rng.integers(-12, 13, smooth.shape, dtype=np.int16)
        pixels = np.clip(smooth + grain, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"picture_{number}.jpg", quality=85)


class Pictures:
    """Decoded pictures with a label."""

    def __init__(self, folder: Path) -> None:
        self._paths = [folder / f"picture_{number}.jpg" for number in range(FILES)]

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self._paths[index % FILES]) as picture:
            small = picture.convert("RGB").resize((224, 224), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(small)).permute(2, 0, 1)
        return pixels.float().div_(255), index % 1000


CASE = Throughput(
    name="jpeg",
    title="JPEG decode + resize to 224, batch 64",
    dataset=Pictures,
    batch_size=64,
    goal=Goal(None),
    files=write_pictures,
    read_seconds=3.0,
    copy_seconds=1.0,
)
