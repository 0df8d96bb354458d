"""The random and sampler side of a resume: what an epoch's start drew from, and drawing it again.

Before an epoch's first draw the generators' states are noted; to resume, they are put back, the
sampler is asked again in the same order, and what was delivered is skipped: indices, not data. The
trainer's global generators are then put back as they were: a trainer restores its own random state,
in which that epoch's draws have been made already. Does not know workers or batches.
"""

from __future__ import annotations

import array
import base64
import contextlib
import copy
import itertools
import logging
import random
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from stoker.loader.state import LoaderState
from stoker.loader.streams import is_stateful

if TYPE_CHECKING:
    from stoker.loader.dataloader import DataLoader

log = logging.getLogger("stoker.loader")

SAMPLER, SEED = "sampler", "seed"
"""Steps of an epoch's start: ask the sampler for an iterator; draw the base seed."""
_DEEP = 8
_NOTHING = object()


# ---- generators as plain data


def _encode(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _torch_words(state: torch.Tensor) -> str:
    return _encode(state.numpy().tobytes())


def _torch_state(words: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(words)), dtype=torch.uint8)


def _python_words(state: tuple[Any, ...]) -> list[Any]:
    version, numbers, gauss = state
    return [version, _encode(array.array("I", numbers).tobytes()), gauss]


def _python_state(words: list[Any]) -> tuple[Any, ...]:
    numbers = array.array("I", base64.b64decode(words[1]))
    return words[0], tuple(numbers), words[2]


def _numpy_words(state: tuple[Any, ...]) -> list[Any]:
    name, keys, position, has_gauss, gauss = state
    return [name, _encode(keys.tobytes()), int(position), int(has_gauss), float(gauss)]


def _numpy_state(words: list[Any]) -> tuple[Any, ...]:
    return words[0], np.frombuffer(base64.b64decode(words[1]), dtype=np.uint32), *words[2:]


# ---- samplers within samplers


def samplers(loader: DataLoader[Any]) -> Iterator[tuple[str, Any]]:
    """The index sampler and what it wraps, each with a name that finds it again."""
    name, sampler = "sampler", loader._index_sampler
    for _ in range(_DEEP):
        yield name, sampler
        for inner in ("sampler", "batch_sampler"):
            found = getattr(sampler, inner, None)
            if found is not None and isinstance(found, Iterable):
                name, sampler = f"{name}.{inner}", found
                break
        else:
            return


def _own_generators(loader: DataLoader[Any]) -> Iterator[tuple[str, torch.Generator]]:
    if loader.generator is not None:
        yield "loader", loader.generator
    for name, sampler in samplers(loader):
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            yield name, generator


def _is_torchs(sampler: object) -> bool:
    """torch's own samplers draw from torch's generators only, others may draw from any."""
    return type(sampler).__module__.startswith("torch.utils.data")


def describe(loader: DataLoader[Any], streams: int | None) -> dict[str, Any]:
    """What must be the same for a state to fit."""
    try:
        samples = len(loader.dataset) if streams is None else None  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - a dataset may have no length, or none now
        samples = None
    names = []
    for _, sampler in samplers(loader):
        name = type(sampler).__name__
        # One that keeps a state judges by itself whether it fits another number of ranks.
        if isinstance(sampler, DistributedSampler) and not is_stateful(sampler):
            name += f" over {sampler.num_replicas}"
        names.append(name)
    index_sampler = loader._index_sampler
    batch_size = loader.batch_size
    if batch_size is None and isinstance(index_sampler, BatchSampler):
        # Frameworks have batch samplers that wrap another one, and no size of their own.
        batch_size = getattr(index_sampler, "batch_size", None)
    return {
        "kind": "map" if streams is None else "iterable",
        "samples": samples,
        "batch_size": batch_size,
        "drop_last": bool(loader.drop_last),
        "sampler": " of ".join(names),
        "streams": streams,
    }


# ---- what the start of an epoch depends on


