"""``share_batches=True``: several workers fill one batch, and nobody can tell from the batch."""

from __future__ import annotations

import collections
import copy
import gc
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset

from stoker import DataLoader, Knobs
from stoker.errors import ConfigError, WorkerDied, WorkerTimeout
from stoker.loader import platform
from stoker.loader.sharing import Sharing
from tests.process import datasets
from tests.process.datasets import (
    Augmented,
    Failing,
    FailingMany,
    Gated,
    Numbers,
    Sleepy,
    Stream,
)
from tests.process.epochs import (
    counted,
    epoch,
    going_on,
    host_pid,
    kill,
    numbers,
    same,
    seeded,
    worker_pids,
)
from tests.process.scripts import gone, run, running
from tests.process.test_differential import COLLATABLE, Pair, assert_same
from tests.process.test_forked_trainer import fork, status
from tests.process.test_memory_limit import group as group
from tests.process.test_memory_limit import inside

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def loader_of(dataset: Any, **more: Any) -> DataLoader[Any]:
    settings = {"batch_size": 4, "num_workers": 3, "share_batches": True, **more}
    return DataLoader(dataset, **settings)


def given_up(iterator: Any) -> str | None:
    dispatch = iterator._engine.dispatch
    assert isinstance(dispatch, Sharing)
    return dispatch.given_up


# ---- the same batches

FIT = {name: make for name, make in COLLATABLE.items() if name != "subclass"}


class Nested(Dataset[Any]):
    """All that can be shared, in containers of every kind."""

    def __init__(self, samples: int = 23) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> Any:
        flat = {name: make(i) for name, make in FIT.items()}
        return {
            **flat,
            "list": [torch.tensor(i), f"l{i}", i],
            "tuple": (i, f"t{i}", (float(i), b"x")),
            "pair": Pair(torch.full((50, 50), i), {"deep": [f"p{i}", Pair(i, "q")]}),
            "ordered": collections.OrderedDict(z=i, a=[[i]]),
        }


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    # Copied: what is held over a fork costs a descriptor until the child is gone.
    return copy.deepcopy(list(DataLoader(Nested(), batch_size=5, num_workers=1)))


@pytest.mark.parametrize(
    "more",
    [
        {"num_workers": 1},
        {"num_workers": 2},
        {"num_workers": 5},
        {"num_workers": 8},
        {"num_workers": 2, "multiprocessing_context": "spawn"},
        {"num_workers": 3, "worker_kind": "thread"},
        {"num_workers": 2, "memory": "300KB"},
        {"num_workers": 2, "memory": 1},
        {"num_workers": 2, "prefetch_factor": 1},
        {"num_workers": 2, "worker_init_fn": print},
    ],
    ids=str,
)
def test_batches_are_those_of_one_worker_alone(more: dict[str, Any], alone: list[Any]) -> None:
    loader = loader_of(Nested(), batch_size=5, **more)
    iterator: Any = iter(loader)
    assert_same(list(iterator), alone)


def test_nothing_of_it_had_to_be_loaded_whole() -> None:
    iterator: Any = iter(loader_of(Nested(), batch_size=5, persistent_workers=True))
    batches = list(iterator)
    assert len(batches) == 5
    assert iterator._engine.dispatch._misfits == 0
    assert iterator._engine.dispatch._layout is not None


@pytest.mark.parametrize("sample", [lambda i: i, lambda i: f"{i}", lambda i: Pair(i, (i,))])
def test_samples_that_are_no_containers_of_tensors(sample: Callable[[int], Any]) -> None:
    class Made(Numbers):
        def __getitem__(self, index: int) -> Any:
            return sample(index)

    ours = list(loader_of(Made(10)))
    assert_same(ours, list(DataLoader(Made(10), batch_size=4, num_workers=1)))


def test_out_of_order_every_batch_comes_once() -> None:
    found = numbers(loader_of(Numbers(90, width=5000), in_order=False))
    assert sorted(found) == counted(90, 4)


def test_batch_samplers_subsets_and_the_last_short_batch() -> None:
    picked = [[0, 5, 7], [1], [9, 2, 4, 3, 8]]
    dataset = Numbers(10, width=3000)
    assert numbers(
        DataLoader(dataset, batch_sampler=picked, num_workers=3, share_batches=True)
    ) == (picked)
    iterator: Any = iter(loader_of(Subset(Subset(dataset, range(1, 10)), range(8))))
    assert isinstance(iterator._engine.dispatch, Sharing)
    assert numbers(iterator) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert numbers(loader_of(dataset, drop_last=True)) == counted(8, 4)


