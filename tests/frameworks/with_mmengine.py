"""MMEngine's Runner, with a loader and with a loader that it builds of a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from mmengine.model import BaseModel
from mmengine.runner import Runner

import stoker
from stoker.integrations import like
from tests.frameworks.training import (
    BATCH,
    EPOCHS,
    OURS,
    Rows,
    Torch,
    assert_delivered,
    assert_ours,
    loader,
    run_readme,
)


class Model(BaseModel):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.seen: list[Any] = []

    def forward(self, x: Any, labels: Any, index: Any, mode: str = "loss") -> Any:
        self.seen.append(index.tolist())
        return {"loss": torch.nn.functional.mse_loss(self.layer(x), labels)}


def settings(directory: Path, name: str) -> dict[str, Any]:
    return {
        "work_dir": str(directory),
        "experiment_name": name,
        "train_cfg": {"by_epoch": True, "max_epochs": EPOCHS},
        "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.01}},
        "default_hooks": {"checkpoint": None, "logger": None, "param_scheduler": None},
        "randomness": {"seed": 3},
        "log_level": "ERROR",
        "visualizer": {"type": "Visualizer", "vis_backends": []},
    }


def trained(data: Any, directory: Path, name: str) -> list[Any]:
    torch.manual_seed(3)
    model = Model()
    Runner(model, train_dataloader=data, **settings(directory, name)).train()
    return model.seen


def check_the_runner_sees_torchs_batches(directory: Path) -> None:
    theirs = trained(loader(Torch, shuffle=True), directory, "theirs")
    data = loader(stoker.DataLoader, shuffle=True)
    ours = trained(data, directory, "ours")
    assert len(theirs) == EPOCHS * 6
    assert ours == theirs
    assert_ours(data, len(ours))


def config() -> dict[str, Any]:
    return {
        "dataset": Rows(),
        "batch_size": BATCH,
        "num_workers": 1,
        "sampler": {"type": "DefaultSampler", "shuffle": True},
        "collate_fn": {"type": "default_collate"},
    }


def check_a_loader_built_of_a_configuration_can_be_ours(directory: Path) -> None:
    theirs = trained(Runner.build_dataloader(config(), seed=3), directory, "theirs-built")
    data = like(Runner.build_dataloader(config(), seed=3), **OURS)
    ours = trained(data, directory, "ours-built")
    assert ours == theirs
    assert ours[:6] != ours[6:]
    assert_ours(data, len(ours))


def check_the_readmes_lines(directory: Path) -> None:
    given = settings(directory, "readme")
    names = run_readme("MMEngine", Runner=Runner, model=Model(), config=config(), settings=given)
    names["runner"].train()
    assert_delivered(names["loader"], EPOCHS * 6)
