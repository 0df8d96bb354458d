"""``stoker.DataLoader``: torch's DataLoader in every respect but how it loads.

Arguments, checks and attributes are torch's; iteration goes through ``EngineIter``. This file
chooses settings and builds; it moves no data.
"""

from __future__ import annotations

import copy
import multiprocessing
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar

import torch
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset, Sampler, Subset, default_collate
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _MultiProcessingDataLoaderIter,
)

from stoker.errors import ConfigError, StateError
from stoker.loader.arena import Arena
from stoker.loader.draws import draws_own_stream
from stoker.loader.engine import Engine, log
from stoker.loader.fetch import Job
from stoker.loader.iterator import EngineIter
from stoker.loader.main_iterator import MainIter
from stoker.loader.platform import FALLBACKS, missing, say_once
from stoker.loader.pool import Pool
from stoker.loader.progress import Progress
from stoker.loader.replay import Start, describe
from stoker.loader.sharing_engine import SharingEngine
from stoker.loader.state import LoaderState, adapt, check, parse
from stoker.loader.stats import Counters, LoaderStats, Quantiles
from stoker.loader.streams import is_stateful
from stoker.loader.terms import Crew, Terms, plan_budget
from stoker.loader.threads import ThreadCrew
from stoker.machine.limits import default_workers, local_world_size, memory_room, usable_cpus
from stoker.plan.knobs import Knobs
from stoker.timeline import Span
from stoker.units import parse_bytes

_T_co = TypeVar("_T_co", covariant=True)
_DRAWN_AHEAD = 8
"""Batches per worker where no ``prefetch_factor`` counts them and drawing ahead is harmless."""
_TIGHT_BYTES = 1 << 30
"""Below this much memory a worker, work is given out cautiously until a batch's size is known."""


@dataclass(frozen=True, slots=True)
class Builder:
    """Makes engines for an iterator. Holds no loader: the loader may hold the iterator."""

    threads: bool
    context: Any
    counters: Counters

    def build(self, terms: Terms, job: Job) -> Engine:
        """Arena, workers and state machine, not yet started."""
        arena = Arena(terms.budget_bytes, terms.most_bytes)
        crew: Crew = ThreadCrew(job, arena) if self.threads else Pool(self.context, job, arena)
        kind = SharingEngine if terms.share else Engine
        return kind(terms, arena, crew, self.counters)


