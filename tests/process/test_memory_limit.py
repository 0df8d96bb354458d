"""A memory control group that kills torch's loader; ours, told nothing, finishes in it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.machine import cgroup
from tests.leaks import SHARED_MEMORY
from tests.process.scripts import run

JOIN = 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"'
LIMIT_BYTES = 1_100_000_000

LOAD = """
import logging
logging.basicConfig()

def right(batch, step):
    return [int(s.min()) for s in batch] == [int(s.max()) for s in batch] == [
        step * 4 + n for n in range(4)
    ]

if __name__ == "__main__":
    {imports}
    loader = DataLoader(Heavy(28), batch_size=4, num_workers=4, prefetch_factor=4, {more})
    for step, batch in enumerate(loader):
        assert right(batch, step)
        time.sleep(0.02)
    assert step == 6
    print("finished")
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory group below our own, with a limit."""
    v1 = [found for found in cgroup.hierarchies("memory") if found.version == 1]
    if not v1:
        pytest.skip("no cgroup v1 memory controller on this machine")
    path = v1[0].levels[0] / f"stoker-test-{uuid.uuid4().hex}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"may not create a memory cgroup: {error}")
    try:
        (path / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
        yield path
    finally:
        _remove(path)


def _remove(group: Path) -> None:
    """A process that ends by itself (multiprocessing's tracker) may take a moment to be gone."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return group.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def inside(group: Path) -> list[str]:
    return ["sh", "-c", JOIN, "sh", str(group)]


def test_torch_is_killed(group: Path) -> None:
    body = LOAD.format(imports="from torch.utils.data import DataLoader", more="")
    before = set(SHARED_MEMORY.iterdir())
    ended = run(body, prefix=inside(group))
    _remove_what_torch_left(before)
    assert "finished" not in ended.stdout
    assert ended.returncode != 0


def _remove_what_torch_left(before: set[Path]) -> None:
    for path in set(SHARED_MEMORY.glob("torch_*_*")) - before:
        if not Path(f"/proc/{path.name.split('_')[1]}").exists():
            path.unlink()


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_we_finish(group: Path, context: str) -> None:
    body = LOAD.format(imports="", more=f"multiprocessing_context={context!r}")
    ended = run(body, prefix=inside(group))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "finished\n"


def test_we_finish_with_a_collate_fn_of_the_users(group: Path) -> None:
    body = LOAD.format(imports="", more="collate_fn=lambda samples: torch.stack(samples)")
    ended = run(body, prefix=inside(group))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "finished\n"


MEASURED = """
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
loader = DataLoader(Numbers(1000, width=250_000), batch_size=4, num_workers=2, memory="20MB")
for step, batch in enumerate(loader):
    stats = loader.stats()
    assert stats.in_flight_peak_bytes <= 20_000_000, stats
assert stats.overdraft_batches == 0, stats
assert most <= 20_000_000 + (1 << 20), most
print("finished")
"""


RESIZED = """
from stoker import Knobs

def shared():
    return int(dict(line.split() for line in open({group!r} + "/memory.stat"))["shmem"])

loader = DataLoader(
    Numbers(4000, width=250_000), batch_size=4, num_workers=2, memory="100MB", worker_kind={kind!r}
)
iterator = iter(loader)
held = [next(iterator) for _ in range(18)]
assert shared() > 60_000_000, shared()
small = loader.apply(Knobs(in_flight_bytes="20MB")).in_flight_bytes
assert 19_000_000 < small <= 20_000_000, small
assert loader.stats().arena_bytes == small
assert numbers(held) == counted(4000, 4)[:18], "what is held stays as it is"
del held
loader.apply(Knobs(in_flight_bytes="20MB"))
seen = []
for step in range(18, 60):
    seen += numbers([next(iterator)])
    if step > 40:  # what was on its way when the bound was lowered is through
        assert shared() <= small + (1 << 20), (step, shared())
        assert loader.stats().in_flight_bytes <= small
large = loader.apply(Knobs(in_flight_bytes="60MB", workers=3)).in_flight_bytes
assert small < large <= 60_000_000
held = [next(iterator) for _ in range(9)]
assert numbers(held) + seen == counted(4000, 4)[60:69] + counted(4000, 4)[18:60]
assert shared() > 30_000_000, shared()
assert loader.stats().copied_batches == 0 or {kind!r} == "process", loader.stats()
print("finished")
"""


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_pages_above_a_bound_that_is_lowered_go_back_to_the_system(group: Path, kind: str) -> None:
    ended = run(RESIZED.format(group=str(group), kind=kind), prefix=inside(group))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "finished\n"


def test_memory_bounds_what_the_kernel_counts_as_shared(group: Path) -> None:
    ended = run(MEASURED.format(group=str(group)), prefix=inside(group))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "finished\n"
