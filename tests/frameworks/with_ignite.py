"""Ignite: its Engine, its deterministic engine that rebuilds loaders, its auto_dataloader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import DeterministicEngine, Engine

import stoker
from stoker.integrations.ignite import auto_dataloader
from tests.frameworks.training import (
    EPOCHS,
    OURS,
    Rows,
    Torch,
    assert_delivered,
    assert_ours,
    loader,
    run_readme,
)


def trained(cls: type[Torch[Any]], kind: type[Engine]) -> tuple[list[Any], Any]:
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []

    def step(engine: Engine, batch: Any) -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(batch["x"]), batch["labels"]).backward()
        optimizer.step()
        seen.append(batch["index"].tolist())

    engine = kind(step)
    data = loader(cls, shuffle=True)
    engine.run(data, max_epochs=EPOCHS)
    return seen, engine.state.dataloader or data


def check_run_sees_torchs_batches(directory: Path) -> None:
    theirs, _ = trained(Torch, Engine)
    ours, used = trained(stoker.DataLoader, Engine)
    assert len(theirs) == EPOCHS * 6
    assert ours == theirs
    assert_ours(used, len(ours))


def check_the_deterministic_engine_rebuilds_our_loader(directory: Path) -> None:
    rebuilt: list[Any] = []
    from ignite.engine import deterministic

    update = deterministic.update_dataloader

    def noted(*args: Any) -> Any:
        rebuilt.append(update(*args))
        return rebuilt[-1]

    deterministic.update_dataloader = noted
    try:
        theirs, _ = trained(Torch, DeterministicEngine)
        ours, _ = trained(stoker.DataLoader, DeterministicEngine)
    finally:
        deterministic.update_dataloader = update
    assert len(theirs) == EPOCHS * 6
    assert ours == theirs
    used = [made for made in rebuilt if isinstance(made, stoker.DataLoader)]
    assert type(used[-1]) is stoker.DataLoader
    assert len(used) == len(rebuilt) // 2
    assert sum(made.stats().delivered for made in used) == len(ours)
    assert all(getattr(used[-1], name) == value for name, value in OURS.items())


def _seen(cls: Any, **options: Any) -> tuple[list[Any], Any]:
    torch.manual_seed(3)
    made = cls(Rows(), batch_size=4, num_workers=1, shuffle=True, **options)
    return [batch["index"].tolist() for _ in range(EPOCHS) for batch in made], made


def check_auto_dataloader_gives_our_loader(directory: Path) -> None:
    theirs, _ = _seen(idist.auto_dataloader)
    ours, made = _seen(auto_dataloader, **OURS)
    assert ours == theirs
    assert_ours(made, EPOCHS * 6)
    assert auto_dataloader(Rows(), persistent_workers=True).num_workers >= 1
    assert auto_dataloader(Rows(), num_workers=0).num_workers == 0


def _rank(rank: int, directory: str) -> None:
    theirs, _ = _seen(idist.auto_dataloader)
    ours, made = _seen(auto_dataloader, **OURS)
    assert ours == theirs
    assert_ours(made, len(ours))
    note = {"seen": ours, "batch": made.batch_size, "sampler": type(made.sampler).__name__}
    (Path(directory) / f"{rank}.json").write_text(json.dumps(note))


def check_auto_dataloader_in_two_ranks(directory: Path) -> None:
    idist.spawn(
        "gloo",
        _rank,
        args=(str(directory),),
        nproc_per_node=2,
        init_method=f"file://{directory}/store",
        start_method="fork",
    )
    notes = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]
    assert [note["batch"] for note in notes] == [2, 2]
    assert {note["sampler"] for note in notes} == {"DistributedSampler"}
    epoch = {index for note in notes for batch in note["seen"][:6] for index in batch}
    assert epoch == set(range(22))


def check_the_readmes_lines(directory: Path) -> None:
    seen: list[Any] = []
    names = run_readme("Ignite", Engine=Engine, step=lambda _, batch: seen.append(batch))
    assert len(seen) == 2 * 6
    assert_delivered(names["loader"], 12)