class DataLoader(torch.utils.data.DataLoader[_T_co]):
    """A drop-in ``torch.utils.data.DataLoader``, bounded in bytes, that survives its workers.

    Every argument of torch's has torch's meaning; what torch does not have is keyword-only. Bad
    arguments are refused at once with what is accepted (``stoker.errors.ConfigError``).

    Args:
        num_workers: as in torch, or ``"auto"`` (the default): half of the CPUs that this process
            may use, at most 4 per GPU (8 without) and 16; 1 for an iterable dataset, which more
            workers would repeat; 0 inside another loader's worker. Reads back as an int.
        memory: what may be in flight at most, in bytes or like ``"8GB"``. Default: two fifths of
            what is left for this process, control groups and local ranks considered. With
            ``prefetch_factor`` given too, the smaller bound wins. A single batch that is larger is
            loaded all the same, outside (``stats().overdraft_batches``). Without workers
            (``num_workers=0``) it has no effect.
        prefetch_factor: as in torch: batches ahead per worker. Large ones are loaded ahead only as
            far as it helps. Not given: 2, or 8 where drawing ahead changes nothing and batches are
            small or ``memory`` bounds them.
        timeout: as in torch, but a worker that does not deliver in time is replaced first, its
            stack in the log; a batch that it happens to three times is a ``WorkerTimeout``.
        worker_kind: ``"process"`` or ``"thread"``. Threads need no transport but share the
            interpreter, the dataset object (file handles!) and the global random generators.
        share_batches: have all workers fill one batch together, so that the memory in flight
            does not grow with their number: that of three batches (``prefetch_factor``, which then
            counts batches of all workers together, and one), or 64 MiB. Needs batches, torch's own
            collate function and a map-style dataset; one with a ``__getitems__`` of its own is
            loaded as without. Any worker may load any sample, also with a ``worker_init_fn``;
            random draws are seeded for each sample. Batches of samples that differ in structure,
            dtype or shape are loaded by one worker each.
        on_error: ``"raise"`` (as torch) or ``"skip"``: a sample that raises is dropped, counted
            and listed in ``stats()``; the batch is smaller, and left out if nothing remains. In
            distributed training ranks then see different numbers of samples (and, where whole
            batches fall away, of steps: use a join context or a fixed number of steps).
        prefetch_next_epoch: prepare the first batches of the next epoch before the current one
            ends (with ``persistent_workers``). Off by default: memory stays in use between epochs,
            the sampler is drawn early, and changes to the dataset between epochs reach those
            batches too late. Only for samplers whose next order does not depend on the trainer's
            random stream: sequential, distributed, random with a generator of its own, or a class
            with ``draws_own_stream = True``; with others it has no effect, and the log says so.
        name: shown in statistics.
    """

    def __init__(
        self,
        dataset: Dataset[_T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | Literal["auto"] = "auto",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        memory: int | str | None = None,
        worker_kind: Literal["process", "thread"] = "process",
        share_batches: bool = False,
        on_error: Literal["raise", "skip"] = "raise",
        prefetch_next_epoch: bool = False,
        name: str | None = None,
    ) -> None:
        _one_of("worker_kind", worker_kind, ("process", "thread"))
        _one_of("on_error", on_error, ("raise", "skip"))
        for flag, given in {
            "share_batches": share_batches,
            "prefetch_next_epoch": prefetch_next_epoch,
        }.items():
            if not isinstance(given, bool):
                raise ConfigError(name=flag, given=given, accepted="True or False")
        if isinstance(num_workers, str):  # what else is no int, torch refuses in its own words
            _one_of("num_workers", num_workers, ("auto",), "an int")
        if share_batches:
            if batch_size is None and batch_sampler is None:
                _refuse_sharing("batch_size=None loads samples, of which there is nothing to share")
            if collate_fn is not None and collate_fn is not default_collate:
                _refuse_sharing("your own collate_fn needs all samples of a batch in one place")
            if isinstance(dataset, IterableDataset):
                _refuse_sharing("an IterableDataset has no indices to give to several workers")
        if prefetch_next_epoch:
            _check_prefetch(dataset, persistent_workers=persistent_workers, in_order=in_order)
        self._memory_bytes = None if memory is None else parse_bytes(memory, name="memory")
        self.memory = memory
        self.worker_kind = worker_kind
        self.share_batches = share_batches
        self.on_error = on_error
        self.prefetch_next_epoch = prefetch_next_epoch
        self.name = name
        self._counted = prefetch_factor is not None
        self._counters = Counters()
        self._newest: weakref.ref[EngineIter] | None = None
        self._progress: Progress | None = None
        self._loaded: LoaderState | None = None
        if num_workers == "auto":
            num_workers = _auto_workers(dataset)
            if num_workers == 0:  # what needs workers was asked of a choice, not of a number
                prefetch_factor = multiprocessing_context = None
                persistent_workers = False
                timeout = min(timeout, 0)  # a negative one is refused in any case
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if self.num_workers == 0:
            return MainIter(self)
        self.check_worker_number_rationality()
        if self._actual_kind() == "torch":
            self._progress = None
            return _MultiProcessingDataLoaderIter(self)
        settings = (self.num_workers, self._memory_bytes)
        iterator = EngineIter(self)
        self._newest = weakref.ref(iterator)
        if settings != (self.num_workers, self._memory_bytes):  # another thread applied some
            iterator._apply(Knobs(self.num_workers, self._memory_bytes))
        return iterator

    def __getstate__(self) -> dict[str, Any]:
        """A copy counts for itself."""
        return {**self.__dict__, "_counters": Counters(), "_newest": None, "_progress": None}

    def stats(self) -> LoaderStats:
        """What this loader does right now, and has done so far."""
        iterator = self._newest() if self._newest is not None else None
        return _snapshot(self, iterator._engine if iterator is not None else None)

    @property
    def knobs(self) -> Knobs:
        """What this loader works with now, or would start with."""
        iterator = self._running()
        if iterator is not None:
            return iterator._engine.knobs
        budget, _ = plan_budget(self._memory_bytes, local_world_size())
        return Knobs(self.num_workers or None, budget)

    def apply(self, knobs: Knobs) -> Knobs:
        """Use more or fewer workers and bytes from now on; says what was achieved.

        May be called at any moment, from any thread, also in mid-epoch: order, samples and (with
        process workers) augmentations stay the same. If several iterators run, the newest is
        meant; without one it is what the next one starts with.

        - A worker too many finishes the batch it has begun, then exits. In workers that are added
          too, ``get_worker_info().num_workers`` is what the iterator started with.
        - Where it matters which worker loads a batch (an iterable dataset, a ``worker_init_fn``,
          a dataset that has read its worker's id), the number of workers stays for this epoch and
          changes with the next. Before the first batch has shown whether it does, it is changed
          as soon as that is known.
        - Fewer bytes bind all that is granted from now on, and pages above the bound are given
          back as they become free: at once, or when the caller lets go of what he holds.
        - While an iteration runs, bytes are raised up to the memory that this process may use, and
          workers only as far as their private memory, as measured, leaves room beside those bytes.
        - In a signal handler that interrupts ``next()`` it takes effect when that gets on.
        """
        if not isinstance(knobs, Knobs):
            raise ConfigError(name="knobs", given=knobs, accepted="stoker.Knobs(...)")
        if knobs.workers is not None:
            self.num_workers = knobs.workers
            if self.prefetch_factor is None:
                self.prefetch_factor = 2  # torch's default, where there are workers
        if knobs.in_flight_bytes is not None:
            self.memory = self._memory_bytes = knobs.in_flight_bytes
        iterator = self._running()
        achieved = iterator._apply(knobs) if iterator is not None else None
        return self.knobs if achieved is None else achieved

    def _running(self) -> EngineIter | None:
        iterator = self._newest() if self._newest is not None else None
        return None if iterator is None or iterator._is_over() else iterator

    # ---- resuming

    def state_dict(self) -> dict[str, Any]:
        """Where the newest iteration stands: plain data, to be saved with the model.

        Costs microseconds in the middle of an epoch and draws from no generator. After the end
        of an epoch, and before the first, it says how the next one begins.
        """
        if self._loaded is not None:
            return self._loaded.as_dict()
        progress = self._progress
        if progress is not None and not progress.finished:
            return progress.state()
        if self._actual_kind() == "torch":
            raise StateError(
                "torch's own loader stands in for Stoker on this platform, and has no state. "
                "Use num_workers=0, or save the state where Stoker loads."
            )
        coming = progress.coming if progress is not None else None
        if coming is not None and coming.is_right(self):
            start = coming.start
        else:
            start = Start(self)
        fits, dataset = self._fits(), self._stateful_dataset()
        saved = copy.deepcopy(dataset.state_dict()) if dataset is not None else None
        if progress is not None:
            return progress.fresh(start, fits, saved)
        return LoaderState(
            fits=fits,
            generators=start.generators,
            sampler_epochs=start.sampler_epochs,
            sampler_states=start.sampler_states,
            dataset=saved,
        ).as_dict()

    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> None:
        """Let the next ``iter()`` go on where a state stands: the same batches, none twice.

        Any number and kind of workers will do (an iterable dataset must be shared by as many).
        ``strict=False`` accepts a state from a loader of another shape and says in the log what
        that means. An empty dict means: as if nothing had been loaded.
        """
        loaded = None
        if state_dict != {}:
            loaded = parse(state_dict)
            fits = self._fits()
            if strict:
                check(loaded, fits)
            else:
                loaded, said = adapt(loaded, fits)
                for words in said:
                    log.warning("resuming from a state that does not fit: %s", words)
        self._loaded = loaded
        self._progress = None
        self._iterator = None  # persistent workers stand elsewhere: new ones begin

    def _stateful_dataset(self) -> Any:
        """A map-style dataset that keeps a state, or None."""
        if self._dataset_kind == _DatasetKind.Map and is_stateful(self.dataset):
            return self.dataset
        return None

    def _fits(self) -> dict[str, Any]:
        if self._dataset_kind == _DatasetKind.Map:
            return describe(self, None)
        return describe(self, 1 if self._actual_kind() == "thread" else max(1, self.num_workers))

    def timeline(self, since_ns: int = 0) -> list[Span]:
        """What this loader and its workers did lately: the recent spans, oldest news first.

        Always recorded, for about the last thousand batches (fewer with ``share_batches``, whose
        parts count each); safe to call from any thread.
        ``since_ns``: only what ended at or after this time of ``time.monotonic_ns()``.
        """
        return self._counters.timeline.spans(since_ns)

    # ---- settings of one iterator

    def _actual_kind(self) -> Literal["main", "process", "thread", "torch"]:
        """What loads: what was asked for, or what this platform can do instead."""
        if self.num_workers == 0:
            return "main"
        if self.worker_kind == "thread" or missing() is None:
            return self.worker_kind
        kind: Literal["thread", "torch"] = (
            "torch" if isinstance(self.dataset, IterableDataset) else "thread"
        )
        say_once(f"this platform has no {missing()}: loading with {FALLBACKS[kind]} instead")
        return kind

    def _shares(self) -> bool:
        """Do workers fill batches together? If that was asked for and can't be, say so once."""
        if not self.share_batches or self.num_workers == 0:
            return False
        dataset: Any = self.dataset
        while type(dataset) is Subset:  # its own __getitems__ only asks the dataset below
            dataset = dataset.dataset
        if callable(getattr(dataset, "__getitems__", None)):
            say_once(
                f"share_batches=True: {type(dataset).__name__} loads several samples in one call "
                "(__getitems__), so each batch is loaded by one worker, as without"
            )
            return False
        return True

    def _terms(self, job: Job) -> Terms:
        budget, available = plan_budget(self._memory_bytes, local_world_size())
        ahead = window = self.prefetch_factor or 2
        if not self._counted and draws_own_stream(self._index_sampler):
            window = max(window, _DRAWN_AHEAD)
            if self._memory_bytes is not None:
                ahead = window
        workers = self.num_workers
        if job.iterable and self._actual_kind() == "thread":
            workers = 1  # threads share the dataset: more of them would repeat it
        return Terms(
            workers=workers,
            window=window * workers,
            ahead=ahead * workers,
            budget_bytes=budget,
            in_order=self.in_order,
            # Where identity can matter, a batch stays with the worker that torch would give it.
            pinned=job.iterable or (job.worker_init_fn is not None and not job.share),
            iterable=job.iterable,
            timeout=self.timeout,
            cautious=available // workers < _TIGHT_BYTES,
            available_bytes=available,
            most_bytes=memory_room().limit_bytes,
            share=(self.prefetch_factor or 2) if job.share else 0,
            skip_errors=job.skip_errors,
        )

    def _builder(self) -> Builder:
        return Builder(
            self._actual_kind() == "thread", self.multiprocessing_context, self._counters
        )


def _one_of(name: str, given: object, accepted: tuple[str, ...], *more: str) -> None:
    if given not in accepted:
        words = [f'"{value}"' for value in accepted] + list(more)
        raise ConfigError(name=name, given=given, accepted=" or ".join(words))


def _check_prefetch(dataset: object, *, persistent_workers: bool, in_order: bool) -> None:
    accepted = None
    if isinstance(dataset, IterableDataset):
        accepted = "False with an iterable dataset: its workers begin an epoch all at once"
    elif not persistent_workers:
        accepted = "False, or True together with persistent_workers=True"
    elif not in_order:
        accepted = "False, or True together with in_order=True"
    if accepted is not None:
        raise ConfigError(name="prefetch_next_epoch", given=True, accepted=accepted)


def _refuse_sharing(reason: str) -> NoReturn:
    raise ConfigError(name="share_batches", given=True, accepted=f"False here: {reason}")


def _auto_workers(dataset: object) -> int:
    if multiprocessing.current_process().daemon:
        return 0  # a worker may not have workers
    if isinstance(dataset, IterableDataset):
        return 1
    gpus = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    world = local_world_size()
    return default_workers(max(1, usable_cpus() // world), -(-gpus // world))


def _snapshot(loader: DataLoader[Any], engine: Engine | None) -> LoaderStats:
    counters = loader._counters
    dispatch = engine.dispatch if engine is not None else None
    handles = [h for h in engine.handles if h.is_alive()] if engine is not None else []
    kind = loader._actual_kind()
    return LoaderStats(
        name=loader.name or "loader",
        worker_kind=kind,
        fallback=None if kind in ("main", loader.worker_kind) else f"no {missing()} here",
        workers=len(handles),
        worker_pids=tuple(h.pid for h in handles if h.pid is not None),
        delivered=counters.delivered,
        ready=dispatch.ready if dispatch is not None else 0,
        in_flight_bytes=dispatch.used_bytes if dispatch is not None else 0,
        in_flight_peak_bytes=max(
            counters.in_flight_peak_bytes, dispatch.peak_bytes if dispatch is not None else 0
        ),
        leased_bytes=dispatch.leased_bytes if dispatch is not None else 0,
        arena_bytes=engine.arena.nbytes if engine is not None else counters.arena_bytes,
        overdraft_bytes=engine.arena.overdraft_bytes if engine is not None else 0,
        overdraft_batches=counters.overdraft_batches,
        copied_batches=counters.copied_batches,
        worker_private_bytes=engine.private_bytes if engine is not None else 0,
        wait_seconds=counters.wait_seconds,
        fetch_seconds=Quantiles.of(list(counters.fetch)),
        collate_seconds=Quantiles.of(list(counters.collate)),
        slowest=tuple(counters.slowest()),
        early_batches=counters.early_batches,
        deaths=counters.deaths,
        skipped=counters.skipped,
        skips=tuple(counters.skips),
    )
