"""``ElasticSampler``: a DistributedSampler whose epoch can be finished by another number of ranks.

Which samples are left, and whose they are. Does not count what was delivered (who trains knows
that), does not talk to other ranks and does not save anything.

torch deals an epoch's order out like cards: in step j rank r of W has position ``W·j + r``. Ranks
step together, so what they have consumed is always the front of that order, and one number, its
length, says all there is to say. The next segment deals out what lies behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import Dataset, DistributedSampler

from stoker.errors import ConfigError

_T_co = TypeVar("_T_co", covariant=True)
_VERSION = 1


class _Pass:
    """One iteration over the sampler; those that were dropped count for nothing."""

    __slots__ = ("drawn", "over")

    def __init__(self) -> None:
        self.drawn = 0
        self.over = False


class Segment(NamedTuple):
    """A part of an epoch: how many ranks there were, and how many samples each consumed."""

    world: int
    consumed: int


def consumed_front(history: Sequence[Segment]) -> int:
    """How many positions of the epoch's order are consumed."""
    return sum(segment.world * segment.consumed for segment in history)


def share(length: int, front: int, world: int, drop_last: bool) -> int:
    """How many samples each of ``world`` ranks gets of what lies behind ``front``."""
    left = max(length - front, 0)
    return left // world if drop_last else -(-left // world)


def positions(front: int, world: int, rank: int, count: int) -> range:
    """A rank's places in the epoch's order. Past its end, it begins anew: torch's padding."""
    return range(front + rank, front + rank + world * count, world)


def extended(history: Sequence[Segment], world: int, consumed: int) -> tuple[Segment, ...]:
    """The history after ``consumed`` more samples on each of ``world`` ranks."""
    if not consumed:
        return tuple(history)
    if history and history[-1].world == world:  # a restart is not a change
        return (*history[:-1], Segment(world, history[-1].consumed + consumed))
    return (*history, Segment(world, consumed))


