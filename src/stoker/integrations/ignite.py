"""Ignite's ``auto_dataloader`` with our engine: it decides, we load."""

from __future__ import annotations

from typing import Any

import torch.utils.data

from stoker.integrations.like import OWN, like
from stoker.loader.dataloader import DataLoader


def auto_dataloader(
    dataset: torch.utils.data.Dataset[Any], **keywords: Any
) -> DataLoader[Any] | Any:
    """``ignite.distributed.auto_dataloader``, with our keywords too and ``num_workers="auto"``.

    Batch size, number of workers and sampler are adapted to the world by Ignite. On a TPU, where it
    wraps the loader, the loader is Ignite's.
    """
    import ignite.distributed as idist

    own = {name: keywords.pop(name) for name in OWN if name in keywords}
    if keywords.get("num_workers", "auto") == "auto":
        keywords.pop("num_workers", None)
        own["num_workers"] = "auto"
        for name in ("prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context"):
            if name in keywords:  # which torch refuses without workers
                own[name] = keywords.pop(name)
    loader = idist.auto_dataloader(dataset, **keywords)
    return like(loader, **own) if isinstance(loader, torch.utils.data.DataLoader) else loader
