"""Where an iterable dataset stands: saved after each batch, restored, or replayed.

Runs wherever the dataset runs (a worker or the trainer) and knows nothing of other workers. A
state is the dataset's, its iterator's or both, as torchdata has it; it is pickled at once, so that
it is of this moment although the dataset goes on.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stoker.errors import StateError

Saved = bytes | str | None
"""A pickled state, or why there is none to be had, or None where nobody keeps one."""


@dataclass(frozen=True, slots=True)
class Stand:
    """From where a worker goes on. Without a state, ``batches`` of ``payload`` are replayed."""

    batches: int
    state: Any
    fresh: bool
    """The state is from the end of an epoch: begin the next."""
    payload: Any


def is_stateful(thing: object) -> bool:
    """Does it have torchdata's two methods?"""
    return callable(getattr(thing, "state_dict", None)) and callable(
        getattr(thing, "load_state_dict", None)
    )


def save(dataset: Any, iterator: Any, ended: bool) -> Saved:
    """The present state. A dataset that can't give one goes on delivering all the same.

    ``ended``: its end came within the last batch, and it may stand at its next beginning already.
    """
    try:
        parts: dict[str, Any] = {}
        if is_stateful(iterator):
            parts["iterator"] = iterator.state_dict()
        if iterator is not dataset and is_stateful(dataset):
            parts["dataset"] = dataset.state_dict()
        if parts and ended:
            parts["ended"] = True
        return pickle.dumps(parts, 5) if parts else None
    except Exception as error:  # noqa: BLE001 - reported to whoever asks for the loader's state
        return f"{type(error).__name__}: {error}"


def read(saved: Saved) -> Any:
    """What was saved; a StateError says why nothing could be."""
    if isinstance(saved, str):
        raise StateError(
            f"state_dict() of the iterable dataset (or of its iterator) failed: {saved}. "
            "Its states must be picklable and may not need arguments."
        )
    return None if saved is None else pickle.loads(saved)


def reopen(dataset: Any, stand: Stand) -> Iterator[Any]:
    """An iterator that stands where it stood: dataset first, then its iterator, as torchdata."""
    state = stand.state or {}
    if "dataset" in state and is_stateful(dataset):
        dataset.load_state_dict(state["dataset"])
    iterator: Iterator[Any] = iter(dataset)
    if "iterator" in state and is_stateful(iterator):
        iterator.load_state_dict(state["iterator"])  # type: ignore[attr-defined]
        if stand.fresh:
            iterator = iter(dataset)
    return iterator
