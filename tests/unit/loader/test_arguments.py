"""What may be asked for beyond torch's arguments, what is refused, and what is reported back.

Torch's own arguments and errors are in tests/process/test_clients.py.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import stoker
from stoker.errors import ConfigError
from stoker.loader import arena, dataloader, platform

MEGABYTE = 1 << 20


class Numbers(Dataset[torch.Tensor]):
    """Samples of a megabyte (or less), one of which may be slow or deadly."""

    def __init__(
        self, length: int = 12, nbytes: int = 8, slow: int = -1, deadly: Path | None = None
    ) -> None:
        self.length = length
        self.nbytes = nbytes
        self.slow = slow
        self.deadly = deadly

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.slow:
            time.sleep(0.05)
        if self.deadly is not None and index == 5 and not self.deadly.exists():
            self.deadly.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((self.nbytes // 8,), index)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


class Broken(Dataset[int]):
    """Every index from 4 to 7 raises."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if 4 <= index < 8:
            raise OSError(f"no file {index}")
        return index


class Asked:
    """A sampler that knows how far it was drawn."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.drawn = 0

    def __iter__(self) -> Iterator[int]:
        for index in range(self.length):
            self.drawn += 1
            yield index

    def __len__(self) -> int:
        return self.length


def firsts(loader: Any) -> list[int]:
    return [int(batch.flatten()[0]) for batch in loader]


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "nbytes"), [("8MB", 8_000_000), ("4MiB", 4 * MEGABYTE), (3_000_000, 3_000_000)]
)
def test_memory_bounds_the_arena(given: int | str, nbytes: int) -> None:
    loader = stoker.DataLoader(Numbers(), num_workers=1, memory=given)
    assert loader.memory == given
    iterator = iter(loader)
    next(iterator)
    assert nbytes <= loader.stats().arena_bytes < nbytes + 65_536


@pytest.mark.parametrize("given", ["lots", "8 parsecs", "-1GB", -1, True, 1.5j, [8], float("nan")])
@pytest.mark.parametrize("workers", [0, 1, "auto"])
def test_nonsense_for_memory_is_refused_at_once_with_what_is_accepted(
    given: Any, workers: Any
) -> None:
    with pytest.raises(ConfigError, match=r"memory=.*8GB") as caught:
        stoker.DataLoader(Numbers(), num_workers=workers, memory=given)
    assert isinstance(caught.value, ValueError)
    assert caught.value.name == "memory"


@pytest.mark.parametrize(
    ("arguments", "accepted"),
    [
        ({"worker_kind": "fibre"}, '"process" or "thread"'),
        ({"worker_kind": None}, '"process" or "thread"'),
        ({"on_error": "ignore"}, '"raise" or "skip"'),
        ({"num_workers": "many"}, '"auto" or an int'),
        ({"share_batches": "yes"}, "True or False"),
    ],
    ids=str,
)
def test_other_nonsense_is_refused_at_once_with_what_is_accepted(
    arguments: dict[str, Any], accepted: str
) -> None:
    (name,) = arguments
    with pytest.raises(ConfigError) as caught:
        stoker.DataLoader(Numbers(), **arguments)
    assert caught.value.name == name
    assert accepted in str(caught.value)


def test_without_memory_the_prefetch_factor_says_how_far_ahead_indices_are_drawn() -> None:
    for factor, workers in ((1, 1), (3, 1), (2, 2)):
        sampler = Asked(20)
        loader = stoker.DataLoader(
            Numbers(20), 1, sampler=sampler, num_workers=workers, prefetch_factor=factor
        )
        iterator = iter(loader)
        assert sampler.drawn == factor * workers
        next(iterator)
        next(iterator)
        assert sampler.drawn == factor * workers + 2


def test_of_prefetch_factor_and_memory_the_prefetch_factor_binds_where_it_is_smaller() -> None:
    sampler = Asked(20)
    loader = stoker.DataLoader(
        Numbers(20), 1, sampler=sampler, num_workers=1, prefetch_factor=1, memory="1GB"
    )
    iterator = iter(loader)
    next(iterator)
    assert sampler.drawn == 2


def test_of_prefetch_factor_and_memory_the_memory_binds_where_it_is_smaller() -> None:
    loader = stoker.DataLoader(
        Numbers(30, MEGABYTE), 1, num_workers=2, prefetch_factor=8, memory="5MiB"
    )
    iterator = iter(loader)
    peaks = []
    for expected, batch in enumerate(iterator):
        assert batch[0, 0] == expected
        stats = loader.stats()
        assert stats.in_flight_bytes <= stats.arena_bytes
        assert stats.leased_bytes <= stats.in_flight_bytes
        peaks.append(stats.in_flight_peak_bytes)
    assert 2 * MEGABYTE < max(peaks) <= 5 * MEGABYTE


def test_memory_alone_lets_batches_wait_while_they_fit() -> None:
    loader = stoker.DataLoader(Numbers(40, 65_536), 1, num_workers=1, memory="64MB")
    most = 0
    for _ in loader:
        time.sleep(0.01)
        most = max(most, loader.stats().ready)
    assert most > 2  # torch's own prefetch_factor


def test_memory_too_small_for_a_single_batch_still_delivers_and_says_so() -> None:
    loader = stoker.DataLoader(Numbers(6, MEGABYTE), 1, num_workers=1, memory=1)
    assert firsts(loader) == list(range(6))
    assert loader.stats().overdraft_batches == 6


# --- how many workers ---------------------------------------------------------------------------


def test_the_default_number_of_workers_reads_as_an_int() -> None:
    loader = stoker.DataLoader(Numbers())
    assert type(loader.num_workers) is int
    assert loader.num_workers >= 1
    assert loader.prefetch_factor == 2
    assert firsts(loader) == list(range(12))


@pytest.mark.parametrize(
    ("cpus", "ranks", "gpus", "workers"),
    [(16, 1, 0, 8), (64, 1, 0, 8), (16, 4, 0, 2), (16, 1, 1, 4), (2, 8, 0, 1), (64, 1, 8, 16)],
)
def test_the_default_number_of_workers_follows_cpus_ranks_and_gpus(
    cpus: int, ranks: int, gpus: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataloader, "usable_cpus", lambda: cpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    monkeypatch.setattr(torch._utils, "cpu_count", lambda: 64)
    assert stoker.DataLoader(Numbers()).num_workers == workers


def test_an_iterable_dataset_gets_one_worker_because_more_would_repeat_it() -> None:
    loader = stoker.DataLoader(Stream(), batch_size=2)
    assert loader.num_workers == 1
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]


class Inner(Dataset[Any]):
    """Makes a loader inside a worker, with everything that only workers can honour."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        loader = stoker.DataLoader(
            Numbers(3),
            prefetch_factor=4,
            persistent_workers=True,
            timeout=5,
            multiprocessing_context="fork",
            memory="1MB",
        )
        return loader.num_workers, firsts(loader), loader.stats().worker_kind


