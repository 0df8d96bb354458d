"""Draws indices from a sampler, one position after the other, also across a Ctrl-C.

An exception inside a sampler's generator ends that generator for good, and the epoch would end
there without a word. So what was torn is drawn again from the start where that is possible, and
is an error where it is not. Does not load, and does not decide how far ahead to draw.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _InfiniteConstantSampler

_OWN_STREAM = (SequentialSampler, RandomSampler)
_STEADY = (SequentialSampler, DistributedSampler, _InfiniteConstantSampler)
"""Samplers that give the same indices when asked again in the same epoch."""


def inner_sampler(sampler: object) -> object:
    return sampler.sampler if type(sampler) is BatchSampler else sampler


def draws_own_stream(sampler: object) -> bool:
    """Does drawing further ahead leave every stream that others see alone? True of torch's own."""
    inner = inner_sampler(sampler)
    return type(inner) in _OWN_STREAM and getattr(inner, "generator", None) is None


def foretells(sampler: object) -> bool:
    """Does the order of the next epoch not depend on the trainer's random stream?

    A sampler (or batch sampler) of another class says so by a class attribute,
    ``draws_own_stream = True``: asked for an iterator at any time, it gives the next epoch's.
    """
    inner = inner_sampler(sampler)
    if getattr(type(inner), "draws_own_stream", False) is True:
        return True
    if type(inner) is RandomSampler:
        return inner.generator is not None
    return type(inner) in (SequentialSampler, DistributedSampler)


class Draws:
    """One epoch of a sampler; ``drawing`` is its iterator."""

    def __init__(self, sampler: Any, drawing: Iterator[Any], at: int = 0) -> None:
        """``at``: the position of the first index that ``drawing`` gives."""
        self._sampler = sampler
        self._drawing = drawing
        self._at = at
        inner = inner_sampler(sampler)
        self._steady = type(inner) in _STEADY
        self._generator: torch.Generator | None = None
        if type(inner) is RandomSampler and not inner.replacement:
            self._steady = True
            self._generator = inner.generator or torch.default_generator
            self._start = self._generator.get_state()

    def draw(self, position: int) -> Any:
        """What the sampler has for this position, the next one unless a draw was interrupted."""
        if self._at != position:
            self._draw_again(position)
        self._at = -1
        try:
            index = next(self._drawing)
        except Exception:  # its end, or an error of its own
            self._at = position
            raise
        self._at = position + 1
        return index

    def _draw_again(self, position: int) -> None:
        if not self._steady:
            raise RuntimeError(
                f"iterating was interrupted while {type(self._sampler).__name__} drew indices, and "
                "it may not draw the same ones again: start a new iteration"
            )
        generator = self._generator
        if generator is None:
            self._drawing = self._forwarded(position)
        else:
            now = generator.get_state()
            generator.set_state(self._start)
            try:
                self._drawing = self._forwarded(position)
            finally:
                if position:  # else its first draw is still to come
                    generator.set_state(now)
        self._at = position

    def _forwarded(self, position: int) -> Iterator[Any]:
        drawing: Iterator[Any] = iter(self._sampler)
        for _ in range(position):
            next(drawing)
        return drawing