class ElasticSampler(DistributedSampler[_T_co]):
    """torch's DistributedSampler, and its epoch may go on under another world size.

    With the world unchanged it gives exactly torch's indices, resumed or not. After 4 ranks have
    saved in mid-epoch, 2 or 3 can load the state: over all ranks and segments every index of the
    epoch comes exactly once. What doesn't divide evenly concerns only the end of the epoch, and
    the world that ends it, as in torch: without ``drop_last`` the last step is filled up with the
    first samples of the epoch's order (at most ``world - 1`` repetitions), with ``drop_last`` the
    last ``left % world`` samples are left out of this epoch.

    The state counts samples *delivered to training*, on this rank. A loader draws ahead, so the
    sampler can't know what has arrived: save the loader's state, or say it.

        state = sampler.state_dict(delivered=samples_trained_on)

    States of all ranks are equal, so one rank's is enough to save. ``len()`` is what is left for
    this rank in the epoch at hand. ``set_epoch`` to another epoch begins that from its start; to
    the same epoch, as scripts do after resuming, it keeps what was consumed. Where nobody calls it,
    the pass after a finished one is a whole epoch again, and one that was left begins again.

    **For loaders**: ``state_dict()`` without an argument, right after a draw, is the state once
    all that was drawn so far has been delivered: keep it with the batch, and use it when that has
    arrived. Or count: ``state_after(n)`` for the ``n`` samples of this pass that have arrived, at
    any time until the next pass begins; ``state_after(n, origin)`` also later, where ``origin`` is
    ``state_after(0)`` from within the pass. Loading either leaves nothing to fast-forward.
    """

    def __init__(
        self,
        dataset: Dataset[_T_co],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self._length = len(dataset)  # type: ignore[arg-type]  # sized, or torch had refused it
        self._begin(())

    def _begin(self, history: tuple[Segment, ...]) -> None:
        """The next pass deals out what lies behind ``history``."""
        self._history = history
        self._front = consumed_front(history)
        self._pass = _Pass()
        # torch's attributes, which others read.
        self.num_samples = share(self._length, self._front, self.num_replicas, self.drop_last)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[_T_co]:
        # A generator: a loader may ask for an iterator and drop it; only the first draw counts.
        if self._pass.over:
            self._begin(())
        this = self._pass = _Pass()
        try:
            for index in self._indices():
                this.drawn += 1
                yield index
            this.over = True
        finally:
            if not this.over:
                this.drawn = 0  # left in the middle: the next one begins where this one began

    def _indices(self) -> list[Any]:
        mine = positions(self._front, self.num_replicas, self.rank, self.num_samples)
        if not mine:
            return []
        wanted = torch.arange(mine.start, mine.stop, mine.step).remainder_(self._length)
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            wanted = torch.randperm(self._length, generator=generator)[wanted]
        found: list[Any] = wanted.tolist()
        return found

    def set_epoch(self, epoch: int) -> None:
        """As torch's; what was consumed of another epoch is forgotten."""
        if epoch != self.epoch:
            self._begin(())
        super().set_epoch(epoch)

    # ---- state

    def state_after(self, samples: int, origin: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The state once this rank's caller has got ``samples`` of the pass at hand.

        Args:
            samples: delivered on this rank, counted from the beginning of the pass.
            origin: the state at the beginning of the pass, if the sampler may have moved on since.
        """
        return self._after(samples, origin, "samples")

    def _after(self, samples: int, origin: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
        if origin is None:
            seed, epoch, history = self.seed, self.epoch, self._history
        else:
            seed, epoch, history = self._checked(origin)
        most = share(self._length, consumed_front(history), self.num_replicas, self.drop_last)
        if not hasattr(samples, "__index__") or not 0 <= samples <= most:
            raise ConfigError(
                name=name,
                given=samples,
                accepted=f"an int from 0 to {most}: what rank {self.rank} of {self.num_replicas} "
                "has in this pass (count samples of this rank alone, not of all, from the "
                "beginning of the epoch or from where it was resumed)",
            )
        return self._state(seed, epoch, extended(history, self.num_replicas, int(samples)))

    def state_dict(self, delivered: int | None = None) -> dict[str, Any]:
        """The state after ``delivered`` samples of this rank have reached training in this pass.

        Without ``delivered``, after all that was drawn in this pass. Beside a loader that draws
        ahead that is too much, and what was under way would be lost: say ``delivered``, or save the
        loader's state.
        """
        if delivered is None:
            return self.state_after(self._pass.drawn)
        return self._after(delivered, None, "delivered")

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on where ``state`` was taken, with however many ranks there are now.

        Given the states of several ranks, they must be equal: ranks step together, and where they
        did not, no position in the epoch is theirs in common.
        """
        if not isinstance(state, Mapping):
            state = _agreed(state)
        seed, epoch, history = self._checked(state)
        self.seed = seed
        super().set_epoch(epoch)
        self._begin(history)

    def _state(self, seed: int, epoch: int, history: tuple[Segment, ...]) -> dict[str, Any]:
        return {
            "version": _VERSION,
            "length": self._length,
            "shuffle": self.shuffle,
            "seed": seed,
            "epoch": epoch,
            "segments": [list(segment) for segment in history],
        }

    def _checked(self, state: Mapping[str, Any]) -> tuple[int, int, tuple[Segment, ...]]:
        """Seed, epoch and history of a state, if it is one of this dataset's."""
        try:
            version, length, shuffle = state["version"], state["length"], state["shuffle"]
            seed, epoch = int(state["seed"]), int(state["epoch"])
            history = tuple(Segment(int(w), int(c)) for w, c in state["segments"])
        except (KeyError, TypeError, ValueError) as error:
            raise _refused(state, "what state_dict() of an ElasticSampler returned") from error
        if version != _VERSION:
            raise _refused(state, f"one of version {_VERSION} (a newer Stoker wrote this one)")
        if length != self._length:
            raise _refused(
                state,
                f"one of a dataset of {self._length} samples as here: this one had {length}, so "
                "positions in it mean nothing (start the epoch anew)",
            )
        if shuffle != self.shuffle:
            raise _refused(state, f"one that was taken with shuffle={self.shuffle} as here")
        for at, segment in enumerate(history):
            left = self._length - consumed_front(history[:at])
            # The world that ends an epoch may have padded its last step.
            if segment.world < 1 or not 0 <= segment.consumed <= -(-left // segment.world):
                raise _refused(
                    state,
                    f"one whose segments fit the dataset: {segment.world} ranks can't have "
                    f"consumed {segment.consumed} samples each of the {left} that were left",
                )
        return seed, epoch, history


def _agreed(states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    if not isinstance(states, (list, tuple)) or not all(isinstance(s, Mapping) for s in states):
        raise _refused(states, "what state_dict() of an ElasticSampler returned, or a list of such")
    if not states:
        raise _refused(states, "at least one rank's state")
    for rank, state in enumerate(states):
        if state != states[0]:
            raise _refused(
                state,
                f"equal states: rank {rank}'s is not rank 0's, {dict(states[0])!r}. Ranks must "
                "have taken the same number of steps when they save; load a checkpoint that all "
                "of them finished",
            )
    agreed: Mapping[str, Any] = states[0]
    return agreed


def _refused(state: object, accepted: str) -> ConfigError:
    return ConfigError(name="state", given=state, accepted=accepted)
