"""ImageNet-sized float32 images with a collate function of the user's own, batch 64 (39 MB).

A loader can't collate into place through code it does not know: there is one copy more than in
images_f32.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.cases import images_f32
from benchmarks.throughput import Goal, Throughput


def stack(samples: list[torch.Tensor]) -> dict[str, Any]:
    """What users write: stack, and add something of their own."""
    return {"pixels": torch.stack(samples), "count": len(samples)}


CASE = Throughput(
    name="custom_collate",
    title="3x224x224 float32, user's collate_fn, batch 64",
    dataset=images_f32.dataset,
    batch_size=64,
    collate_fn=stack,
    goal=Goal(3.0),
)
