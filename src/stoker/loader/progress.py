"""How far one iteration has come, as the caller sees it; what ``state_dict`` is made of.

A batch counts once the caller has it: not when it was drawn, loaded, pinned or lies between the
engine and an interrupted ``next()``. Cheap, because Accelerate asks after every batch. Does not
draw, load or restore.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from stoker.loader.ahead import Ahead
from stoker.loader.replay import Start
from stoker.loader.state import LoaderState
from stoker.loader.streams import Saved, read

Origin = tuple[int, Saved]
"""Which worker a batch of an iterable dataset came from, and where that worker stood then."""


class Progress:
    """Belongs to one iterator and is read by its loader, which may outlive it."""

    def __init__(
        self,
        fits: dict[str, Any],
        start: Start,
        *,
        base_seed: int,
        shared_seed: int | None,
        draws: tuple[str, ...],
        persistent: bool,
        lasting: bool,
    ) -> None:
        """``persistent`` workers keep their base seed for the next epoch.

        ``lasting``: so does whoever iterates over the dataset keep the dataset.
        """
        self._fits = fits
        self._begun: Start | LoaderState = start
        self._constant: dict[str, Any] | None = None
        self.base_seed = base_seed
        self.shared_seed = shared_seed
        self.draws = draws
        self._persistent = persistent
        self._lasting = lasting
        self.epoch = 0
        self.delivered = 0
        self.beyond: set[int] = set()
        self.finished = False
        self.held: dict[int, Any] = {}
        """The iterator's: by thread, a batch (position first) that the caller has not got yet."""
        self.dataset: Any = None
        """A map-style dataset with a state of its own."""
        self.coming: Ahead | None = None
        """What was drawn of the next epoch already."""
        self.turn = 0
        self.workers: dict[int, dict[str, Any]] = {}
        self.ended: dict[int, tuple[int, Saved]] = {}
        """By worker whose share is over: after how many batches (since a resume), and its stand."""
        self._before: dict[int, int] = {}
        self._after: dict[int, dict[str, Any]] = {}
        self._last: tuple[int, Origin | None] | None = None

    @classmethod
    def resumed(cls, state: LoaderState, start: Start, **facts: Any) -> Progress:
        """Begin where a loaded state stands; its own start stays what it was."""
        progress = cls(state.fits, start, **facts)
        progress._begun = state
        if state.fresh:  # samplers may have been told their epoch since
            progress._begun = replace(state, sampler_epochs=start.sampler_epochs)
        progress.epoch = state.epoch
        progress.delivered = state.delivered
        progress.beyond = set(state.beyond)
        progress.turn = state.turn
        progress.workers = {int(worker): dict(found) for worker, found in state.workers.items()}
        progress._before = {worker: f["batches"] for worker, f in progress.workers.items()}
        if state.draws:
            progress.draws = tuple(state.draws)
        return progress

    @property
    def sampler_epochs(self) -> dict[str, int]:
        """As the epoch under way found them."""
        return self._begun.sampler_epochs

    def next_epoch(self, start: Start, epochs: dict[str, int] | None = None) -> None:
        """The same workers begin another epoch; ``epochs`` if samplers were told theirs since."""
        if epochs is not None:
            start.sampler_epochs = epochs
        self.workers = self._at_the_end()
        self._begun = start
        self._constant = None
        self.draws = ("sampler",)
        self.epoch += 1
        self.delivered = 0
        self.beyond = set()
        self.finished = False
        self.turn = 0
        self.held = {}
        self.coming = None
        self._before = {}
        self._after = {}
        self._last = None

    def _at_the_end(self) -> dict[int, dict[str, Any]]:
        """Where workers stand that go on with another epoch."""
        found = {}
        for worker in range(self._fits["streams"] or 0):
            record = self.workers.get(worker, {})
            state = record.get("state")
            end = self.ended.get(worker)
            if end is not None:
                state = end[1]
            elif not (record.get("fresh") or record.get("ended")):
                continue  # it was left in the middle: nobody knows where it stands by now
            if state is not None:
                found[worker] = {"batches": 0, "state": state, "fresh": True}
        return found

    def begins(self, worker: int, stand: Saved) -> None:
        """Where a worker stands before its first batch."""
        if isinstance(stand, bytes):
            self.workers[worker] = {"batches": 0, "state": stand, "fresh": False}

    # ---- noted for every batch

    def mark(self, position: int, origin: Origin | None = None) -> None:
        """This batch goes to the caller now; the one before has reached him."""
        last = self._last
        if last is not None and last[0] != position:
            self._settle(last)
        self._last = (position, origin)

    def finish(self) -> None:
        """The caller has been told that the epoch is over."""
        if self._last is not None:
            self._settle(self._last)
            self._last = None
        self.finished = True

    def drew(self, position: int, states: dict[str, Any]) -> None:
        """Where samplers with a state of their own stood after this draw."""
        self._after[position] = states

    def _settle(self, last: tuple[int, Origin | None]) -> None:
        position, origin = last
        if origin is not None:
            worker, state = origin
            before = self.workers.get(worker)
            count = before["batches"] if before is not None else 0
            self.workers[worker] = {"batches": count + 1, "state": state, "fresh": False}
            self.turn = worker + 1
            self.delivered += 1
            return
        if position != self.delivered:
            if position > self.delivered:
                self.beyond.add(position)
            return
        position += 1
        if self.beyond:
            while position in self.beyond:
                self.beyond.remove(position)
                position += 1
        if self._after:
            for old in [old for old in self._after if old < position - 1]:
                del self._after[old]
        self.delivered = position

    def loaded(self, worker: int) -> int:
        """Batches of a worker that reached the caller since the resume, if there was one."""
        record = self.workers.get(worker)
        return record["batches"] - self._before.get(worker, 0) if record is not None else 0

    # ---- as a state

    def state(self) -> dict[str, Any]:
        """In the middle of an epoch. What does not change within one is made only once."""
        last = self._last
        if last is not None:
            held = self.held
            if not held or last[0] not in [found[0] for found in held.values()]:
                self._settle(last)
                self._last = None
        if self._constant is None:
            self._constant = self._make_constant()
        state = self._constant.copy()
        state["delivered"] = delivered = self.delivered
        state["beyond"] = sorted(self.beyond) if self.beyond else []
        if self._after and delivered - 1 in self._after:
            state["sampler_states"] = self._after[delivered - 1]
        if self.dataset is not None:
            state["dataset"] = copy.deepcopy(self.dataset.state_dict())
        if self._fits["streams"]:
            state["workers"] = self._workers()
            state["turn"] = self.turn
        return state

    def _make_constant(self) -> dict[str, Any]:
        begun = self._begun
        return LoaderState(
            fits=self._fits,
            fresh=False,
            epoch=self.epoch,
            base_seed=self.base_seed,
            shared_seed=self.shared_seed,
            draws=list(self.draws),
            generators=begun.generators,
            sampler_epochs=begun.sampler_epochs,
            sampler_states=begun.sampler_states,
        ).as_dict()

    def _workers(self) -> dict[str, Any]:
        found = {}
        for worker in range(self._fits["streams"]):
            record = self.workers.get(worker)
            end = self.ended.get(worker)
            batches = record["batches"] if record is not None else 0
            if end is not None and end[0] + self._before.get(worker, 0) == batches:
                found[str(worker)] = {"batches": batches, "ended": True, "state": _plain(end[1])}
            elif record is not None:
                found[str(worker)] = {**record, "state": _plain(record["state"])}
        return found

    def fresh(self, start: Start, fits: dict[str, Any], dataset: Any) -> dict[str, Any]:
        """After the end of an epoch: what the next one begins with."""
        goes_on = self._persistent
        workers = self._at_the_end() if self._lasting else {}
        return LoaderState(
            fits=fits,
            epoch=self.epoch + 1 if goes_on else 0,
            base_seed=self.base_seed if goes_on else None,
            draws=["sampler"] if goes_on else [],
            generators=start.generators,
            sampler_epochs=start.sampler_epochs,
            sampler_states=start.sampler_states,
            dataset=dataset,
            workers={str(w): {**r, "state": _plain(r["state"])} for w, r in workers.items()},
        ).as_dict()


def _plain(saved: Any) -> Any:
    return read(saved) if isinstance(saved, (bytes, str)) else saved
