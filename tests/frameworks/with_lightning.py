"""Lightning's Trainer and Fabric."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812 - as everybody writes it
import torch
from lightning.fabric.wrappers import _unwrap_objects
from torch.utils.data import DistributedSampler

import stoker
from tests.frameworks.training import (
    EPOCHS,
    Torch,
    assert_delivered,
    assert_ours,
    loader,
    run_readme,
)


class Model(L.LightningModule):
    """Notes what it saw; with a directory also there, for a rank that is another process."""

    def __init__(self, directory: Path | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.seen: list[list[int]] = []
        self.directory = directory

    def training_step(self, batch: Any, _: int) -> Any:
        self.seen.append(batch["index"].tolist())
        return torch.nn.functional.mse_loss(self.layer(batch["x"]), batch["labels"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_end(self) -> None:
        used = self.trainer.train_dataloader
        if isinstance(used, stoker.DataLoader):
            assert type(used) is stoker.DataLoader
            assert_ours(used, len(self.seen))
        if self.directory is not None:
            kind = type(used.sampler).__name__
            note = {"seen": self.seen, "sampler": kind, "class": type(used).__module__}
            (self.directory / f"{self.global_rank}.json").write_text(json.dumps(note))


def trained(
    cls: type[Torch[Any]] | None,
    directory: Path,
    model: Model | None = None,
    ckpt_path: Path | None = None,
    **options: Any,
) -> Model:
    torch.manual_seed(3)
    model = Model() if model is None else model
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        default_root_dir=directory,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **{"devices": 1, **options},
    )
    trainer.fit(model, None if cls is None else loader(cls, shuffle=True), ckpt_path=ckpt_path)
    return model


def check_fit_sees_torchs_batches(directory: Path) -> None:
    theirs, ours = (trained(cls, directory) for cls in (Torch, stoker.DataLoader))
    assert len(theirs.seen) == EPOCHS * 6
    assert ours.seen == theirs.seen
    assert torch.equal(ours.layer.weight, theirs.layer.weight)


def check_two_ranks_get_our_loader_with_a_distributed_sampler(directory: Path) -> None:
    notes = []
    for cls in (Torch, stoker.DataLoader):
        where = directory / cls.__module__
        where.mkdir()
        os.environ.pop("MASTER_PORT", None)
        trained(cls, directory, Model(where), devices=2, strategy="ddp_fork")
        notes.append([json.loads((where / f"{rank}.json").read_text()) for rank in range(2)])
    theirs, ours = notes
    for rank in range(2):
        assert ours[rank]["sampler"] == theirs[rank]["sampler"] == "DistributedSampler"
        assert ours[rank]["seen"] == theirs[rank]["seen"]
        assert ours[rank]["class"] == "stoker.loader.dataloader"
    assert len(ours[0]["seen"]) == EPOCHS * 3
    assert ours[0]["seen"] != ours[1]["seen"]


def check_lightning_rebuilds_the_loader_around_another_sampler(directory: Path) -> None:
    from lightning.pytorch.utilities.data import _update_dataloader

    given = loader(stoker.DataLoader, num_workers=2, shuffle=True, prefetch_factor=3)
    again = _update_dataloader(given, DistributedSampler(given.dataset, 2, 1, shuffle=False))
    seen = [index for batch in again for index in batch["index"].tolist()]
    assert seen == list(range(1, 22, 2))
    assert (again.num_workers, again.prefetch_factor, again.batch_size) == (2, 3, 4)
    assert_ours(again, 3)


class Saving(Model):
    def __init__(self, path: Path, after: int) -> None:
        super().__init__()
        self.path = path
        self.after = after

    def on_train_batch_end(self, *_: Any) -> None:
        if len(self.seen) == self.after:
            self.trainer.save_checkpoint(self.path)


def check_our_state_is_in_lightnings_checkpoint_and_resumes(directory: Path) -> None:
    for after in (4, 9):  # in the first and in the second epoch
        path = directory / f"{after}.ckpt"
        whole = trained(stoker.DataLoader, directory, Saving(path, after))
        state = torch.load(path, weights_only=False)["loops"]["fit_loop"]["state_dict"]
        assert len(state["combined_loader"]) == 1
        again = trained(stoker.DataLoader, directory, Resumed(), ckpt_path=path)
        rest = 6 - after % 6
        assert again.seen[:rest] == whole.seen[after : after + rest]
        # Later epochs' order comes from the trainer's generator, which Lightning leaves alone.
        assert len(again.seen) == len(whole.seen) - after
    assert torch.equal(again.layer.weight, whole.layer.weight)


class Resumed(Model):
    def on_train_end(self) -> None:
        assert_ours(self.trainer.train_dataloader, len(self.seen))


class Elastic(Model):
    def train_dataloader(self) -> Any:
        world, rank = self.trainer.world_size, self.trainer.global_rank
        sampler: Any = stoker.ElasticSampler(range(22), world, rank)  # type: ignore[arg-type]
        return loader(stoker.DataLoader, sampler=sampler)


def check_an_elastic_sampler_is_left_alone(directory: Path) -> None:
    trained(None, directory, Elastic(directory), devices=2, strategy="ddp_fork")
    notes = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]
    assert [note["sampler"] for note in notes] == ["ElasticSampler"] * 2
    epochs = [[n["seen"][:3] for n in notes], [n["seen"][3:] for n in notes]]
    for epoch in epochs:
        assert sorted(i for rank in epoch for batch in rank for i in batch) == list(range(22))
    assert epochs[0] != epochs[1]  # Lightning calls set_epoch


def check_fabric_sees_torchs_batches(directory: Path) -> None:
    seen: dict[str, list[Any]] = {}
    for cls in (Torch, stoker.DataLoader):
        torch.manual_seed(3)
        fabric = L.Fabric(accelerator="cpu", devices=1)
        fabric.launch()
        model = torch.nn.Linear(4, 1)
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
        batches = fabric.setup_dataloaders(loader(cls, shuffle=True))
        found: list[Any] = []
        for _ in range(EPOCHS):
            for batch in batches:
                optimizer.zero_grad()
                fabric.backward(torch.nn.functional.mse_loss(model(batch["x"]), batch["labels"]))
                optimizer.step()
                found.append(batch["index"].tolist())
        seen[cls.__module__] = found
        if cls is stoker.DataLoader:
            assert_ours(_unwrap_objects(batches), len(found))
    theirs, ours = seen.values()
    assert len(theirs) == EPOCHS * 6
    assert ours == theirs


def check_the_readmes_lines(directory: Path) -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        default_root_dir=directory,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    run_readme("Lightning", trainer=trainer, model=(model := Readme()))
    assert len(model.seen) == 6
    fabric = L.Fabric(accelerator="cpu", devices=1)
    used = run_readme("Lightning Fabric", fabric=fabric)["loader"]
    assert len(list(used)) == 6
    assert_delivered(_unwrap_objects(used), 6)


class Readme(Model):
    def on_train_end(self) -> None:
        assert_delivered(self.trainer.train_dataloader, 6)
