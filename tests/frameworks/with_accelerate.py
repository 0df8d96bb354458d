"""Accelerate: prepare() in all its ways must keep our engine, and change nothing else."""

from __future__ import annotations

import importlib
import json
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate.data_loader
import torch
from accelerate import Accelerator, debug_launcher, skip_first_batches
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

import stoker
from stoker.integrations.accelerate import adopt
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


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        rows = Rows()
        return (rows[index] for index in range(len(rows)))


def accelerator(**options: Any) -> Accelerator:
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))


def trained(made: Accelerator, prepared: Any) -> list[Any]:
    model = torch.nn.Linear(4, 1)
    model, optimizer = made.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    seen = []
    for _ in range(EPOCHS):
        for batch in prepared:
            with made.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(batch["x"]), batch["labels"])
                made.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            last = made.gradient_state.end_of_dataloader
            seen.append([batch["index"].tolist(), last, made.gradient_state.remainder])
    return seen


def both(given: Any, **options: Any) -> tuple[list[Any], list[Any], Any]:
    """What torch's loader and ours give, prepared alike; and our prepared loader."""
    found = []
    for cls in (Torch, stoker.DataLoader):
        made = accelerator(**options)
        torch.manual_seed(3)
        prepared = made.prepare(given(cls))
        found.append(trained(made, prepared))
    return found[0], found[1], prepared


def check_a_stock_loader_comes_first_and_nothing_is_changed(directory: Path) -> None:
    before = accelerate.data_loader.DataLoader
    made = accelerator()
    prepared = made.prepare(loader(Torch))
    assert accelerate.data_loader.DataLoader is before is Torch
    assert type(prepared.base_dataloader) is Torch


def check_plain_prepare_keeps_our_engine(directory: Path) -> None:
    theirs, ours, prepared = both(shuffled)
    assert len(theirs) == EPOCHS * 6
    assert ours == theirs
    assert isinstance(prepared, DataLoaderShard)
    assert type(prepared.base_dataloader) is stoker.DataLoader
    assert_ours(prepared, len(ours))
    assert not prepared.base_dataloader._counted  # nobody asked for a prefetch_factor


def check_stock_loaders_are_still_torchs(directory: Path) -> None:
    made = accelerator()
    ours, stock = made.prepare(loader(stoker.DataLoader), loader(Torch))
    assert type(ours.base_dataloader) is stoker.DataLoader
    assert type(stock.base_dataloader) is Torch
    assert type(skip_first_batches(stock, 1).base_dataloader) is Torch
    assert type(skip_first_batches(loader(Torch), 1)) is Torch
    assert isinstance(loader(Torch), accelerate.data_loader.DataLoader)
    assert not isinstance(3, accelerate.data_loader.DataLoader)


def check_a_seedable_sampler(directory: Path) -> None:
    theirs, ours, prepared = both(shuffled, use_seedable_sampler=True)
    assert ours == theirs
    assert ours[:6] != ours[6:]
    assert_ours(prepared, len(ours))


def check_an_iterable_dataset(directory: Path) -> None:
    theirs, ours, prepared = both(lambda cls: loader(cls, Stream(), drop_last=True))
    assert len(theirs) == EPOCHS * 5
    assert ours == theirs
    # On one process, batches are dispatched by default all the same.
    assert isinstance(prepared, DataLoaderDispatcher)
    assert_ours(prepared, len(ours))


def check_first_batches_are_skipped_by_our_engine(directory: Path) -> None:
    made = accelerator()
    prepared = made.prepare(loader(stoker.DataLoader))
    rest = made.skip_first_batches(prepared, 4)
    assert [batch["index"].tolist() for batch in rest] == [[16, 17, 18, 19], [20, 21]]
    assert_ours(rest, 2)
    rest = skip_first_batches(loader(stoker.DataLoader), 5)
    assert [batch["index"].tolist() for batch in rest] == [[20, 21]]
    assert_ours(rest, 1)


def check_a_prepared_loader_can_be_pickled_and_prepared_again(directory: Path) -> None:
    made = accelerator()
    prepared = made.prepare(loader(stoker.DataLoader))
    assert made.prepare(prepared) is prepared
    again = pickle.loads(pickle.dumps(prepared))
    assert len(list(again)) == 6
    assert_ours(again, 6)


def check_a_state_is_saved_and_loaded(directory: Path) -> None:
    made = accelerator()
    model = torch.nn.Linear(4, 1)
    model, prepared = made.prepare(model, loader(stoker.DataLoader, shuffle=True))
    made.save_state(str(directory))
    next(iter(prepared))
    made.load_state(str(directory))
    assert len(list(prepared)) == 6


