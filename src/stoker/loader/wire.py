"""Messages between trainer, zygote and workers: one datagram each, never half of one.

Sequenced-packet sockets keep message boundaries, so a peer that is stopped or killed can't
leave half a frame behind for the other side to hang on. Bodies beyond ``INLINE_BYTES`` travel as
memory with a descriptor; datagrams stay small, so that nobody blocks for lack of buffer space.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import pickle
import socket
from enum import IntEnum
from typing import Any

from stoker.loader.arena import memory_file

INLINE_BYTES = 60_000
_SEND_BUFFER = 4 << 20
_DATAGRAM = 65_536
_IN_MEMORY = b"\0"
_ANCILLARY = socket.CMSG_SPACE(4 * 8) if hasattr(socket, "CMSG_SPACE") else 0  # Windows
# A plain number: combining flags of the enum's type takes 3 us.
_CLOEXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
DONT_WAIT = int(getattr(socket, "MSG_DONTWAIT", 0))


class Kind(IntEnum):
    """First item of every message."""

    # trainer -> worker
    TASK = 1  # seq, extent start (-1: own memory), size, epoch, position, payload
    GRANT = 2  # seq, extent start, size
    EPOCH = 3  # shared seed: start over (persistent workers)
    EXIT = 4
    PART = 5  # number, extent start, size, epoch, position, batch, its rows, first, indices, layout
    # worker -> trainer
    READY = 10
    DONE = 11  # seq, the values of a Report
    NEED = 12  # seq, bytes
    SIZED = 13  # bytes a batch will take, private bytes
    END = 14  # seq, stand: this worker's share of an iterable dataset is over
    PART_DONE = 15  # number, the values of a PartReport
    # trainer -> zygote
    ARENA = 20  # bytes, + descriptor
    SPAWN = 21  # worker id, + descriptor of its socket
    # zygote -> trainer
    UP = 30  # is ready to fork
    TAINTED = 31  # unpickling the dataset left threads or sockets behind
    BROKEN = 32  # exception: the dataset could not be unpickled
    SPAWNED = 33  # worker id, pid, + pidfd where there is one
    EXITED = 34  # worker id, pid, status
    SPAWN_FAILED = 35  # worker id, text


class Lost(OSError):
    """The body of a message did not arrive: this process may open no more descriptors."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    return ends


def pack(*message: Any) -> tuple[bytes, int | None]:
    """Bytes to send, and a descriptor to send along (then close) if the body is large."""
    if type(message[0]) is not int:
        # As a plain number: naming the enum takes 3 us of a message that takes 2.
        message = (int(message[0]), *message[1:])
    body = pickle.dumps(message, 5)
    if len(body) <= INLINE_BYTES:
        return body, None
    return b"", _to_memory(body)


def send_packed(sock: socket.socket, body: bytes, fds: list[int]) -> None:
    """Send one datagram; raises BlockingIOError if the socket is non-blocking and full."""
    if fds:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        # One byte tells "body in memory" from "end of file", which is an empty datagram.
        sock.sendmsg([body or _IN_MEMORY], ancillary)
    else:
        sock.send(body)


def send(sock: socket.socket, *message: Any, fds: tuple[int, ...] = ()) -> None:
    """Pack and send. Descriptors in ``fds`` stay open on this side."""
    body, bulk = pack(*message)
    try:
        send_packed(sock, body, [*fds, bulk] if bulk is not None else list(fds))
    finally:
        if bulk is not None:
            os.close(bulk)


def receive(sock: socket.socket, flags: int = 0) -> tuple[tuple[Any, ...], list[int]]:
    """One message and the descriptors that came with it. EOFError when the peer is gone."""
    data, ancillary, came_with, _ = sock.recvmsg(_DATAGRAM, _ANCILLARY, _CLOEXEC | flags)
    if not ancillary:
        if not data:
            raise EOFError("peer closed the connection")
        if data != _IN_MEMORY:
            return pickle.loads(data), []
    fds = _descriptors(ancillary)
    if data == _IN_MEMORY and (not fds or came_with & socket.MSG_CTRUNC):
        for fd in fds:
            os.close(fd)
        raise Lost(errno.EMFILE, "a message was lost for lack of descriptors")
    try:
        if data == _IN_MEMORY:
            data = _from_memory(fds.pop())
        return pickle.loads(data), fds
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) // fds.itemsize * fds.itemsize])
    return fds.tolist()


# Written and read, not mapped: faulting in fresh pages one by one takes twice as long.


def _to_memory(body: bytes) -> int:
    fd = memory_file("stoker-message", 0)
    try:
        rest = memoryview(body)
        while rest:
            rest = rest[os.write(fd, rest) :]
    except BaseException:
        os.close(fd)
        raise
    return fd


def _from_memory(fd: int) -> bytes:
    """All of the file, whose offset stands where the writer left it. Closes the descriptor."""
    try:
        size = os.fstat(fd).st_size
        body = os.pread(fd, size, 0)
        while len(body) < size:  # one call reads 2 GiB at most
            body += os.pread(fd, size - len(body), len(body))
        return body
    finally:
        os.close(fd)
