"""Containers give 64 MB of /dev/shm, or less; batches do not go through it."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.process.scripts import run

SHM = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'

LOAD = """
assert os.statvfs("/dev/shm").f_frsize * os.statvfs("/dev/shm").f_blocks == 1 << 20

class Large(Numbers):
    def __getitem__(self, index):
        return torch.full((5, 1 << 20), float(index))  # 20 MB

def own_collate(samples):
    return {{"data": torch.stack(samples), "list": [s[0, :4] for s in samples]}}

loader = DataLoader(
    Large(15), batch_size=5, num_workers=2, collate_fn={collate}, prefetch_factor=2,
    multiprocessing_context={context!r},
)
if __name__ == "__main__":
    for step, batch in enumerate(loader):
        data = batch["data"] if isinstance(batch, dict) else batch
        assert data.nbytes == 100 << 20
        assert [int(sample.min()) for sample in data] == list(range(step * 5, step * 5 + 5))
        assert [int(sample.max()) for sample in data] == list(range(step * 5, step * 5 + 5))
    assert step == 2
    assert os.listdir("/dev/shm") == [], os.listdir("/dev/shm")
    print("loaded")
"""


def unshared() -> list[str]:
    if shutil.which("unshare") is None:
        pytest.skip("no unshare(1) on this machine")
    prefix = ["unshare", "-m", "sh", "-c", SHM, "sh"]
    trial = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    if trial.returncode:
        pytest.skip(f"may not mount a small /dev/shm of our own: {trial.stderr.strip()}")
    return prefix


@pytest.mark.parametrize("collate", ["None", "own_collate"])
def test_batches_of_100_mb_load_with_1_mb_of_shm(collate: str) -> None:
    ended = run(LOAD.format(collate=collate, context="fork"), prefix=unshared())
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "loaded\n"


def test_a_dataset_larger_than_shm_reaches_spawned_workers() -> None:
    script = """
if __name__ == "__main__":
    dataset = Numbers(8)
    dataset.ballast = np.arange(1 << 20)  # 8 MB
    found = list(DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context="spawn"))
    assert numbers(found) == counted(8, 4)
    print("loaded")
"""
    ended = run(script, prefix=unshared())
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "loaded\n"
