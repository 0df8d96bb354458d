"""Few file descriptors: torch runs out of them at one per tensor, we must not."""

from __future__ import annotations

import pytest

from tests.process.scripts import run

LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))

class Many(Numbers):
    def __getitem__(self, index):
        return [torch.full((3000,), float(index)) for _ in range(12)]

loader = DataLoader(Many(160), batch_size=4, num_workers={workers}, {more})
held = []
for batch in loader:
    held.append(batch)
del loader
for step, batch in enumerate(held):
    assert len(batch) == 12
    for tensor in batch:
        assert numbers([tensor]) == [list(range(step * 4, step * 4 + 4))]
assert len(held) == 40
print("loaded")
"""


@pytest.mark.parametrize("more", ["", "memory=1"], ids=["roomy", "overdraft"])
def test_four_workers_and_all_batches_kept_need_less_than_64_descriptors(more: str) -> None:
    ended = run(LIMITED.format(limit=64, workers=4, more=more))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "loaded\n"


@pytest.mark.parametrize("workers", [16, 40])
def test_too_many_workers_for_64_descriptors_load_or_say_what_limit_to_raise(workers: int) -> None:
    ended = run(LIMITED.format(limit=64, workers=workers, more=""))
    if ended.returncode:
        last = ended.stderr.strip().splitlines()[-1]
        assert "ulimit -n" in last, ended.stderr
    else:
        assert ended.stdout == "loaded\n"


RUNS_OUT_LATER = """
import resource
iterator = iter(DataLoader(Numbers(4000, width=3000), batch_size=4, num_workers=2, memory={memory}))
found = [next(iterator)]
worker_pids(iterator)
highest = max(map(int, os.listdir("/proc/self/fd")))
resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, highest + 1))
hoard = []
try:
    while True:
        hoard.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
try:
    for batch in iterator:
        found.append(batch)
        if len(found) == 200:
            break
except Exception as error:
    print("error", error)
else:
    print("loaded")
for fd in hoard:
    os.close(fd)
assert numbers(found) == counted(4000, 4)[: len(found)]
"""


def test_batches_go_on_when_every_descriptor_is_taken() -> None:
    ended = run(RUNS_OUT_LATER.format(memory=None))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "loaded\n"


def test_overdraft_without_a_descriptor_is_a_clear_error_and_never_wrong_data() -> None:
    ended = run(RUNS_OUT_LATER.format(memory=1))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "loaded\n" or "ulimit -n" in ended.stdout, ended.stdout
