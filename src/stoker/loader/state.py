"""What ``DataLoader.state_dict()`` holds: its form, its version, and whether it fits a loader.

A state is plain data (dicts, lists, strings, numbers; what samplers and datasets put into their
own states is theirs), so it can be pickled, saved with torch, loaded with ``weights_only=True``
and, where they allow it, written as JSON. Nothing here draws, loads or touches a generator.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from stoker.errors import StateError

VERSION = 1
"""Raised when an older Stoker could misread a state; older states stay readable."""

_WHAT_TO_DO = (
    "Build the loader as it was when the state was saved, or call "
    "load_state_dict(state, strict=False) to go on regardless."
)
_ASKED = {
    "kind": "dataset style",
    "samples": "length of the dataset",
    "batch_size": "batch_size",
    "drop_last": "drop_last",
    "sampler": "sampler",
    "streams": "workers that share an iterable dataset",
}


@dataclass(frozen=True, slots=True)
class LoaderState:
    """Where a loader stands.

    Attributes:
        fits: what the loader looked like (see ``describe`` in ``replay``).
        fresh: no epoch is under way; the next ``iter()`` begins one.
        epoch: number of the epoch, as workers seed by it.
        base_seed: of the workers; None if the next epoch draws one.
        delivered: how many batches the caller got, without a gap (of an iterable dataset: in all).
        beyond: positions delivered after the first gap (``in_order=False``).
        draws: in which order the epoch's start asked for the sampler and a base seed.
        generators: their states from before the epoch's first draw.
        sampler_epochs: of samplers that have ``set_epoch``.
        sampler_states: of samplers with a state of their own, after the last delivered batch.
        dataset: the state of a map-style dataset that has one.
        workers: by worker of an iterable dataset, what it has delivered and where it stands.
        turn: which of those workers is next.
    """

    fits: dict[str, Any]
    fresh: bool = True
    epoch: int = 0
    base_seed: int | None = None
    shared_seed: int | None = None
    delivered: int = 0
    beyond: list[int] = field(default_factory=list)
    draws: list[str] = field(default_factory=list)
    generators: dict[str, Any] = field(default_factory=dict)
    sampler_epochs: dict[str, int] = field(default_factory=dict)
    sampler_states: dict[str, Any] = field(default_factory=dict)
    dataset: Any = None
    workers: dict[str, Any] = field(default_factory=dict)
    turn: int = 0

    def as_dict(self) -> dict[str, Any]:
        """What ``state_dict`` returns; the parts are not copied."""
        return {"version": VERSION, **{name: getattr(self, name) for name in _FIELDS}}


_FIELDS: dict[str, type | tuple[type, ...]] = {
    "fits": dict,
    "fresh": bool,
    "epoch": int,
    "base_seed": (int, type(None)),
    "shared_seed": (int, type(None)),
    "delivered": int,
    "beyond": list,
    "draws": list,
    "generators": dict,
    "sampler_epochs": dict,
    "sampler_states": dict,
    "dataset": object,
    "workers": dict,
    "turn": int,
}


def parse(state: Any) -> LoaderState:
    """Read what ``as_dict`` wrote; refuses what is not a state, or is from a later version."""
    if not isinstance(state, dict) or not isinstance(state.get("version"), int) or _alien(state):
        raise StateError(
            f"this is not a state of a stoker.DataLoader{_alien(state)}. "
            "Give what loader.state_dict() returned."
        )
    if state["version"] > VERSION:
        raise StateError(
            f"this state has version {state['version']}, and this Stoker reads up to {VERSION}. "
            "Upgrade Stoker to the version that saved it, or newer."
        )
    for name, accepted in _FIELDS.items():
        if name not in state or not isinstance(state[name], accepted):
            found = f"holds {type(state[name]).__name__}" if name in state else "is missing"
            raise StateError(f"the state is damaged: {name!r} {found}. Use another checkpoint.")
    return LoaderState(**{name: state[name] for name in _FIELDS})


def _alien(state: Any) -> str:
    """Whose state it is, if that is known and it is no loader's of ours."""
    if isinstance(state, dict):
        if "_snapshot" in state or "_num_yielded" in state:
            return " but one of torchdata's StatefulDataLoader"
        if "segments" in state:
            return " but one of an ElasticSampler"
    return ""


def differences(saved: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What the loader was and is, where both are known and differ."""
    return {
        name: (saved[name], now[name])
        for name in _ASKED
        if saved.get(name) is not None and now.get(name) is not None and saved[name] != now[name]
    }


def check(state: LoaderState, now: dict[str, Any]) -> None:
    """Refuse a state that was saved by a loader of another shape."""
    found = differences(state.fits, now)
    if found:
        words = [f"{_ASKED[name]} was {was!r} and is {is_!r}" for name, (was, is_) in found.items()]
        raise StateError(
            f"the state does not fit this loader: {'; '.join(words)}. {_WHAT_TO_DO}",
            differences=found,
        )


def adapt(state: LoaderState, now: dict[str, Any]) -> tuple[LoaderState, list[str]]:
    """The nearest that this loader can do with a state that does not fit, and what that means."""
    found = differences(state.fits, now)
    said: list[str] = []
    if "kind" in found or "streams" in found:
        state = replace(state, fresh=True, delivered=0, beyond=[], workers={}, turn=0, draws=[])
        state = replace(state, base_seed=None, sampler_states={})
        said.append("shares of the workers are others now: the epoch starts over")
    elif "batch_size" in found and state.delivered:
        was, is_ = found["batch_size"]
        batches = state.delivered * was // is_
        repeated = state.delivered * was - batches * is_
        state = replace(state, delivered=batches, beyond=[], sampler_states={})
        said.append(
            f"{batches} batches of {is_} are skipped for the delivered batches of {was}, "
            f"{repeated} samples are delivered again"
        )
    said += [f"{_ASKED[name]} was {was!r} and is {is_!r}" for name, (was, is_) in found.items()]
    return replace(state, fits=now), said
