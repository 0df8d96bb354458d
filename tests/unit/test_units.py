"""Bytes and durations, as people write and read them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker.units import format_bytes, format_duration, parse_bytes


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("8GB", 8 * 10**9),
        ("8 gb", 8 * 10**9),
        (" 512MiB ", 512 * 2**20),
        ("1.5 GB", 1_500_000_000),
        ("1.5GiB", 3 * 2**29),
        ("1kb", 1000),
        ("1KiB", 1024),
        ("2TB", 2 * 10**12),
        ("100b", 100),
        ("1024", 1024),
        ("2_000", 2000),
        ("1e3", 1000),
        ("0", 0),
        (1024, 1024),
        (0, 0),
        (1.5e9, 1_500_000_000),
        (1.9, 1),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_what_is_accepted(value: str | float, expected: int) -> None:
    parsed = parse_bytes(value)
    assert parsed == expected
    assert type(parsed) is int


@pytest.mark.parametrize(
    "value",
    [
        *("", "GB", "8 XB", "8G", "40%", "-1", "-8GB", "1.2.3GB", "8GB 2"),
        *("nan", "inf", "0x10", "1e999"),
        *(-1, -0.5, math.nan, math.inf, True, None, [1], b"8GB"),
    ],
)
def test_nonsense_is_refused_with_what_is_accepted(value: object) -> None:
    with pytest.raises(ConfigError, match="512MiB") as caught:
        parse_bytes(value, name="memory")  # type: ignore[arg-type]
    assert caught.value.name == "memory"
    assert caught.value.given == repr(value)
    assert str(caught.value).startswith(f"memory={value!r} is not acceptable")


@given(st.integers(0, 2**70))
def test_a_whole_number_is_itself_as_number_and_as_text(count: int) -> None:
    assert parse_bytes(count) == parse_bytes(str(count)) == parse_bytes(f"{count} B") == count


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1_500_000_000, "1.5 GB"),
        (61_440_000_000, "61.4 GB"),
        (999_600, "1 MB"),
        (31.3e12, "31.3 TB"),
        (10**18, "1000 PB"),
        (-3_000_000, "-3 MB"),
    ],
)
def test_format_bytes(count: float, expected: str) -> None:
    assert format_bytes(count) == expected


@given(st.integers(0, 10**17))
def test_what_is_printed_can_be_given_back_and_is_close(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.0051)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 s"),
        (2e-9, "2 ns"),
        (11e-6, "11 µs"),
        (0.0032, "3.2 ms"),
        (0.99999, "1 s"),
        (1.5, "1.5 s"),
        (59.99, "1 min"),
        (125, "2 min 5 s"),
        (3599.9, "1 h"),
        (12_000, "3 h 20 min"),
        (90_000, "1 d 1 h"),
        (-1.5, "-1.5 s"),
    ],
)
def test_format_duration(seconds: float, expected: str) -> None:
    assert format_duration(seconds) == expected
