"""A loader of ours in place of one that somebody else has built. Does not touch the old one."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch.utils.data
from torch.utils.data import BatchSampler, IterableDataset

from stoker.errors import ConfigError
from stoker.loader.dataloader import DataLoader

log = logging.getLogger("stoker.integrations")

TORCH: type[torch.utils.data.DataLoader[Any]] = DataLoader.__mro__[1]
"""torch's class; the name in its module may have been given to ours."""
_TORCHS = frozenset(inspect.signature(TORCH.__init__).parameters)
_WHAT = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")
"""Which samples; the rest of torch's arguments say how they are loaded."""
_HOW = tuple(_TORCHS.difference(_WHAT, ("self",)))
_NEEDS_WORKERS = ("prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context")
_TORCHS_PREFETCH = 2
"""What torch puts there itself where nothing was given."""

OWN = tuple(
    name for name in inspect.signature(DataLoader.__init__).parameters if name not in _TORCHS
)
"""The keywords that torch's loader does not have; each is an attribute of ours."""


def own_keywords(loader: DataLoader[Any]) -> dict[str, Any]:
    """What another loader must be given, beyond torch's attributes, to be like this one."""
    own = {name: getattr(loader, name) for name in OWN}
    if not loader._counted:
        own["prefetch_factor"] = None  # the attribute shows torch's default, which was not asked
    return own


def like(loader: torch.utils.data.DataLoader[Any], **keywords: Any) -> DataLoader[Any]:
    """A Stoker loader over the same dataset and sampler, with the same settings.

    For loaders that a framework builds: ``like(Runner.build_dataloader(config), memory="4GB")``.

    Args:
        loader: any ``torch.utils.data.DataLoader``.
        keywords: settings to change or to add, by their names in ``stoker.DataLoader``.
    """
    instead = obstacle(loader)
    if instead is not None:
        raise ConfigError(name="loader", given=loader, accepted=instead)
    arguments = {name: getattr(loader, name) for name in _HOW if hasattr(loader, name)}
    if isinstance(loader, DataLoader):
        arguments |= own_keywords(loader)
    elif loader.prefetch_factor == _TORCHS_PREFETCH:
        arguments["prefetch_factor"] = None
    if keywords.get("num_workers", loader.num_workers) == 0:
        for name in _NEEDS_WORKERS:
            arguments.pop(name, None)
    return DataLoader(loader.dataset, **_samples(loader), **{**arguments, **keywords})


def _samples(loader: torch.utils.data.DataLoader[Any]) -> dict[str, Any]:
    if isinstance(loader.dataset, IterableDataset):
        return {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    batches = loader.batch_sampler
    if batches is None:
        return {"batch_size": None, "sampler": loader.sampler}
    if loader.batch_size is not None and type(batches) is BatchSampler:
        # As torch made it of a batch size, which frameworks read again.
        return {
            "batch_size": loader.batch_size,
            "sampler": batches.sampler,
            "drop_last": loader.drop_last,
        }
    return {"batch_sampler": batches}


def obstacle(loader: object) -> str | None:
    """What would be accepted instead, if there can be no loader like this one."""
    if not isinstance(loader, TORCH):
        return "a torch.utils.data.DataLoader"
    name = type(loader).__name__
    for method in ("__iter__", "_get_iterator"):
        theirs = getattr(type(loader), method)
        if theirs not in (getattr(TORCH, method), getattr(DataLoader, method)):
            return (
                f"one that iterates as torch's does ({name} has its own {method}). To keep that, "
                f"derive from both: class Mine({name}, stoker.DataLoader)"
            )
    return None