def test_every_tensor_has_a_storage_of_its_own(tmp_path: Path) -> None:
    batch = next(iter(loader_of(Augmented(16, width=5000))))
    torch.save(batch["torch"][1], tmp_path / "row")
    torch.save(batch["index"], tmp_path / "index")
    assert (tmp_path / "row").stat().st_size < 4 * 5000 * 4 + 4096
    assert (tmp_path / "index").stat().st_size < 4096
    assert batch["torch"].untyped_storage().nbytes() == 4 * 5000 * 4


# ---- randomness


def test_augmentations_depend_neither_on_the_number_of_workers_nor_on_deaths() -> None:
    expected = epoch(loader_of(Augmented(60), shuffle=True, num_workers=1))
    for workers in (2, 5):
        assert same(epoch(loader_of(Augmented(60), shuffle=True, num_workers=workers)), expected)
    iterator = seeded(loader_of(Augmented(60), shuffle=True))
    batches = []
    for number in range(6):
        batches.append(next(iterator))
        kill(worker_pids(iterator)[number % 3])
    assert same(batches + list(iterator), expected)


def test_no_two_samples_and_no_two_epochs_draw_the_same() -> None:
    loader = loader_of(Augmented(40), persistent_workers=True)
    drawn = [x for _ in range(2) for batch in epoch(loader) for x in batch["random"].tolist()]
    assert len(set(drawn)) == 80


def test_the_epochs_of_persistent_workers_are_reproducible() -> None:
    runs = []
    for workers in (1, 4):
        loader = loader_of(Augmented(40), num_workers=workers, persistent_workers=True)
        runs.append([epoch(loader), epoch(loader)])
    assert same(*runs)


class Ragged(Augmented):
    """Some samples are longer than others, but all of one batch (of four) alike."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.width = 8 + index // 4 % 5
        return super().__getitem__(index)


def test_a_batch_that_is_loaded_whole_draws_what_its_rows_would() -> None:
    class Odd(Augmented):
        """The same draws, in a sample that can't be shared."""

        def __getitem__(self, index: int) -> dict[str, Any]:
            sample = super().__getitem__(index)
            return collections.defaultdict(None, sample) if index == 5 else sample

    expected = epoch(loader_of(Augmented(40)))
    assert same([dict(batch) for batch in epoch(loader_of(Odd(40)))], expected)


# ---- what does not fit


def test_batches_of_different_shapes_are_loaded_whole_and_sharing_is_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = epoch(loader_of(Ragged(160), num_workers=1))
    assert [batch["torch"].shape[1] for batch in expected] == [8, 9, 10, 11, 12] * 8
    caplog.clear()
    iterator: Any = seeded(loader_of(Ragged(160), persistent_workers=True))
    assert same(list(iterator), expected)
    assert "instead of" in (given_up(iterator) or "")
    assert [r.levelno for r in caplog.records if "share_batches=False" in r.getMessage()] == [
        logging.WARNING
    ]


