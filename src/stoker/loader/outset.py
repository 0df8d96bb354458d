"""What the iterators of workers and of the main process do alike before the first batch.

Job, progress, and, where a state was loaded, going back to where it stands. Loads no data.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from stoker.loader.datapipes import apply_shared_seed, sharding_init_fn
from stoker.loader.engine import log
from stoker.loader.fetch import Job
from stoker.loader.progress import Progress
from stoker.loader.replay import Start, redraw, rewind
from stoker.loader.state import LoaderState
from stoker.loader.streams import Stand, is_stateful

if TYPE_CHECKING:
    from stoker.loader.dataloader import DataLoader


def job_of(iterator: _BaseDataLoaderIter, loader: DataLoader[Any]) -> Job:
    """What torch's base class has read out of the loader, for whoever loads."""
    return Job(
        dataset=iterator._dataset,
        iterable=bool(iterator._dataset_kind),
        batched=iterator._auto_collation,
        collate_fn=iterator._collate_fn,
        drop_last=iterator._drop_last,
        base_seed=int(iterator._base_seed),
        worker_init_fn=sharding_init_fn(
            iterator._dataset, loader.worker_init_fn, iterator._world_size, iterator._rank
        ),
        num_workers=iterator._num_workers,
        shared_seed=iterator._shared_seed,
        skip_errors=loader.on_error == "skip",
        tight=False,
        share=loader._shares(),
    )


def draw_again(
    iterator: Any, loader: DataLoader[Any], resumed: LoaderState, natural: tuple[str, ...]
) -> None:
    """Put sampler and seeds where a state says."""
    rewind(loader, resumed)
    iterator._sampler_iter, seed = redraw(loader, resumed, natural)
    if resumed.base_seed is not None:
        seed = resumed.base_seed
    if seed is not None:
        iterator._base_seed = seed
    if resumed.shared_seed is not None:
        iterator._shared_seed = resumed.shared_seed
        apply_shared_seed(iterator._dataset, resumed.shared_seed)
    iterator._num_yielded = resumed.delivered


def progress_of(
    iterator: Any,
    loader: DataLoader[Any],
    resumed: LoaderState | None,
    start: Start,
    draws: tuple[str, ...],
    *,
    lasting: bool,
) -> Progress:
    facts: dict[str, Any] = {
        "base_seed": int(iterator._base_seed),
        "shared_seed": iterator._shared_seed,
        "draws": draws,
        "persistent": iterator._persistent_workers,
        "lasting": lasting,
    }
    if resumed is not None:
        progress = Progress.resumed(resumed, start, **facts)
    else:
        progress = Progress(loader._fits(), start, **facts)
    progress.dataset = loader._stateful_dataset()
    loader._progress = progress
    return progress


def stands_of(sampler: Any, resumed: LoaderState) -> dict[int, Stand]:
    """Where each worker goes on with an iterable dataset."""
    payload = next(iter(sampler))
    replayed = 0
    stands = {}
    for worker, found in resumed.workers.items():
        over = bool(found.get("ended"))  # this epoch will not ask it, perhaps the next one
        batches = 0 if over else found["batches"]
        fresh = over or bool(found.get("fresh"))
        stands[int(worker)] = Stand(batches, found["state"], fresh, payload)
        if not found["state"]:
            replayed += batches
    if replayed:
        log.warning(
            "the iterable dataset and its iterator have no state_dict() and load_state_dict(): "
            "%d batches are loaded again and dropped in order to resume",
            replayed,
        )
    return stands


def restore_dataset(loader: DataLoader[Any], resumed: LoaderState) -> None:
    """Of a map-style dataset that has a state; iterable ones are restored where they are read."""
    if resumed.dataset is not None and is_stateful(loader.dataset):
        loader.dataset.load_state_dict(copy.deepcopy(resumed.dataset))  # type: ignore[attr-defined]
