"""What every framework trains on here, and what is said of a loader afterwards."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.utils.data
from torch.utils.data import Dataset

import stoker

Torch = torch.utils.data.DataLoader
LENGTH = 22
BATCH = 4
EPOCHS = 2
OURS: dict[str, Any] = {"memory": "64MB", "name": "rows", "on_error": "skip"}
"""Keywords of our own, none of them at its default: they must survive a rebuild."""


class Rows(Dataset[Any]):
    """A regression: y = sum(x). Each sample carries its index."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        x = torch.arange(4.0) * 0.1 + index / LENGTH
        return {"x": x, "labels": x.sum()[None], "index": torch.tensor(index)}


def loader(cls: type[Torch[Any]], dataset: Any = None, **options: Any) -> Any:
    """torch's loader or ours, which then has keywords of its own."""
    options = {"batch_size": BATCH, "num_workers": 1, **options}
    if issubclass(cls, stoker.DataLoader):
        options = {**OURS, **options}
    return cls(Rows() if dataset is None else dataset, **options)


def assert_ours(loader: Any, batches: int) -> None:
    """It is a loader of ours with all its keywords, and its worker processes have delivered."""
    assert isinstance(loader, stoker.DataLoader), type(loader)
    assert {name: getattr(loader, name) for name in OURS} == OURS
    stats = loader.stats()
    assert (stats.worker_kind, stats.fallback, stats.name) == ("process", None, "rows"), stats
    assert stats.delivered == batches, stats
    assert stats.skipped == 0


def run_readme(title: str, **names: Any) -> dict[str, Any]:
    """Run the README's lines for a framework, with these names defined, and return all of them."""
    text = (Path(__file__).parents[2] / "README.md").read_text()
    section = text.partition("\n## Frameworks\n")[2].partition("\n## ")[0]
    found = [
        block
        for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL)
        if re.match(rf"# {title}(:|\n)", block)
    ]
    assert len(found) == 1, title
    names |= {"stoker": stoker, "dataset": Rows()}
    exec(compile(found[0], "README.md", "exec"), names)  # noqa: S102 - our own page
    return names


def assert_delivered(loader: Any, batches: int) -> None:
    """Our worker processes have delivered so many."""
    assert isinstance(loader, stoker.DataLoader), type(loader)
    stats = loader.stats()
    assert (stats.worker_kind, stats.delivered) == ("process", batches), stats
