"""Accelerate's ``prepare()`` builds every loader anew, as torch's own: here it builds ours again.

Sharding, skipping, dispatching, placing on devices stay Accelerate's, untouched: its adapter holds
a loader (``base_dataloader``) and asks it for batches, and only that inner loader is ours. Stock
loaders are built as before.

Accelerate has no place to say so. Before it rebuilds a loader it asks for the attribute
``_is_accelerate_prepared``: our loaders answer, and on the first question three names of
``accelerate.data_loader`` are extended (``install``). Where these are not what we know, prepare()
gives torch's loader, as it always did, and one line in the log says so.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from stoker.integrations.like import TORCH, like, log, obstacle, own_keywords
from stoker.loader.dataloader import DataLoader
from stoker.loader.platform import say_once

_ASKED = "_is_accelerate_prepared"
_KEY = "_stoker_keywords"
"""An attribute of our loaders that Accelerate copies to what it builds, like any keyword's."""


def listen() -> None:
    """Have loaders answer when Accelerate asks. Imports and changes nothing of Accelerate's."""
    setattr(DataLoader, _KEY, property(own_keywords))
    setattr(DataLoader, _ASKED, property(_asked, _told))


def _asked(loader: DataLoader[Any]) -> bool:
    if "accelerate.data_loader" in sys.modules:
        install()
    return bool(loader.__dict__.get("_prepared", False))


def _told(loader: DataLoader[Any], prepared: bool) -> None:
    loader.__dict__["_prepared"] = prepared


@functools.cache
def install() -> bool:
    """Have Accelerate keep our engine; done by itself on ``Accelerator.prepare(loader)``.

    To be called by who uses ``accelerate.data_loader.prepare_data_loader`` directly. True if it is
    done, False if this version of Accelerate is not one we know.
    """
    try:
        import accelerate.data_loader as theirs

        adapter, keywords = theirs.DataLoaderAdapter, theirs._PYTORCH_DATALOADER_KWARGS
        known = theirs.DataLoader in (TORCH, DataLoader) and "num_workers" in keywords
    except (ImportError, AttributeError):
        known = False
    if not known:
        log.warning(
            "this version of Accelerate is not known: prepare() gives torch's own loader instead "
            "of Stoker's, as it does with every loader; training goes on"
        )
        return False
    adapter.__init__ = _adapting(adapter.__init__)
    _Choice.stock = theirs.DataLoader
    theirs.DataLoader = _Either
    keywords[_KEY] = None  # last: from here on it is passed
    return True


class _Choice(type):
    stock: type = TORCH

    def __call__(cls, dataset: Any, *args: Any, **keywords: Any) -> Any:
        own = keywords.pop(_KEY, None)
        if own is not None:
            try:
                return DataLoader(dataset, *args, **{**keywords, **own})
            except Exception as error:  # noqa: BLE001 - torch's loader, or its own error, is next
                say_once(f"Accelerate gets torch's own loader instead of Stoker's: {error!r}")
        return cls.stock(dataset, *args, **keywords)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, TORCH)


class _Either(metaclass=_Choice):
    """In place of torch's class in ``accelerate.data_loader``: builds that, or ours."""


def _adapting(initialise: Any) -> Any:
    """The adapter's ``__init__``, where loaders that keep a state are concerned."""

    @functools.wraps(initialise)
    def init(
        self: Any, dataset: Any, use_stateful_dataloader: bool = False, **keywords: Any
    ) -> None:
        stateful = use_stateful_dataloader
        if stateful:  # torchdata's loader would be built, which does not know our key
            own = keywords.pop(_KEY, None)
            if own is not None:
                keywords[_KEY] = own
                stateful = False  # ours keeps its own
        initialise(self, dataset, use_stateful_dataloader=stateful, **keywords)
        self.use_stateful_dataloader = use_stateful_dataloader

    return init


def adopt(prepared: Any, **keywords: Any) -> Any:
    """Give a loader that was prepared, or is yet to be, our engine; ``keywords`` as in ``like``.

    One that iterates in a way of its own (torchdata's, a TPU's) is returned as it is, and one line
    in the log says so.
    """
    inner = getattr(prepared, "base_dataloader", prepared)
    if isinstance(inner, DataLoader):
        return prepared
    instead = obstacle(inner)
    if instead is not None:
        say_once(f"{type(inner).__name__} stays as it is, Stoker can only replace {instead}")
        return prepared
    ours = like(inner, **keywords)
    if inner is prepared:
        return ours
    install()  # what skips the first batches builds anew, too
    prepared.base_dataloader = ours
    prepared.dl_state_dict = ours.state_dict()
    return prepared
