"""Bytes and durations as people write and read them. Nothing else lives here.

Decimal and binary units are kept apart, as the standards do: 1 GB is 10**9 bytes, 1 GiB is 2**30.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.errors import ConfigError

_SCALE: dict[str, int] = {
    "": 1,
    "b": 1,
    **{f"{letter}b": int(1000**power) for power, letter in enumerate("kmgtp", start=1)},
    **{f"{letter}ib": int(1024**power) for power, letter in enumerate("kmgtp", start=1)},
}
_ACCEPTED = 'a number of bytes of at least 0, such as 2_000_000_000, "8GB", "1.5 GB" or "512MiB"'
_TEXT = re.compile(r"\s*([0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(value: str | int | float, *, name: str = "bytes") -> int:
    """The number of bytes that `value` says, rounded down; `name` is what an error calls it."""
    if isinstance(value, str):
        match = _TEXT.fullmatch(value)
        scale = _SCALE.get(match[2].lower()) if match else None
        if match is None or scale is None:
            raise _refusal(name, value)
        digits = match[1]
        if digits.replace("_", "").isdigit():
            return int(digits) * scale  # exact, also beyond 2**53
        return _whole(float(digits) * scale, name, value)
    # bool is an int to Python, but memory=True can only be a mistake.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _refusal(name, value)
    if isinstance(value, int):
        if value < 0:
            raise _refusal(name, value)
        return value
    return _whole(value, name, value)


def format_bytes(count: int | float) -> str:
    """`count` with three significant digits in decimal units: "512 B", "1.5 GB", "-3 MB"."""
    size = abs(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or (unit == "B" and size < 1000):
            break
        size /= 1000
    else:
        unit = "PB"
    sign = "-" if count < 0 else ""
    return f"{sign}{_three_digits(size)} {unit}"


def format_duration(seconds: float) -> str:
    """`seconds` as a person says it: "11 µs", "3.2 ms", "1.5 s", "2 min 5 s", "3 h 20 min"."""
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if seconds < 59.95:
        for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
            if seconds >= 0.9995 * scale:
                return f"{_three_digits(seconds / scale)} {unit}"
        return f"{_three_digits(seconds * 1e9)} ns" if seconds else "0 s"
    whole = round(seconds)
    if whole < 3600:
        return _two_parts(whole, 60, "min", "s")
    whole = round(seconds / 60)
    if whole < 24 * 60:
        return _two_parts(whole, 60, "h", "min")
    return _two_parts(round(seconds / 3600), 24, "d", "h")


def _whole(number: float, name: str, value: object) -> int:
    if not math.isfinite(number) or number < 0 or 0 < number < 1:  # 0.4 was meant as a share
        raise _refusal(name, value)
    return int(number)


def _three_digits(size: float) -> str:
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    text = f"{size:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _two_parts(count: int, per: int, large: str, small: str) -> str:
    whole, rest = divmod(count, per)
    return f"{whole} {large} {rest} {small}" if rest else f"{whole} {large}"


def _refusal(name: str, value: object) -> ConfigError:
    # Imported here because errors.py formats bytes: the two are one layer.
    from stoker.errors import ConfigError

    return ConfigError(name=name, given=value, accepted=_ACCEPTED)
