"""torch's DataPipes (deprecated there): shared shuffling seed and sharding, as torch does it.

Kept apart, so that a torch without them needs one file changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

try:
    from torch.utils.data import IterDataPipe, MapDataPipe
    from torch.utils.data.dataloader import _sharding_worker_init_fn
    from torch.utils.data.graph_settings import apply_random_seed
except ImportError:  # pragma: no cover - a torch that has dropped them
    IterDataPipe = MapDataPipe = ()  # type: ignore[misc, assignment]


def apply_shared_seed(dataset: Any, seed: int | None) -> None:
    """Let every worker of an iterable pipe shuffle alike."""
    if seed is not None and isinstance(dataset, IterDataPipe):
        generator = torch.Generator()
        generator.manual_seed(seed)
        apply_random_seed(dataset, generator)


def sharding_init_fn(
    dataset: Any, init_fn: Callable[[int], None] | None, world_size: int, rank: int
) -> Callable[[int], None] | None:
    """The user's init function, after the pipe was told its shard where it is a pipe."""
    if isinstance(dataset, (IterDataPipe, MapDataPipe)):
        return functools.partial(_sharding_worker_init_fn, init_fn, world_size, rank)
    return init_fn