class Growing(Numbers):
    """Another shape from the middle on, as with progressive resizing."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((100 if index < 40 else 5000,), float(index))


def test_a_shape_that_changes_once_is_learned_again() -> None:
    iterator: Any = iter(loader_of(Growing(160), persistent_workers=True))
    assert numbers(iterator) == counted(160, 4)
    assert given_up(iterator) is None
    assert iterator._engine.dispatch._layout.nbytes(1) == 20032


class Unequal(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(6 if index == 13 else 5)


class Sets(Numbers):
    def __getitem__(self, index: int) -> Any:
        return {index} if index == 13 else torch.zeros(5)


class Wide(Numbers):
    def __getitem__(self, index: int) -> Any:
        return 1 << 70 if index == 13 else index


class Optional(Numbers):
    def __getitem__(self, index: int) -> Any:
        return None if index % 4 == 0 else index


@pytest.mark.parametrize("dataset", [Unequal(32), Sets(32), Wide(32), Optional(32)])
def test_what_can_not_be_collated_is_the_same_error_as_without(dataset: Numbers) -> None:
    batches, errors = going_on(iter(loader_of(dataset)))
    plain_batches, plain_errors = going_on(iter(loader_of(dataset, share_batches=False)))
    assert_same(batches, plain_batches)
    assert [type(error) for error in errors] == [type(error) for error in plain_errors]

    def last_line(error: Exception) -> str:
        return str(error).strip().splitlines()[-1]

    assert [last_line(e) for e in errors] == [last_line(e) for e in plain_errors]
    assert errors


# ---- samples that raise


@pytest.mark.parametrize("bad", [{0}, {6}, {6, 5}, {7, 13}, {15, 12, 13}])
def test_the_lowest_rows_exception_is_raised_and_named(bad: set[int]) -> None:
    dataset = Failing(32, bad, datasets.raise_value_error)
    batches, errors = going_on(iter(loader_of(dataset)))
    spoiled = sorted({index // 4 for index in bad})
    assert numbers(batches) == counted(32, 4, without=spoiled)
    lowest = [min(index for index in bad if index // 4 == batch) for batch in spoiled]
    assert [type(error) for error in errors] == [ValueError] * len(spoiled)
    for error, index in zip(errors, lowest, strict=True):
        assert f", index {index}." in str(error)
        assert "this sample is bad" in str(error)


def test_bad_samples_are_skipped_counted_and_listed() -> None:
    bad = {3, 8, 9, 10, 11, 22}
    loader = loader_of(Failing(40, bad, datasets.raise_value_error), on_error="skip")
    found = numbers(loader)
    assert found[:3] == [[0, 1, 2], [4, 5, 6, 7], [12, 13, 14, 15]]
    assert [n for batch in found for n in batch] == sorted(set(range(40)) - bad)
    stats = loader.stats()
    assert stats.skipped == 6
    assert [index for index, _ in stats.skips] == sorted(bad)


def test_subsets_are_skipped_and_loaded_whole_sample_by_sample() -> None:
    dataset = Subset(Failing(40, {3, 22}, datasets.raise_value_error), range(1, 33))
    batches, errors = going_on(iter(loader_of(dataset)))
    assert [batch[0] for batch in numbers(batches)] == [5, 9, 13, 17, 25, 29]
    assert [", index 2." in str(errors[0]), ", index 21." in str(errors[1])] == [True, True]
    skipping = loader_of(dataset, on_error="skip")
    assert [len(batch) for batch in numbers(skipping)] == [3, 4, 4, 4, 4, 3, 4, 4]
    assert skipping.stats().skipped == 2
    ragged = epoch(loader_of(Subset(Ragged(40), range(40))))
    assert same(ragged, epoch(loader_of(Ragged(40), num_workers=1)))


def test_an_init_function_that_raises_is_an_error_of_every_batch() -> None:
    iterator = iter(loader_of(Numbers(8), worker_init_fn=_refuse))
    batches, errors = going_on(iterator)
    assert batches == []
    assert [str(error).splitlines()[-1] for error in errors] == ["ValueError: not today"] * 2


def _refuse(_worker: int) -> None:
    raise ValueError("not today")


# ---- deaths, timeouts


@pytest.fixture(scope="module")
def undisturbed() -> list[Any]:
    return epoch(loader_of(Augmented(120), shuffle=True))


def test_all_workers_may_die_at_once_and_before_the_first_batch(undisturbed: list[Any]) -> None:
    iterator = seeded(loader_of(Augmented(120), shuffle=True))
    batches = []
    for _ in range(3):
        for pid in worker_pids(iterator):
            kill(pid)
        batches += [next(iterator) for _ in range(3)]
    assert same(batches + list(iterator), undisturbed)


def test_the_host_may_die(undisturbed: list[Any]) -> None:
    loader = loader_of(Augmented(120), shuffle=True)
    iterator = seeded(loader)
    kill(host_pid(iterator))
    batches = [next(iterator) for _ in range(5)]
    kill(host_pid(iterator))
    assert same(batches + list(iterator), undisturbed)
    assert loader.stats().deaths == 2


def test_a_worker_may_die_while_it_fetches_or_is_stopped(
    tmp_path: Path, undisturbed: list[Any]
) -> None:
    dataset = Gated(120, at=int(undisturbed[6]["index"][2]), folder=tmp_path)
    iterator = seeded(loader_of(dataset, shuffle=True))
    worker_pids(iterator)  # while workers start, only one batch is begun
    batches = [next(iterator) for _ in range(4)]
    kill(dataset.who_waits())
    dataset.open_gate()
    batches += [next(iterator) for _ in range(4)]
    victim = worker_pids(iterator)[1]
    os.kill(victim, signal.SIGSTOP)
    kill(victim)
    assert same(batches + list(iterator), undisturbed)


def test_the_worker_that_keeps_the_probed_sample_may_die(tmp_path: Path) -> None:
    dataset = Gated(16, at=0, folder=tmp_path)
    iterator = seeded(loader_of(dataset))
    kill(dataset.who_waits())
    dataset.open_gate()
    assert [batch["index"].tolist() for batch in iterator] == counted(16, 4)


@pytest.mark.parametrize("act", [datasets.kill_self, datasets.segfault, datasets.exit_politely])
def test_a_sample_that_kills_is_an_error_that_names_its_part(act: Callable[[], None]) -> None:
    loader = loader_of(Failing(48, {17}, act), batch_size=12, num_workers=2)
    batches, errors = going_on(iter(loader))
    assert numbers(batches) == counted(48, 12, without=[1])
    (error,) = errors
    assert isinstance(error, WorkerDied)
    assert error.indices is not None
    assert set(error.indices) < set(range(12, 24)), "only those that one worker had"
    assert 17 in error.indices
    assert error.attempts == 3


def test_a_deadly_probe_is_an_error_and_the_rest_comes() -> None:
    batches, errors = going_on(iter(loader_of(Failing(16, {0}, datasets.kill_self))))
    assert numbers(batches) == counted(16, 4, without=[0])
    assert [type(error) for error in errors] == [WorkerDied]


def test_stopped_workers_are_replaced_after_the_timeout(undisturbed: list[Any]) -> None:
    iterator = seeded(loader_of(Augmented(120), shuffle=True, timeout=0.7))
    batches = [next(iterator) for _ in range(3)]
    for pid in worker_pids(iterator)[:2]:
        os.kill(pid, signal.SIGSTOP)
    assert same(batches + list(iterator), undisturbed)


def test_a_sample_slower_than_the_timeout_is_an_error_that_names_it() -> None:
    iterator = iter(loader_of(Sleepy(24, {9}, 30.0), timeout=0.5))
    batches, errors = going_on(iterator)
    assert numbers(batches) == counted(24, 4, without=[2])
    (error,) = errors
    assert isinstance(error, WorkerTimeout)
    assert error.indices is not None
    assert 9 in error.indices


# ---- lifetimes


def test_leaving_in_mid_epoch_and_starting_again_with_persistent_workers() -> None:
    loader = loader_of(Numbers(400, width=5000), persistent_workers=True)
    for stop in (1, 7, 30):
        for step, batch in enumerate(loader):
            assert numbers([batch]) == [counted(400, 4)[step]]
            if step == stop:
                break
    assert numbers(loader) == counted(400, 4)


def test_a_part_of_the_last_epoch_that_is_still_being_filled_does_no_harm(tmp_path: Path) -> None:
    dataset = Gated(40, at=9, folder=tmp_path)
    loader = loader_of(dataset, persistent_workers=True)
    iterator: Any = iter(loader)
    worker_pids(iterator)  # while workers start, only one batch is begun
    next(iterator)
    dataset.who_waits()
    iterator = iter(loader)
    assert next(iterator)["index"].tolist() == [0, 1, 2, 3]
    dataset.open_gate()
    found = [batch["index"].tolist() for batch in iterator]
    assert found == counted(40, 4)[1:]


def test_batches_held_by_the_caller_keep_their_contents() -> None:
    loader = loader_of(Numbers(400, width=5000), memory="1MB")
    held = []
    iterator = iter(loader)
    for batch in iterator:
        held.append(batch)
        if len(held) % 25 == 0:
            kill(worker_pids(iterator)[0])
    assert numbers(held) == counted(400, 4)
    assert loader.stats().copied_batches + loader.stats().overdraft_batches > 0


def test_what_a_forked_child_holds_is_not_overwritten() -> None:
    iterator = iter(loader_of(Numbers(800, width=20_000), memory=10 * 4 * 20_000 * 4))
    held = [next(iterator) for _ in range(3)]

    def look() -> None:
        for _ in range(20):
            assert numbers(held) == counted(12, 4)
            time.sleep(0.03)

    child = fork(look)
    held.clear()
    assert numbers(iterator) == counted(800, 4)[3:]
    assert status(child) == 0


def test_an_idle_loader_holds_nothing_that_was_let_go_of() -> None:
    loader = loader_of(Numbers(40, width=50_000), persistent_workers=True)
    iterator: Any = iter(loader)
    batch = next(iterator)
    wait_until_everything_begun_is_there(iterator)
    held = loader.stats().in_flight_bytes
    assert 0 < loader.stats().leased_bytes < held
    list(iterator)
    del batch
    gc.collect()
    iterator._engine.has_next()
    assert loader.stats().in_flight_bytes == 0


def wait_until_everything_begun_is_there(iterator: Any) -> None:
    dispatch = iterator._engine.dispatch
    deadline = time.monotonic() + 20
    while any(worker.queue for worker in dispatch.workers):
        iterator._engine.has_next()
        assert time.monotonic() < deadline, "workers do not get done"
        time.sleep(0.005)


GOES_ON = """
import random, threading
moments = random.Random(5)

