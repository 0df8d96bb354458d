"""The coming epoch, drawn before the current one has ended (``prefetch_next_epoch``).

Only for samplers whose next order does not depend on the trainer's random stream. What was drawn
early is used only if drawing at the usual moment would give the same; otherwise it is thrown away
and drawn anew. Draws and remembers; submits and loads nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DistributedSampler

from stoker.loader.draws import Draws
from stoker.loader.replay import Start, sampler_epochs, samplers

if TYPE_CHECKING:
    from stoker.loader.dataloader import DataLoader


class Ahead:
    """Indices of the coming epoch. ``last_epochs`` are samplers' epochs of the one before last."""

    def __init__(self, loader: DataLoader[Any], last_epochs: dict[str, int]) -> None:
        self.start = Start(loader)
        self.sampler = loader._index_sampler
        self.position = 0
        self.pending: dict[int, Any] = {}
        self.exhausted = False
        self.failed = False
        self.after: dict[int, dict[str, Any]] = {}
        """States of samplers that keep one, by position."""
        self._chain = list(samplers(loader))
        self._generators = [g for _, g, _ in self.start.own]
        self._left_at: list[torch.Tensor] = []
        self._samples = _samples(loader)
        # Who called set_epoch() with the next number so far will do so again.
        self._expected = dict(self.start.sampler_epochs)
        for name, sampler in self._chain:
            if isinstance(sampler, DistributedSampler):
                told = last_epochs.get(name) == sampler.epoch - 1
                self._expected[name] = sampler.epoch + told
        self.drawing = iter(self.sampler)
        self.draws = Draws(self.sampler, self.drawing)

    def draw(self) -> Any:
        """The next index; raises StopIteration at the end of that epoch."""
        if self.position:
            index = self.draws.draw(self.position)
        else:
            index = self._draw_first()
        self._left_at = [generator.get_state() for generator in self._generators]
        return index

    def _draw_first(self) -> Any:
        """As the sampler will be: its epoch may be one that is yet to be set."""
        foreseen = [
            (sampler, self._expected[name])
            for name, sampler in self._chain
            if isinstance(sampler, DistributedSampler) and name in self._expected
        ]
        before = [sampler.epoch for sampler, _ in foreseen]
        try:
            for sampler, epoch in foreseen:
                sampler.epoch = epoch
            return self.draws.draw(0)
        finally:
            for (sampler, _), epoch in zip(foreseen, before, strict=True):
                sampler.epoch = epoch

    def untouched(self) -> bool:
        """Are the sampler's own generators where these draws have left them?"""
        return len(self._left_at) == len(self._generators) and all(
            torch.equal(generator.get_state(), left)
            for generator, left in zip(self._generators, self._left_at, strict=True)
        )

    def is_right(self, loader: DataLoader[Any]) -> bool:
        """Would drawing now, from where these draws began, give the same?"""
        chain = list(samplers(loader))
        return (
            not self.failed
            and len(chain) == len(self._chain)
            and all(a is b for (_, a), (_, b) in zip(chain, self._chain, strict=True))
            and sampler_epochs(loader) == self._expected
            and _samples(loader) == self._samples
            and self.untouched()
        )

    def take_back(self) -> None:
        """Leave the sampler's generators as if nothing had been drawn early."""
        if self.untouched():
            self.start.put_own_back()


def _samples(loader: DataLoader[Any]) -> int | None:
    try:
        return len(loader.dataset)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - a dataset may have no length
        return None
