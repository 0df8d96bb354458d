"""Knobs are a checked value: nonsense is refused when they are made."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

import stoker
from stoker.errors import ConfigError
from stoker.plan import Knobs
from stoker.plan.knobs import MAX_WORKERS


def test_what_is_left_out_is_left_as_it_is() -> None:
    assert Knobs() == Knobs(workers=None, in_flight_bytes=None)


@pytest.mark.parametrize(
    ("given", "read"), [(0, 0), (5, 5), ("8GB", 8 * 10**9), ("1.5 MiB", 3 << 19), (None, None)]
)
def test_bytes_may_be_text_and_read_back_as_a_number(given: Any, read: int | None) -> None:
    assert Knobs(in_flight_bytes=given).in_flight_bytes == read


@pytest.mark.parametrize("workers", [0, -1, MAX_WORKERS + 1, 2.0, True, "2"])
def test_a_number_of_workers_that_makes_no_sense_is_refused(workers: Any) -> None:
    with pytest.raises(ConfigError, match=r"workers=.* give a number from 1 to 1024"):
        Knobs(workers=workers)


@pytest.mark.parametrize("nbytes", [-1, "many", True, float("nan"), "-3GB", [1]])
def test_bytes_that_make_no_sense_are_refused(nbytes: Any) -> None:
    with pytest.raises(ConfigError, match="in_flight_bytes="):
        Knobs(in_flight_bytes=nbytes)


def test_they_are_a_value() -> None:
    knobs = Knobs(3, "1kB")
    with pytest.raises(dataclasses.FrozenInstanceError):
        knobs.workers = 4  # type: ignore[misc]
    assert dataclasses.replace(knobs, workers=4) == Knobs(4, 1000)
    assert pickle.loads(pickle.dumps(knobs)) == knobs
    assert len({knobs, Knobs(3, 1000)}) == 1
    assert not hasattr(knobs, "__dict__")
    assert stoker.Knobs is Knobs
