"""The form of a state: what is read, what is refused, and what is made of one that does not fit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import StateError
from stoker.loader.state import VERSION, LoaderState, adapt, check, differences, parse

FITS: dict[str, Any] = {
    "kind": "map",
    "samples": 100,
    "batch_size": 4,
    "drop_last": False,
    "sampler": "BatchSampler of RandomSampler",
    "streams": None,
}
STREAM = {**FITS, "kind": "iterable", "samples": None, "streams": 2}


def test_what_is_written_is_read_back() -> None:
    state = LoaderState(
        FITS, False, 3, 17, None, 9, [11], ["sampler"], {"torch": "AAA"}, {"sampler": 2}
    )
    assert parse(json.loads(json.dumps(state.as_dict()))) == state
    assert state.as_dict()["version"] == VERSION


@pytest.mark.parametrize("name", LoaderState.__slots__)
def test_a_state_with_a_part_missing_is_refused_by_its_name(name: str) -> None:
    state = LoaderState(FITS).as_dict()
    del state[name]
    with pytest.raises(StateError, match=f"'{name}' is missing"):
        parse(state)


def test_a_state_with_a_part_of_the_wrong_type_is_refused_by_its_name() -> None:
    with pytest.raises(StateError, match="'delivered' holds str"):
        parse({**LoaderState(FITS).as_dict(), "delivered": "many"})


@pytest.mark.parametrize("thing", [None, 3, [], {"delivered": 3}, {"version": "1"}])
def test_something_else_is_not_a_state(thing: Any) -> None:
    with pytest.raises(StateError, match="not a state of"):
        parse(thing)


def test_a_later_version_is_refused_before_anything_else_is_read() -> None:
    with pytest.raises(StateError, match=f"version {VERSION + 1}"):
        parse({"version": VERSION + 1})


def test_what_is_not_known_does_not_differ() -> None:
    assert differences(FITS, {**FITS, "samples": None}) == {}
    assert differences({**FITS, "samples": None}, FITS) == {}
    assert differences({}, FITS) == {}
    check(LoaderState({}), FITS)


def test_every_difference_is_named_with_both_values() -> None:
    with pytest.raises(StateError) as refused:
        check(LoaderState(FITS), {**FITS, "samples": 90, "batch_size": 8})
    assert refused.value.differences == {"samples": (100, 90), "batch_size": (4, 8)}
    for words in ("length of the dataset was 100 and is 90", "batch_size was 4 and is 8"):
        assert words in str(refused.value)
    assert str(refused.value).endswith("to go on regardless.")


def test_a_state_that_fits_is_not_changed_by_adapting() -> None:
    state = LoaderState(FITS, False, delivered=7)
    assert adapt(state, FITS) == (state, [])


@given(st.integers(0, 500), st.integers(1, 64), st.integers(1, 64))
def test_with_another_batch_size_no_sample_is_lost_and_less_than_a_batch_repeated(
    delivered: int, was: int, is_: int
) -> None:
    state = LoaderState({**FITS, "batch_size": was}, False, delivered=delivered, beyond=[])
    adapted, _ = adapt(state, {**FITS, "batch_size": is_})
    again = delivered * was - adapted.delivered * is_
    assert 0 <= again < is_


def test_other_shares_of_a_stream_start_over() -> None:
    state = LoaderState(STREAM, False, delivered=5, workers={"0": {}}, turn=1, base_seed=3)
    adapted, said = adapt(state, {**STREAM, "streams": 3})
    assert adapted.fresh
    assert (adapted.delivered, adapted.workers, adapted.turn) == (0, {}, 0)
    assert adapted.base_seed is None
    assert "starts over" in said[0]
