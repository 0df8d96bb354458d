"""What can be changed about a loader while it runs: a value, checked when it is made.

Does not say what is wise, and changes nothing: ``loader.apply`` does.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.errors import ConfigError
from stoker.units import parse_bytes

MAX_WORKERS = 1024
"""More workers for one loader are a slip of the finger on any machine there is."""


@dataclass(frozen=True, slots=True, init=False)
class Knobs:
    """How many workers, and how many bytes may be in flight. None leaves it as it is.

    Args:
        workers: 1 to 1024. Read from a loader, None says that it loads without workers
            (``num_workers=0``).
        in_flight_bytes: what may be reserved, filled or held by the caller at most; bytes, or
            text like ``"8GB"``. Reads back as an int.
    """

    workers: int | None
    in_flight_bytes: int | None

    def __init__(
        self, workers: int | None = None, in_flight_bytes: int | float | str | None = None
    ) -> None:
        if workers is not None and not _is_count(workers):
            raise ConfigError(
                name="workers",
                given=workers,
                accepted=f"a number from 1 to {MAX_WORKERS}, or None to leave it as it is",
            )
        nbytes = None
        if in_flight_bytes is not None:
            nbytes = parse_bytes(in_flight_bytes, name="in_flight_bytes")
        object.__setattr__(self, "workers", workers)
        object.__setattr__(self, "in_flight_bytes", nbytes)


def _is_count(workers: object) -> bool:
    if isinstance(workers, bool) or not isinstance(workers, int):
        return False
    return 1 <= workers <= MAX_WORKERS