def test_inside_a_worker_the_choice_is_none_and_what_needs_workers_is_let_go() -> None:
    loader = stoker.DataLoader(Inner(), batch_size=None, num_workers=1)
    assert list(loader) == [[0, [0, 1, 2], "main"]] * 2


# --- statistics ---------------------------------------------------------------------------------


def test_statistics_of_a_known_run_are_true() -> None:
    dataset = Numbers(12, MEGABYTE, slow=7)
    loader = stoker.DataLoader(dataset, 2, num_workers=1, persistent_workers=True, name="train")
    before = loader.stats()
    assert (before.delivered, before.workers, before.arena_bytes) == (0, 0, 0)
    assert before.fetch_seconds.max == 0.0
    held = None
    for batch in loader:
        held = batch
        assert loader.stats().leased_bytes >= 2 * MEGABYTE
    stats = loader.stats()
    assert (stats.name, stats.worker_kind, stats.fallback) == ("train", "process", None)
    assert stats.delivered == 6
    assert stats.workers == len(stats.worker_pids) == 1
    assert stats.wait_seconds > 0
    assert stats.slowest[0][0] == 7
    assert stats.slowest[0][1] >= 0.05
    assert stats.fetch_seconds.max >= 0.05
    assert 0 < stats.fetch_seconds.p50 <= stats.fetch_seconds.p90 <= stats.fetch_seconds.max
    assert stats.collate_seconds.p50 > 0
    assert 0 < stats.in_flight_bytes <= stats.in_flight_peak_bytes <= stats.arena_bytes
    assert (stats.deaths, stats.skipped, stats.skips) == (0, 0, ())
    assert (stats.overdraft_batches, stats.copied_batches, stats.ready) == (0, 0, 0)
    del held


def test_statistics_are_a_frozen_snapshot() -> None:
    loader = stoker.DataLoader(Numbers(), num_workers=1)
    iterator = iter(loader)
    next(iterator)
    stats = loader.stats()
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.delivered = 5  # type: ignore[misc]
    next(iterator)
    assert stats.delivered == 1
    assert loader.stats().delivered == 2


