"""A message arrives whole or not at all, and no descriptor is left behind on either side."""

from __future__ import annotations

import os
import pickle
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.loader import wire
from stoker.loader.wire import INLINE_BYTES, Kind

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = wire.pair()
    yield ours, theirs
    ours.close()
    theirs.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Refuses:
    """Can be sent, but not received."""

    def __init__(self, padding: bytes = b"") -> None:
        self.padding = padding

    def __reduce__(self) -> tuple[object, ...]:
        return _refuse, (self.padding,)


def _refuse(padding: bytes) -> None:
    raise LookupError("no such class here")


def test_messages_arrive_in_order_with_their_kind(ends: Ends) -> None:
    ours, theirs = ends
    wire.send(ours, Kind.TASK, 1, [5, 6])
    wire.send(ours, Kind.EXIT)
    message, fds = wire.receive(theirs)
    assert message == (Kind.TASK, 1, [5, 6])
    assert fds == []
    assert wire.receive(theirs)[0] == (Kind.EXIT,)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(size=st.integers(0, 3 * INLINE_BYTES) | st.integers(INLINE_BYTES - 64, INLINE_BYTES + 64))
def test_a_body_of_any_size_arrives(ends: Ends, size: int) -> None:
    ours, theirs = ends
    body = os.urandom(1) * size
    before = descriptors()
    wire.send(ours, Kind.TASK, body)
    assert wire.receive(theirs) == ((Kind.TASK, body), [])
    assert descriptors() == before


def test_a_body_of_many_megabytes_does_not_wait_for_the_reader(ends: Ends) -> None:
    ours, theirs = ends
    bodies = [bytes([n]) * (8 << 20) for n in range(8)]
    for body in bodies:
        wire.send(ours, Kind.TASK, body)
    assert [wire.receive(theirs)[0][1] for _ in bodies] == bodies


@pytest.mark.parametrize("size", [0, 2 * INLINE_BYTES], ids=["inline", "bulk"])
def test_descriptors_travel_beside_a_body_of_any_size(
    ends: Ends, size: int, tmp_path: Path
) -> None:
    ours, theirs = ends
    path = tmp_path / "file"
    path.write_bytes(b"text")
    with path.open("rb") as file:
        wire.send(ours, Kind.ARENA, b"x" * size, fds=(file.fileno(), file.fileno()))
        message, fds = wire.receive(theirs)
        assert len(message[1]) == size
        assert len(fds) == 2
        for fd in fds:
            assert os.fstat(fd).st_ino == os.fstat(file.fileno()).st_ino
            assert not os.get_inheritable(fd)
            os.close(fd)


@pytest.mark.parametrize("size", [0, 2 * INLINE_BYTES], ids=["inline", "bulk"])
def test_a_message_that_can_not_be_read_leaves_no_descriptor(ends: Ends, size: int) -> None:
    ours, theirs = ends
    before = descriptors()
    wire.send(ours, Kind.BROKEN, Refuses(b"x" * size), fds=(ours.fileno(),))
    with pytest.raises(LookupError):
        wire.receive(theirs)
    assert descriptors() == before


@pytest.mark.parametrize("room_for", [0, 1])
def test_a_body_that_finds_no_descriptor_is_an_error_that_says_so(
    ends: Ends, room_for: int
) -> None:
    ours, theirs = ends
    wire.send(ours, Kind.TASK, b"x" * 2 * INLINE_BYTES, fds=(ours.fileno(),))
    before = descriptors()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.dup(0)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 1 + room_for, limits[1]))
        with pytest.raises(wire.Lost, match="descriptors"):
            wire.receive(theirs)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(taken[0])
    assert descriptors() == before


def test_the_end_of_the_peer_is_the_end_of_the_messages(ends: Ends) -> None:
    ours, theirs = ends
    wire.send(ours, Kind.EXIT)
    ours.close()
    assert wire.receive(theirs)[0] == (Kind.EXIT,)
    with pytest.raises(EOFError):
        wire.receive(theirs)


def test_sending_to_a_peer_that_is_gone_leaves_no_descriptor(ends: Ends) -> None:
    ours, theirs = ends
    theirs.close()
    before = descriptors()
    with pytest.raises(BrokenPipeError):
        wire.send(ours, Kind.TASK, b"x" * 2 * INLINE_BYTES)
    assert descriptors() == before


def test_a_full_socket_takes_nothing_rather_than_half_a_message(ends: Ends) -> None:
    ours, theirs = ends
    ours.setblocking(False)
    sent = 0
    try:
        while True:
            wire.send(ours, Kind.TASK, sent, b"x" * 50_000)
            sent += 1
    except BlockingIOError:
        pass
    assert sent > 1
    for n in range(sent):
        assert wire.receive(theirs)[0][1] == n
    with pytest.raises(BlockingIOError):
        wire.receive(theirs, socket.MSG_DONTWAIT)


def test_taking_a_message_back_does_not_make_the_peer_non_blocking(ends: Ends) -> None:
    """The worker's end is the same open file as the one that the trainer recalls through."""
    ours, theirs = ends
    with socket.socket(fileno=os.dup(theirs.fileno())) as workers_end:
        wire.send(ours, Kind.TASK, 7)
        assert wire.receive(theirs, socket.MSG_DONTWAIT)[0] == (Kind.TASK, 7)
        with pytest.raises(BlockingIOError):
            wire.receive(theirs, socket.MSG_DONTWAIT)
        assert os.get_blocking(workers_end.fileno())


def test_what_is_packed_once_can_be_sent_later(ends: Ends) -> None:
    ours, theirs = ends
    for size in (10, 2 * INLINE_BYTES):
        body, bulk = wire.pack(Kind.TASK, b"x" * size)
        assert (bulk is None) == (size == 10)
        wire.send_packed(ours, body, [] if bulk is None else [bulk])
        if bulk is not None:
            os.close(bulk)
        assert wire.receive(theirs)[0] == (Kind.TASK, b"x" * size)


def test_no_message_is_mistaken_for_the_mark_of_a_large_one() -> None:
    for kind in Kind:
        assert wire.pack(kind)[0] != b"\0"
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(b"\0")
