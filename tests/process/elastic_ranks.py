"""One epoch shared by changing numbers of ranks, each a process with gloo and a loader of ours.

    python -m tests.process.elastic_ranks DIRECTORY

Prints, as JSON, what every segment consumed. A program of its own: torch is imported once, and
ranks are forked from a process that has run nothing yet.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

import stoker

LENGTH = 101
BATCH = 3
# Ranks, and the batches that each consumes before the world changes (None: all that are left).
PLAN: list[tuple[int, int | None]] = [(4, 3), (2, 5), (3, None)]


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index


def train(rank: int, world: int, batches: int | None, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store{world}", rank=rank, world_size=world
    )
    checkpoint = directory / "checkpoint.json"
    sampler = stoker.ElasticSampler(Numbers(), seed=5)
    sampler.set_epoch(2)
    if checkpoint.exists():
        sampler.load_state_dict(json.loads(checkpoint.read_text()))
    sampler.set_epoch(2)
    loader = stoker.DataLoader(Numbers(), BATCH, sampler=sampler, num_workers=1)
    promised = len(loader)
    seen: list[int] = []
    steps = 0
    iterator = iter(loader)
    while steps != batches:
        batch = next(iterator, None)
        if batch is None:
            break
        seen += batch.tolist()
        steps += 1
        step = torch.ones(1)
        dist.all_reduce(step)  # as training does: nobody is a step ahead
        assert int(step) == world
    del iterator
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, (seen, sampler.state_after(len(seen)), promised))
    if rank == 0:
        checkpoint.write_text(json.dumps(gathered[0][1]))
        found = {"world": world, "steps": steps, "ranks": gathered}
        (directory / f"segment{world}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main(directory: Path) -> None:
    fork = multiprocessing.get_context("fork")
    for world, batches in PLAN:
        ranks = [
            fork.Process(target=train, args=(rank, world, batches, directory))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
            assert process.exitcode == 0, process
    print(json.dumps([json.loads((directory / f"segment{w}.json").read_text()) for w, _ in PLAN]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
