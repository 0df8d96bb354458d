"""Keeps the most recent spans in memory, bounded. Does not write files or sample the system.

One thread adds (the one that iterates), any thread may read meanwhile; nobody waits for anybody.
"""

from __future__ import annotations

from struct import Struct
from typing import get_args

from stoker.timeline.span import Kind, Span

RECENT = 2048
"""Records that are kept: two a batch, so the last thousand batches, in 130 kB."""

_RECORD = Struct("8q")  # serial number from 1 on, kinds, lane, step, start, middle, end, bytes
_pack, _STRIDE = _RECORD.pack_into, _RECORD.size
_SINGLE: tuple[tuple[Kind, ...], ...] = tuple((kind,) for kind in get_args(Kind))
_KINDS: tuple[tuple[Kind, ...], ...] = (*_SINGLE, ("wait", "deliver"), ("fetch", "collate"))
_CODES = {kinds: code for code, kinds in enumerate(_KINDS)}
_DELIVERY, _LOADING = _CODES["wait", "deliver"], _CODES["fetch", "collate"]


class Ring:
    """The last spans, as numbers in one preallocated buffer.

    As Python objects, thousands of them would be kept, and the garbage collector would go through
    all that torch has loaded once more for their sake: 130 ms, seen with a deque of tuples.
    """

    __slots__ = ("_buffer", "_count", "_lanes", "_size")

    def __init__(self, size: int = RECENT) -> None:
        self._size = size
        self._buffer = bytearray(size * _STRIDE)
        self._count = 0
        self._lanes: dict[str, int] = {}

    def add(
        self,
        kind: Kind,
        lane: str,
        step: int,
        start_ns: int,
        end_ns: int,
        bytes: int = 0,  # noqa: A002 - named as the field of Span is
    ) -> None:
        """Note a span; the oldest one makes room for it."""
        self._add(_CODES[(kind,)], lane, step, start_ns, end_ns, end_ns, bytes)

    def add_delivery(
        self, lane: str, step: int, asked_ns: int, found_ns: int, end_ns: int, nbytes: int
    ) -> None:
        """Note a wait and the delivery after it (in one record: this is done for every batch)."""
        self._add(_DELIVERY, lane, step, asked_ns, found_ns, end_ns, nbytes)

    def add_loading(
        self, lane: str, step: int, began_ns: int, fetched_ns: int, end_ns: int, nbytes: int
    ) -> None:
        """Note what a worker did for a batch: fetch, then collate."""
        self._add(_LOADING, lane, step, began_ns, fetched_ns, end_ns, nbytes)

    def _add(
        self, code: int, lane: str, step: int, start: int, middle: int, end: int, nbytes: int
    ) -> None:
        count = self._count
        lanes = self._lanes
        if lane not in lanes:
            lanes[lane] = len(lanes)
        at = count % self._size * _STRIDE
        count += 1
        _pack(self._buffer, at, count, code, lanes[lane], step, start, middle, end, nbytes)
        self._count = count

    def spans(self, since_ns: int = 0) -> list[Span]:
        """Those that ended at ``since_ns`` or later, in the order in which they became known."""
        # Copied in one step: no record is half of one, and each carries its number. Lanes come
        # after, since a lane has its code before a record has it.
        records = sorted(_RECORD.iter_unpack(self._buffer[:]))
        lanes = list(self._lanes)
        found = []
        for serial, code, lane, step, start, middle, end, nbytes in records:
            if not serial:
                continue  # not yet used
            kinds = _KINDS[code]
            found.append(Span(kinds[0], lanes[lane], step, start, middle, nbytes))
            if len(kinds) == 2:
                found.append(Span(kinds[1], lanes[lane], step, middle, end, nbytes))
        return [span for span in found if span.end_ns >= since_ns]
