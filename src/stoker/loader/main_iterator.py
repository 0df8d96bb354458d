"""``num_workers=0``: the trainer loads, through torch's own iterator. No engine, no workers."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from stoker.loader.fetch import Fetcher, Job, NothingLeft, heap_room
from stoker.loader.outset import draw_again, job_of, progress_of, restore_dataset, stands_of
from stoker.loader.replay import (
    SAMPLER,
    SEED,
    Start,
    Streams,
    drawn_first,
    replaying,
    sampler_states,
    stateful_samplers,
)
from stoker.loader.state import LoaderState
from stoker.loader.stats import Counters
from stoker.loader.streams import Saved, is_stateful, save
from stoker.timeline import TRAINER

if TYPE_CHECKING:
    from stoker.loader.dataloader import DataLoader

_DRAWS = (SAMPLER, SEED)


class MainIter(_SingleProcessDataLoaderIter):
    """``num_workers=0``: torch's own iterator, with figures, ``on_error`` and a state."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        resumed = loader._loaded
        # A dataset that restores its state may set a global generator: here that is the trainer's,
        # and the dataset draws from it next, after what a new epoch draws.
        if resumed is not None and resumed.fresh:
            restore_dataset(loader, resumed)
        start = Start(loader)
        self._position = 0
        self._already: frozenset[int] = frozenset()
        with replaying(resumed):
            super().__init__(loader)
            self._counters: Counters = loader._counters
            self._stateful = stateful_samplers(loader)
            if resumed is not None:
                draw_again(self, loader, resumed, _DRAWS)
            self._progress = progress_of(self, loader, resumed, start, _DRAWS, lasting=True)
            job = job_of(self, loader)
            if resumed is not None and job.iterable:
                job = replace(job, stands=stands_of(self._index_sampler, resumed))
            elif resumed is not None:
                self._skip_delivered(resumed)
            self._skipping = Fetcher(job) if job.skip_errors else None
            self._streams = job.iterable and _keeps_a_state(self)
            if job.stands is not None and not self._streams:
                self._go_on(job)
            then = Streams() if resumed is not None and not resumed.delivered else None
        if job.stands is not None and self._streams:
            self._go_on(job)
        if resumed is not None and not resumed.fresh:
            restore_dataset(loader, resumed)
        if then is not None and not job.iterable:
            self._sampler_iter = drawn_first(self._sampler_iter, then)
        if resumed is None and self._streams:
            self._progress.begins(0, self._save())
        loader._loaded = None

    def _skip_delivered(self, resumed: LoaderState) -> None:
        """Indices, not data."""
        self._position = resumed.delivered
        self._already = frozenset(resumed.beyond)
        if not resumed.sampler_states:  # else it stands there already
            for _ in itertools.islice(self._sampler_iter, resumed.delivered):
                pass

    def _go_on(self, job: Job) -> None:
        """Bring an iterable dataset to where it stood."""
        assert job.stands is not None
        self._position = self._progress.delivered
        record = self._progress.workers.get(0, {})
        if record.get("ended"):
            self._sampler_iter = iter(())
            self._progress.ended[0] = (0, record["state"])
        if self._skipping is None and 0 in job.stands:
            fetcher = Fetcher(replace(job, collate_fn=_as_is), 0)
            self._dataset_fetcher.dataset_iter = fetcher._iterator
            self._dataset_fetcher.ended = fetcher._ended

    def _next_data(self) -> Any:
        while True:
            position, index = self._draw()
            began_ns = time.monotonic_ns()
            try:
                data = self._load(index)
            except NothingLeft:
                self._progress.mark(position)
                continue
            except StopIteration:
                self._end()
                raise
            except Exception:
                self._progress.mark(position, self._origin())
                raise
            ended_ns = time.monotonic_ns()
            took = (ended_ns - began_ns) / 1e9
            self._counters.timeline.add("fetch", TRAINER, position, began_ns, ended_ns)
            self._counters.delivered += 1
            self._counters.wait_seconds += took
            self._counters.batch(took, 0.0)
            self._progress.mark(position, self._origin())
            return self._pinned(data)

    def _draw(self) -> tuple[int, Any]:
        while True:
            try:
                index = next(self._sampler_iter)
            except StopIteration:
                self._end()
                raise
            position = self._position
            self._position += 1
            if self._stateful:
                self._progress.drew(position, sampler_states(self._stateful))
            if position not in self._already:
                return position, index

    def _origin(self) -> tuple[int, Any] | None:
        """Of an iterable dataset: as if a worker had loaded the batch."""
        if not self._dataset_kind:
            return None
        return 0, (self._save() if self._streams else None)

    def _save(self) -> Saved:
        fetcher = self._skipping
        ended = self._dataset_fetcher.ended if fetcher is None else fetcher._ended
        return save(self._dataset, self._stream(), bool(ended))

    def _stream(self) -> Any:
        fetcher = self._skipping
        return self._dataset_fetcher.dataset_iter if fetcher is None else fetcher._iterator

    def _end(self) -> None:
        progress = self._progress
        progress.finish()
        origin = self._origin()
        if origin is not None and 0 not in progress.ended:
            progress.ended[0] = (progress.loaded(0), origin[1])

    def _load(self, index: Any) -> Any:
        if self._skipping is None:
            return self._dataset_fetcher.fetch(index)
        try:
            return self._skipping.fetch(index, heap_room())
        finally:
            for skipped in self._skipping.skips:
                self._counters.skip(*skipped)

    def _pinned(self, data: Any) -> Any:
        if not self._pin_memory:
            return data
        from torch.utils.data._utils.pin_memory import pin_memory

        return pin_memory(data, self._pin_memory_device)


def _keeps_a_state(iterator: MainIter) -> bool:
    return is_stateful(iterator._dataset) or is_stateful(iterator._stream())


def _as_is(samples: Any) -> Any:
    return samples
