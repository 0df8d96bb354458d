"""Hugging Face's Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.trainer
from transformers import Trainer, TrainerCallback, TrainingArguments

import stoker
from stoker.errors import ConfigError
from stoker.integrations.transformers import use_stoker
from tests.frameworks.training import (
    EPOCHS,
    OURS,
    Rows,
    assert_delivered,
    assert_ours,
    run_readme,
)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.seen: list[tuple[bool, list[int]]] = []

    def forward(self, x: Any, labels: Any, index: Any) -> Any:
        self.seen.append((self.training, index.tolist()))
        found = self.layer(x)
        return {"loss": torch.nn.functional.mse_loss(found, labels), "logits": found}


def trainer(directory: Path, **options: Any) -> Trainer:
    torch.manual_seed(3)
    arguments = TrainingArguments(
        output_dir=str(directory),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        dataloader_num_workers=1,
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        report_to=[],
        remove_unused_columns=False,
        seed=3,
        **{"save_strategy": "no", "eval_strategy": "epoch", **options},
    )
    model = Model()
    return Trainer(model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows(10))


class Watch(TrainerCallback):
    """The loaders that training and evaluation really used."""

    def __init__(self) -> None:
        self.train: Any = None
        self.eval: Any = None

    def on_epoch_end(self, *_: Any, train_dataloader: Any, **__: Any) -> None:
        self.train = train_dataloader

    def on_prediction_step(self, *_: Any, eval_dataloader: Any, **__: Any) -> None:
        self.eval = eval_dataloader


def watched(made: Trainer) -> Watch:
    watch = Watch()
    made.add_callback(watch)
    made.train()
    return watch


def check_the_trainer_sees_torchs_batches(directory: Path) -> None:
    stock = trainer(directory)
    stock.train()
    ours = use_stoker(trainer(directory), **OURS)
    watch = watched(ours)
    assert len([1 for training, _ in ours.model.seen if training]) == EPOCHS * 6
    assert len([1 for training, _ in ours.model.seen if not training]) == EPOCHS * 3
    assert ours.model.seen == stock.model.seen
    assert torch.equal(ours.model.layer.weight, stock.model.layer.weight)
    assert_ours(watch.train, EPOCHS * 6)
    assert_ours(watch.eval, 3)


def check_a_trainer_may_return_our_loader_itself(directory: Path) -> None:
    class Mine(Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(
                stoker.DataLoader(Rows(), 4, num_workers=1, collate_fn=self.data_collator, **OURS)
            )

    plain = trainer(directory, eval_strategy="no")
    made = Mine(model=plain.model, args=plain.args, train_dataset=Rows())
    watch = watched(made)
    assert [seen for _, seen in plain.model.seen[:2]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert_ours(watch.train, EPOCHS * 6)


def check_training_resumes_in_mid_epoch_with_our_engine(directory: Path) -> None:
    """The Trainer skips what it has seen through Accelerate, which builds a loader once more."""
    options = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "no"}
    stock = trainer(directory / "stock", **options)
    stock.train()
    first = use_stoker(trainer(directory / "ours", **options), **OURS)
    first.train()
    assert first.model.seen == stock.model.seen
    skipping = transformers.trainer.skip_first_batches
    rest: list[Any] = []

    def noted(*args: Any) -> Any:
        rest.append(skipping(*args))
        return rest[-1]

    transformers.trainer.skip_first_batches = noted
    for kind in (False, True):
        made = trainer(directory / "again", **options)
        if kind:
            use_stoker(made, **OURS)
        made.train(resume_from_checkpoint=str(directory / "ours" / "checkpoint-4"))
        assert made.model.seen == stock.model.seen[4:]
        used = made.callback_handler.train_dataloader
        assert isinstance(used, stoker.DataLoader) is kind
    transformers.trainer.skip_first_batches = skipping
    assert len(rest) == 2
    assert_ours(rest[1], 2)  # what was left of the epoch
    assert_ours(used, 6)


def check_settings_may_be_added_and_what_is_no_trainer_is_refused(directory: Path) -> None:
    made = use_stoker(trainer(directory), num_workers=2, memory="32MB")
    batches = made.get_train_dataloader()
    assert (batches.num_workers, batches.memory) == (2, "32MB")
    assert made.get_test_dataloader(Rows(8)).memory == "32MB"
    with pytest.raises(ConfigError, match=r"transformers\.Trainer"):
        use_stoker(object())


def check_the_readmes_lines(directory: Path) -> None:
    plain = trainer(directory, eval_strategy="no")
    names = run_readme("Hugging Face Trainer", Trainer=Trainer, model=plain.model, args=plain.args)
    assert len(plain.model.seen) == EPOCHS * 6
    assert_delivered(names["trainer"].callback_handler.train_dataloader, EPOCHS * 6)