def test_statistics_add_up_over_epochs_and_outlive_the_iterator() -> None:
    loader = stoker.DataLoader(Numbers(), 4, num_workers=1)
    for _ in range(2):
        firsts(loader)
    stats = loader.stats()
    assert (stats.delivered, stats.workers, stats.in_flight_bytes) == (6, 0, 0)


def test_without_workers_there_are_statistics_too() -> None:
    loader = stoker.DataLoader(Numbers(slow=3), 4, num_workers=0)
    firsts(loader)
    stats = loader.stats()
    assert (stats.delivered, stats.worker_kind, stats.name) == (3, "main", "loader")
    assert stats.wait_seconds >= 0.05
    assert stats.fetch_seconds.max >= 0.05


def test_a_death_is_counted_and_costs_nothing_else(tmp_path: Path) -> None:
    loader = stoker.DataLoader(Numbers(deadly=tmp_path / "once"), num_workers=1)
    assert firsts(loader) == list(range(12))
    assert loader.stats().deaths == 1


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_skipped_samples_are_counted_and_listed(workers: int) -> None:
    loader = stoker.DataLoader(Broken(), 3, num_workers=workers, on_error="skip")
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3], [8], [9, 10, 11]]
    stats = loader.stats()
    assert stats.skipped == 4
    assert sorted(stats.skips) == [(i, f"OSError: no file {i}") for i in range(4, 8)]
    assert stats.delivered == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_is_left_out_does_not_count_as_delivered(workers: int) -> None:
    loader = stoker.DataLoader(Broken(), 4, num_workers=workers, on_error="skip")
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert loader.stats().delivered == 2


# --- threads, and platforms that lack something -------------------------------------------------


def test_threads_may_be_asked_for() -> None:
    loader = stoker.DataLoader(Numbers(), 4, num_workers=2, worker_kind="thread")
    iterator = iter(loader)
    assert len(iterator._workers) == 2
    assert firsts(iterator) == [0, 4, 8]
    stats = loader.stats()
    assert (stats.worker_kind, stats.fallback) == ("thread", None)


@pytest.fixture
def without_fork(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dataloader, "missing", lambda: "fork")
    platform.say_once.cache_clear()
    yield
    platform.say_once.cache_clear()


@pytest.mark.usefixtures("without_fork")
def test_without_fork_a_map_is_loaded_by_threads_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "stoker.loader")
    for _ in range(2):
        loader = stoker.DataLoader(Numbers(), 4, num_workers=2)
        iterator = iter(loader)
        assert firsts(iterator) == [0, 4, 8]
        stats = loader.stats()
        assert (stats.worker_kind, stats.fallback) == ("thread", "no fork here")
    (record,) = caplog.records
    assert "no fork: loading with threads instead" in record.getMessage()


@pytest.mark.usefixtures("without_fork")
def test_without_fork_a_stream_is_loaded_by_torch_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "stoker.loader")
    loader = stoker.DataLoader(Stream(), 2, num_workers=1)
    iterator = iter(loader)
    assert isinstance(iterator, _MultiProcessingDataLoaderIter)
    assert firsts(iterator) == [0, 2, 4]
    stats = loader.stats()
    assert (stats.worker_kind, stats.fallback) == ("torch", "no fork here")
    (record,) = caplog.records
    assert "torch's own loader" in record.getMessage()


def test_a_platform_names_the_first_thing_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert platform.missing() is None
    monkeypatch.delattr(platform.socket, "SOCK_SEQPACKET")
    assert platform.missing() == "sequenced-packet sockets"
    monkeypatch.delattr(os, "fork")
    assert platform.missing() == "fork"


@pytest.mark.parametrize("lacking", ["memfd_create", "pidfd_open", "MADV_REMOVE", "all"])
def test_what_an_older_kernel_lacks_is_done_without(
    lacking: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("memfd_create", "pidfd_open"):
        if lacking in (name, "all"):
            monkeypatch.delattr(os, name)
    if lacking in ("MADV_REMOVE", "all"):
        monkeypatch.setattr(arena, "_MADV_REMOVE", None)
    dataset = Numbers(12, MEGABYTE, deadly=tmp_path / "once")
    loader = stoker.DataLoader(dataset, 2, num_workers=2, persistent_workers=True, memory="12MiB")
    kept = [firsts(loader), firsts(loader)]
    assert kept == [[0, 2, 4, 6, 8, 10]] * 2
    assert loader.stats().deaths == 1
    assert all(worker.is_alive() for worker in loader._iterator._workers)
