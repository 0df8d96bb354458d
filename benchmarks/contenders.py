"""The contenders: the same dataset, batches and order, through each library. Measures nothing.

SPDL is given what was fastest here: one stage that fetches and collates a whole batch in a thread
(a stage per sample, its tutorial's form, was 3 to 90 times slower with these cheap samples), output
in input order, one thread a worker plus one that steps the sampler, and a sink as deep as torch's
prefetch. Its process-backed loader was slower than torch in all of four cases, and a region of
worker processes, with or without its arena, can't keep the sampler's order: neither is measured.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

TORCH_PREFETCH = 2
"""What torch does where nobody says."""

TITLES = {
    "torch": "torch",
    "torch_unordered": "torch, in_order=False",
    "torch_skipping": "torch, seen indices left out",
    "torchdata": "torchdata's StatefulDataLoader",
    "stoker": "Stoker",
    "stoker_bounded": 'Stoker, memory="400MB"',
    "stoker_shared": "Stoker, shared batches",
    "spdl": "SPDL threads",
}
MODULES = {
    "torch": "torch",
    "torch_unordered": "torch",
    "torch_skipping": "torch",
    "torchdata": "torchdata.stateful_dataloader",
    "stoker": "stoker",
    "stoker_bounded": "stoker",
    "stoker_shared": "stoker",
    "spdl": "spdl.pipeline",
}


@dataclass(frozen=True, slots=True)
class LoaderSpec:
    """All that a loader is asked for; the same for every contender."""

    dataset: Any
    batch_size: int
    workers: int = 2
    prefetch: int = TORCH_PREFETCH
    collate_fn: Callable[[list[Any]], Any] | None = None
    start_method: str | None = None
    memory: str | None = None
    shuffle: bool = False
    share: bool = False


def missing(contender: str) -> str:
    """Why a contender can't run here, or an empty string."""
    module = MODULES[contender]
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    return "" if found else f"{module} is not installed"


def load_library(contender: str) -> None:
    """Import a contender's library, so that its import counts neither as time nor as memory."""
    if contender == "spdl":
        import spdl.pipeline  # noqa: F401
    elif contender == "torchdata":
        import torchdata.stateful_dataloader  # noqa: F401
    elif contender.startswith("stoker"):
        import stoker

        _ = stoker.DataLoader


def make_loader(contender: str, spec: LoaderSpec) -> Any:
    """An iterable over the batches of `spec`, through one contender."""
    if contender in ("torch", "torch_unordered", "torch_skipping"):
        from torch.utils.data import DataLoader

        make: Any = DataLoader
        in_order = contender != "torch_unordered"
        return make(spec.dataset, **_torch_arguments(spec), in_order=in_order)
    if contender == "torchdata":
        from torchdata.stateful_dataloader import StatefulDataLoader

        make = StatefulDataLoader
        return make(spec.dataset, **_torch_arguments(spec))
    if contender == "stoker":
        import stoker

        make = stoker.DataLoader
        extra: dict[str, Any] = {} if spec.memory is None else {"memory": spec.memory}
        if spec.share:
            extra["share_batches"] = True
        return make(spec.dataset, **_torch_arguments(spec), **extra)
    if contender == "stoker_bounded":
        return make_loader("stoker", replace(spec, memory="400MB"))
    if contender == "stoker_shared":
        return make_loader("stoker", replace(spec, share=True))
    if contender == "spdl":
        return _Spdl(spec)
    raise ValueError(f"no contender is named {contender!r}: choose from {', '.join(TITLES)}")


def _torch_arguments(spec: LoaderSpec) -> dict[str, Any]:
    return {
        "batch_size": spec.batch_size,
        "num_workers": spec.workers,
        # torch's default is not spelled out, as in most scripts: Stoker takes a number that is
        # spelled out for a bound, and draws small batches further ahead where there is none.
        "prefetch_factor": None if spec.prefetch == TORCH_PREFETCH else spec.prefetch,
        "collate_fn": spec.collate_fn,
        "multiprocessing_context": spec.start_method,
        "shuffle": spec.shuffle,
    }


class _Spdl:
    """SPDL's pipeline as an iterable."""

    def __init__(self, spec: LoaderSpec) -> None:
        self._spec = spec

    def __iter__(self) -> Iterator[Any]:
        from spdl.pipeline import PipelineBuilder
        from torch.utils.data import BatchSampler, SequentialSampler, default_collate

        spec = self._spec
        dataset, collate = spec.dataset, spec.collate_fn or default_collate

        def fetch(indices: list[int]) -> Any:
            return collate([dataset[index] for index in indices])

        builder: Any = PipelineBuilder()
        pipeline = (
            builder.add_source(BatchSampler(SequentialSampler(dataset), spec.batch_size, False))
            .pipe(fetch, concurrency=spec.workers, output_order="input")
            .add_sink(max(1, spec.workers * (spec.prefetch - 1)))
            .build(num_threads=spec.workers + 1)
        )
        with pipeline.auto_stop():
            yield from pipeline.get_iterator(timeout=120)