class Start:
    """The random and sampler state at one moment; raw until somebody asks for it as data."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        chain = list(samplers(loader))
        self._torch = torch.default_generator.get_state()
        self._others: tuple[Any, Any] | None = None
        if not all(_is_torchs(sampler) for _, sampler in chain):
            self._others = (random.getstate(), np.random.get_state(legacy=True))
        self.own = [(name, g, g.get_state()) for name, g in _own_generators(loader)]
        self.sampler_epochs = sampler_epochs(loader)
        self.sampler_states = sampler_states(stateful_samplers(loader))
        self._words: dict[str, Any] | None = None

    @property
    def generators(self) -> dict[str, Any]:
        """All of them as plain data; the same generator is the same object (and pickled once)."""
        if self._words is None:
            words: dict[str, Any] = {"torch": _torch_words(self._torch)}
            if self._others is not None:
                words["python"] = _python_words(self._others[0])
                words["numpy"] = _numpy_words(self._others[1])
            seen: dict[int, str] = {}
            for name, generator, state in self.own:
                if id(generator) not in seen:
                    seen[id(generator)] = _torch_words(state)
                words[name] = seen[id(generator)]
            self._words = words
        return self._words

    def put_own_back(self) -> None:
        """As if the sampler had not drawn since."""
        for _, generator, state in self.own:
            generator.set_state(state)


def sampler_epochs(loader: DataLoader[Any]) -> dict[str, int]:
    """Epochs of the samplers that are told theirs."""
    return {
        name: sampler.epoch
        for name, sampler in samplers(loader)
        if hasattr(sampler, "set_epoch") and isinstance(getattr(sampler, "epoch", None), int)
    }


def stateful_samplers(loader: DataLoader[Any]) -> list[tuple[str, Any]]:
    """Those that keep a state of their own."""
    return [(name, sampler) for name, sampler in samplers(loader) if is_stateful(sampler)]


def sampler_states(stateful: list[tuple[str, Any]]) -> dict[str, Any]:
    """Their states as they are now."""
    return {name: copy.deepcopy(sampler.state_dict()) for name, sampler in stateful}


# ---- drawing again


class Streams:
    """The three global generators at one moment."""

    def __init__(self) -> None:
        self._torch = torch.default_generator.get_state()
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state(legacy=True)

    def words(self) -> dict[str, Any]:
        """As a state holds them."""
        return {
            "torch": _torch_words(self._torch),
            "python": _python_words(self._python),
            "numpy": _numpy_words(self._numpy),
        }

    def put_back(self, but: frozenset[str] = frozenset()) -> None:
        """Set the generators to this moment, except those named."""
        if "torch" not in but:
            torch.default_generator.set_state(self._torch)
        if "python" not in but:
            random.setstate(self._python)
        if "numpy" not in but:
            np.random.set_state(self._numpy)


@contextlib.contextmanager
def replaying(state: LoaderState | None) -> Iterator[None]:
    """Inside, the global generators may be set as the state says; afterwards they are put back.

    Except that a new epoch, begun by a trainer whose generator stands just where it stood when
    the state was saved, draws from it as it would have without the interruption.
    """
    if state is None:
        yield
        return
    before = Streams()
    kept: frozenset[str] = frozenset()
    if state.fresh:
        saved = state.generators
        kept = frozenset(name for name, words in before.words().items() if saved.get(name) == words)
    try:
        yield
    finally:
        before.put_back(kept)


def drawn_first(drawing: Iterator[Any], then: Streams) -> Iterator[Any]:
    """Have a sampler that was not asked yet make its first draws from the streams of ``then``.

    Where they stand just so, it is left to draw when it is asked, and they move on with it.
    """
    now = Streams()
    if now.words() == then.words():
        return drawing
    then.put_back()
    try:
        first = list(itertools.islice(drawing, 1))
    finally:
        now.put_back()
    return itertools.chain(first, drawing)


def rewind(loader: DataLoader[Any], state: LoaderState) -> None:
    """Put generators and samplers where the state says."""
    saved = state.generators
    if "torch" in saved:
        torch.default_generator.set_state(_torch_state(saved["torch"]))
    if "python" in saved:
        random.setstate(_python_state(saved["python"]))
    if "numpy" in saved:
        np.random.set_state(_numpy_state(saved["numpy"]))
    for name, generator in _own_generators(loader):
        if name in saved:
            generator.set_state(_torch_state(saved[name]))
    for name, sampler in samplers(loader):
        epoch = state.sampler_epochs.get(name)
        now = getattr(sampler, "epoch", None)
        if not state.fresh and epoch is not None and now != epoch and hasattr(sampler, "set_epoch"):
            log.warning(
                "%s is at epoch %s and the state to resume is from the middle of epoch %s: "
                "the sampler is set to that one",
                type(sampler).__name__,
                now,
                epoch,
            )
            sampler.set_epoch(epoch)
        if name in state.sampler_states and is_stateful(sampler):
            sampler.load_state_dict(copy.deepcopy(state.sampler_states[name]))


def redraw(
    loader: DataLoader[Any], state: LoaderState, natural: tuple[str, ...]
) -> tuple[Iterator[Any], int | None]:
    """The epoch's index iterator, and the base seed if one was drawn.

    Samplers are asked as often as they were, in the order the saved loader did it (or, for an
    epoch that is yet to begin, as this loader does it).
    """
    sampler = loader._index_sampler
    drawing: Iterator[Any] = iter(())
    seed = None
    for step in state.draws or natural:
        if step == SAMPLER:
            drawing = iter(sampler)
        else:
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator))
    if state.sampler_states and not state.delivered:
        # A state from the end of an epoch, taken before a lazy sampler has begun the next one:
        # the first iterator finds the end, and the next begins anew.
        first = next(drawing, _NOTHING)
        drawing = iter(sampler) if first is _NOTHING else itertools.chain([first], drawing)
    return drawing, seed
