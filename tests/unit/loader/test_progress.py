"""Which batches count as delivered, and what a state says of them."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker import DataLoader
from stoker.loader.progress import Progress
from stoker.loader.replay import Start


def progress_of(streams: int | None = None, *, lasting: bool = True) -> Progress:
    loader: Any = DataLoader([1, 2, 3], num_workers=0)
    fits = {"kind": "map" if streams is None else "iterable", "streams": streams}
    return Progress(
        fits,
        Start(loader),
        base_seed=1,
        shared_seed=None,
        draws=("sampler",),
        persistent=True,
        lasting=lasting,
    )


@given(st.permutations(range(8)), st.integers(0, 8))
def test_prefix_and_rest_are_what_was_delivered(order: list[int], count: int) -> None:
    progress = progress_of()
    for position in order[:count]:
        progress.mark(position)
    state = progress.state()
    assert {*range(state["delivered"]), *state["beyond"]} == set(order[:count])
    assert state["delivered"] not in state["beyond"]


def test_a_batch_between_engine_and_caller_is_not_delivered_and_may_come_again() -> None:
    progress = progress_of()
    progress.mark(0)
    progress.held[7] = (1, "batch", None)
    progress.mark(1)
    assert progress.state()["delivered"] == 1
    progress.mark(1)  # the caller asks again and gets it
    del progress.held[7]
    assert progress.state()["delivered"] == 2
    assert progress.state()["delivered"] == 2


def test_a_state_is_not_changed_by_what_comes_later() -> None:
    progress = progress_of()
    progress.mark(2)
    state = progress.state()
    before = pickle.dumps(state)
    for position in (0, 1, 3):
        progress.mark(position)
    progress.state()
    assert pickle.dumps(state) == before


def test_samplers_stand_where_they_stood_after_the_last_delivered_batch() -> None:
    progress = progress_of()
    for position in range(4):
        progress.drew(position, {"sampler": position})
    assert progress.state()["sampler_states"] == {}  # as it was before the first draw
    for position in range(3):
        progress.mark(position)
        assert progress.state()["sampler_states"] == {"sampler": position}


def stand(at: int) -> bytes:
    return pickle.dumps({"dataset": at})


def test_workers_stand_where_they_stood_after_their_own_last_batch() -> None:
    progress = progress_of(streams=3)
    progress.mark(0, (0, stand(4)))
    progress.mark(1, (1, stand(5)))
    progress.mark(3, (0, stand(6)))
    state = progress.state()
    assert state["delivered"] == 3
    assert state["turn"] == 1
    assert {w: (r["batches"], r["state"]["dataset"]) for w, r in state["workers"].items()} == {
        "0": (2, 6),
        "1": (1, 5),
    }


def test_a_share_is_over_only_when_all_of_it_was_delivered() -> None:
    progress = progress_of(streams=1)
    progress.mark(0, (0, stand(1)))
    progress.ended[0] = (2, stand(9))
    assert "ended" not in progress.state()["workers"]["0"]
    progress.mark(1, (0, stand(2)))
    record = progress.state()["workers"]["0"]
    assert record["ended"]
    assert record["state"] == {"dataset": 9}


def test_workers_that_last_begin_the_next_epoch_where_they_ended() -> None:
    for lasting in (True, False):
        progress = progress_of(streams=1, lasting=lasting)
        progress.mark(0, (0, stand(1)))
        progress.ended[0] = (1, stand(9))
        progress.finish()
        loader: Any = DataLoader([1, 2, 3], num_workers=0)
        state = progress.fresh(Start(loader), {"streams": 1}, None)
        assert state["fresh"]
        assert state["epoch"] == 1
        assert [record["state"] for record in state["workers"].values()] == (
            [{"dataset": 9}] if lasting else []
        )


def test_the_same_generator_is_saved_once() -> None:
    generator = torch.Generator().manual_seed(3)
    loader: Any = DataLoader([1, 2, 3], shuffle=True, generator=generator, num_workers=0)
    saved = Start(loader).generators
    assert {"torch", "loader", "sampler.sampler"} <= set(saved)
    assert saved["loader"] is saved["sampler.sampler"]
