"""Hugging Face's Trainer builds its loaders itself: here it gets ours. Does not import it."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from stoker.errors import ConfigError
from stoker.integrations.accelerate import adopt

_Trainer = TypeVar("_Trainer")
_BUILDERS = ("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader")


def use_stoker(trainer: _Trainer, **keywords: Any) -> _Trainer:
    """Have a Trainer (of any subclass) load with Stoker from here on; returns it.

    Its arguments hold: ``dataloader_num_workers``, ``dataloader_pin_memory`` and so on. What is
    given here comes on top: ``use_stoker(trainer, num_workers="auto", memory="8GB")``.
    """
    for name in _BUILDERS:
        if not callable(getattr(trainer, name, None)):
            raise ConfigError(name="trainer", given=trainer, accepted="a transformers.Trainer")
    for name in _BUILDERS:
        setattr(trainer, name, _adopting(getattr(trainer, name), keywords))
    return trainer


def _adopting(build: Any, keywords: dict[str, Any]) -> Any:
    @functools.wraps(build)
    def built(*args: Any, **kwargs: Any) -> Any:
        return adopt(build(*args, **kwargs), **keywords)

    return built