def epoch(disturbed):
    torch.manual_seed(3)
    iterator = iter(DataLoader(
        Augmented(800, width=2000), batch_size=8, shuffle=True, num_workers=2, share_batches=True
    ))
    found, sent = [], []
    armed, over = threading.Event(), threading.Event()

    def disturb():
        while not over.wait(0.002 + moments.random() / 16):
            if armed.is_set():
                armed.clear()
                sent.append(True)
                os.kill(os.getpid(), signal.SIGINT)

    def record(batch):  # once, also if it is interrupted and called again
        if not found or found[-1][0] is not batch["index"]:
            found.append((batch["index"], batch["torch"].sum().item()))

    disturber = threading.Thread(target=disturb)
    if disturbed:
        disturber.start()
    batch = None
    while True:
        try:
            armed.set()
            for batch in iterator:
                record(batch)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            break
        except KeyboardInterrupt:
            if batch is not None:
                record(batch)
    over.set()
    if disturbed:
        disturber.join()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return [(index.tolist(), total) for index, total in found], len(sent)

expected, _ = epoch(False)
found, sent = epoch(True)
assert sent, "too fast"
assert found == expected, [batch for batch in expected if batch not in found]
print("right", sent)
"""


def test_after_ctrl_c_the_same_iterator_goes_on_with_the_right_batches() -> None:
    ended = run(GOES_ON)
    assert ended.stdout.startswith("right"), ended.stderr


TRAINS = """
loader = DataLoader(Augmented(100_000, seconds=0.001), batch_size=8, num_workers=3,
                    share_batches=True)