def check_a_stock_loader_that_was_prepared_can_be_given_our_engine(directory: Path) -> None:
    made = accelerator()
    torch.manual_seed(3)
    theirs = trained(made, made.prepare(loader(Torch, shuffle=True)))
    made = accelerator()
    torch.manual_seed(3)
    prepared = adopt(made.prepare(loader(Torch, shuffle=True)), **OURS)
    assert trained(made, prepared) == theirs
    assert_ours(prepared, len(theirs))
    assert adopt(prepared) is prepared
    assert type(skip_first_batches(prepared, 1).base_dataloader) is stoker.DataLoader


def check_our_own_state_is_used_where_torchdatas_was_asked_for(directory: Path) -> None:
    accelerator()
    added = not hasattr(stoker.DataLoader, "state_dict")
    if added:
        stoker.DataLoader.state_dict = lambda self: {"delivered": self.stats().delivered}
    try:
        options = {"use_stateful_dataloader": True}
        prepared = accelerate.data_loader.prepare_data_loader(loader(stoker.DataLoader), **options)
        assert prepared.use_stateful_dataloader
        assert_ours(prepared, 0)
        states = [dict(prepared.state_dict()) for _ in prepared]
        assert [state["_iterator_finished"] for state in states] == [False] * 5 + [True]
        if added:
            assert [state["delivered"] for state in states] == [1, 2, 3, 4, 5, 6]
    finally:
        if added:
            del stoker.DataLoader.state_dict


# --- two ranks ----------------------------------------------------------------------------------


class Lists(Rows):
    """Gets all indices of a batch at once."""

    def __getitem__(self, index: Any) -> Any:
        rows = [Rows.__getitem__(self, i) for i in index]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def shuffled(cls: type[Torch[Any]]) -> Any:
    return loader(cls, shuffle=True)


def batches_as_samples(cls: type[Torch[Any]]) -> Any:
    sampler = BatchSampler(RandomSampler(Rows()), 4, drop_last=False)
    return loader(cls, Lists(), sampler=sampler, batch_size=None)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batches as samples": {},
    "split_batches": {"split_batches": True},
    "uneven": {"even_batches": False},
    "dispatched": {"dispatch_batches": True},
    "seedable": {"use_seedable_sampler": True},
}


def _rank(directory: str) -> None:
    found = {}
    for way, options in WAYS.items():
        given = batches_as_samples if way == "batches as samples" else shuffled
        theirs, ours, prepared = both(given, **options)
        assert ours == theirs, way
        rank = PartialState().process_index
        delivered = prepared.stats().delivered
        assert type(prepared.base_dataloader) is stoker.DataLoader, way
        found[way] = {"batches": [indices for indices, _, _ in ours], "delivered": delivered}
    (Path(directory) / f"{rank}.json").write_text(json.dumps(found))


def check_two_ranks_in_every_way(directory: Path) -> None:
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    debug_launcher(_rank, args=(str(directory),), num_processes=2)
    ranks = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]
    for way in WAYS:
        batches = [rank[way]["batches"] for rank in ranks]
        first = [len(b) // EPOCHS for b in batches]
        epoch = {i for rank, n in zip(batches, first, strict=True) for b in rank[:n] for i in b}
        assert epoch == set(range(22)), way
        delivered = [rank[way]["delivered"] for rank in ranks]
        if way == "dispatched":  # the first rank loads for all
            assert delivered == [EPOCHS * 6, 0]
        else:
            assert delivered == [len(b) for b in batches], way


def check_the_readmes_lines(directory: Path) -> None:
    made = accelerator()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    used = run_readme("Accelerate", accelerator=made, model=model, optimizer=optimizer)["loader"]
    assert len(list(used)) == 6
    assert_delivered(used, 6)


# --- last, for they leave Accelerate as it was not --------------------------------------------


def check_an_unknown_accelerate_gives_its_own_loader_and_says_so(directory: Path) -> None:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("stoker.integrations")
    log.addHandler(handler)
    integration = importlib.import_module("stoker.integrations.accelerate")
    known = accelerate.data_loader.DataLoader
    del accelerate.data_loader._PYTORCH_DATALOADER_KWARGS[integration._KEY]
    accelerate.data_loader.DataLoader = type("DataLoader", (Torch,), {})
    integration.install.cache_clear()
    try:
        prepared = accelerator().prepare(loader(stoker.DataLoader))
        assert not isinstance(prepared.base_dataloader, stoker.DataLoader)
        assert len(list(prepared)) == 6
        assert len(heard) == 1
        assert "not known" in heard[0]
    finally:
        accelerate.data_loader.DataLoader = known
        log.removeHandler(handler)