for step, batch in enumerate(loader):
    if step == 5:
        print("training", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_trainer(number: int) -> None:
    with running(TRAINS) as script:
        script.wait_for("training")
        left = script.descendants()
        assert left
        os.kill(script.pid, number)
        assert script.end(5.0) == -number
        assert gone(left, seconds=5.0) == []


# ---- memory

BATCH_BYTES = 8 * 2_500_000 * 4  # 80 MB: more than is loaded ahead as small


def test_sixteen_workers_take_the_memory_of_three_batches() -> None:
    loader = loader_of(Numbers(64, width=2_500_000), batch_size=8, num_workers=16)
    for step, batch in enumerate(loader):
        assert [int(x) for x in batch[:, 0]] == counted(64, 8)[step]
        assert [int(x) for x in batch[:, -1]] == counted(64, 8)[step]
    stats = loader.stats()
    assert 2 * BATCH_BYTES <= stats.in_flight_peak_bytes <= 3 * BATCH_BYTES + (1 << 16)
    assert stats.overdraft_batches == stats.copied_batches == 0


IN_A_GROUP = """
import threading
most = 0

def watch():
    global most
    while True:
        stat = dict(line.split() for line in open(group + "/memory.stat"))
        most = max(most, int(stat["shmem"]))
        time.sleep(0.002)

group = {group!r}
threading.Thread(target=watch, daemon=True).start()
loader = DataLoader(Heavy(16), batch_size=2, num_workers=8, share_batches=True, memory="1GB")
for step, batch in enumerate(loader):
    assert batch[:, 0, 0].tolist() == batch[:, 2, -1].tolist() == [2.0 * step, 2.0 * step + 1]
assert most <= 3 * 96_000_000 + (1 << 20), most
print("finished")
"""


def test_the_kernel_counts_three_batches_too(group: Path) -> None:
    ended = run(IN_A_GROUP.format(group=str(group)), prefix=inside(group))
    assert ended.stdout == "finished\n", ended.stderr


# ---- where it can't apply


@pytest.mark.parametrize(
    ("dataset", "more", "reason"),
    [
        (Numbers(8), {"batch_size": None}, "batch_size=None"),
        (Numbers(8), {"collate_fn": list}, "collate_fn"),
        (Stream(8), {}, "IterableDataset"),
    ],
)
def test_what_the_arguments_rule_out_is_refused(
    dataset: Any, more: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        loader_of(dataset, **more)
    assert caught.value.name == "share_batches"


def test_only_true_and_false_are_accepted() -> None:
    with pytest.raises(ConfigError, match="True or False"):
        loader_of(Numbers(8), share_batches="yes")


def test_torchs_own_collate_function_may_be_given() -> None:
    iterator: Any = iter(loader_of(Numbers(8), collate_fn=torch.utils.data.default_collate))
    assert isinstance(iterator._engine.dispatch, Sharing)
    assert numbers(iterator) == counted(8, 4)


@pytest.fixture
def _said_nothing_yet() -> Iterator[None]:
    platform.say_once.cache_clear()
    yield
    platform.say_once.cache_clear()


@pytest.mark.usefixtures("_said_nothing_yet")
def test_a_dataset_that_loads_several_samples_at_once_is_loaded_as_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dataset = FailingMany(24, set(), datasets.raise_value_error)
    for _ in range(2):
        iterator: Any = iter(loader_of(Subset(dataset, range(24))))
        assert not isinstance(iterator._engine.dispatch, Sharing)
        assert numbers(iterator) == counted(24, 4)
    lines = [r.getMessage() for r in caplog.records if "__getitems__" in r.getMessage()]
    assert len(lines) == 1
    assert "FailingMany" in lines[0]


def test_without_workers_there_is_nothing_to_share() -> None:
    assert numbers(loader_of(Numbers(8), num_workers=0)) == counted(8, 4)


def test_a_changed_map_of_collate_functions_is_respected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    functions = torch.utils.data._utils.collate.default_collate_fn_map
    monkeypatch.setitem(functions, torch.Tensor, lambda batch, **_: -torch.stack(batch))
    assert numbers(loader_of(Numbers(8))) == [[-n for n in batch] for batch in counted(8, 4)]


# ---- together with what else can change in mid-run


def test_workers_and_bytes_may_change_in_mid_epoch(undisturbed: list[Any]) -> None:
    loader = loader_of(Augmented(120), shuffle=True)
    iterator = seeded(loader)
    batches = []
    for workers, nbytes in ((1, 1 << 20), (5, None), (2, 1 << 16), (4, 1 << 24)):
        batches += [next(iterator) for _ in range(4)]
        assert loader.apply(Knobs(workers=workers, in_flight_bytes=nbytes)).workers == workers
    assert same(batches + list(iterator), undisturbed)


def test_a_resumed_epoch_goes_on_with_the_same_draws(undisturbed: list[Any]) -> None:
    loader = loader_of(Augmented(120), shuffle=True)
    iterator = seeded(loader)
    batches = [next(iterator) for _ in range(7)]
    again = loader_of(Augmented(120), shuffle=True, num_workers=5)
    again.load_state_dict(loader.state_dict())
    assert same(batches + list(again), undisturbed)


def test_the_next_epoch_may_begin_before_this_one_ends() -> None:
    def epochs(**more: Any) -> list[list[Any]]:
        generator = torch.Generator().manual_seed(7)
        loader = loader_of(
            Augmented(40), shuffle=True, generator=generator, persistent_workers=True, **more
        )
        torch.manual_seed(1)
        return [list(loader) for _ in range(3)]

    assert same(epochs(prefetch_next_epoch=True), epochs())
