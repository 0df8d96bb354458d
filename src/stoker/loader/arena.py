"""One shared memory region per loader, and the leases under the batches a caller holds.

The region is a memfd: it has no name (nothing to leak, nothing for others to open), does not
count against /dev/shm, and takes one descriptor however many tensors travel through it. Pages
are touched only when used and recycled batch after batch. More is mapped than may be used at first,
since addresses cost nothing and the bound may be raised later. This module maps memory and notices
when the caller lets go; it does not decide who gets which bytes (see ``dispatch``).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import select
import sys
import tempfile
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.loader.extents import Extent, page_ceil, page_floor

Bytes = npt.NDArray[np.uint8]

_BYTE = np.dtype(np.uint8)
_MADV_REMOVE: int | None = getattr(mmap, "MADV_REMOVE", None)

_MAP_FAILED = ctypes.c_void_p(-1).value


def _find_libc() -> Any:
    """The C library; None on Windows, where this module can be imported but maps nothing."""
    if sys.platform == "win32":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
    )
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


_libc = _find_libc()
_munmap = None if _libc is None else _libc.munmap


def memory_file(name: str, nbytes: int) -> int:
    """Descriptor of anonymous shared memory; an unlinked temporary file where there is no memfd."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
    else:  # pragma: no cover - other platforms
        fd, path = tempfile.mkstemp(prefix="stoker-")
        os.unlink(path)
    try:
        os.ftruncate(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


class Region:
    """A shared, writable mapping of a memory file; unmapped with the last array over it.

    Not Python's ``mmap``: before 3.13 that keeps a descriptor open for as long as it lives, so
    a caller who keeps a thousand batches in memory of their own would run out of descriptors.
    """

    __slots__ = ("__array_interface__", "__weakref__", "_address", "_nbytes")

    def __init__(self, fd: int, nbytes: int) -> None:
        self._address: int | None = None
        self._nbytes = nbytes
        if _libc is None:
            raise OSError(errno.ENOSYS, "this platform has no mmap(2): use num_workers=0")
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(None, nbytes, protection, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, f"could not map {nbytes} bytes: {os.strerror(code)}")
        self._address = address
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (nbytes,),
            "data": (address, False),
        }

    def remove(self, start: int, nbytes: int) -> None:
        """Give whole pages back to the system. Best effort: else they go with the region."""
        if _MADV_REMOVE is not None and nbytes > 0 and self._address is not None:
            _libc.madvise(self._address + start, nbytes, _MADV_REMOVE)

    # Bound here, as module globals are gone by the time the interpreter ends.
    def __del__(self, munmap: Any = _munmap) -> None:
        if self._address is not None:
            munmap(self._address, self._nbytes)
            self._address = None


def map_memory(fd: int, nbytes: int) -> tuple[Region, Bytes]:
    """Map a memory file, shared and writable, as bytes. The descriptor may be closed."""
    region = Region(fd, nbytes)
    return region, np.asarray(region)


class Lease(np.ndarray[Any, np.dtype[np.uint8]]):
    """The view of an extent that a batch's tensors hang on; its end is the end of the lease.

    Always over a ``_Whole``: a view's ``.base`` is not its parent but whatever numpy finds
    behind it that has the view's own type. A plain view of a lease over a plain array would
    hold that array and let the lease end.
    """


class _Whole(np.ndarray[Any, np.dtype[np.uint8]]):
    """What leases are views of; of a type of its own, so that numpy looks no further."""


class _Watch(weakref.ref[Lease]):
    """Notices the end of a lease. A bare reference: ``weakref.finalize`` costs 3 us, this 0.5."""

    __slots__ = ("ledger", "size", "start")

    ledger: _Ledger
    start: int
    """Where the extent begins; -1 for memory outside the arena."""
    size: int


_watches: dict[int, _Watch] = {}
"""Keeps every watch (by its id) until somebody has seen that its lease is over."""


def _over_after_close(watch: _Watch) -> None:
    """Of an arena that is closed: nobody asks any more, so the pages are given back right here.

    Runs on any thread, at any moment. A Ctrl-C that lands here is swallowed by Python; then the
    pages go with the next lease that ends, or with the region.
    """
    ledger = watch.ledger
    ledger.ended.append(watch)
    if ledger.owner == os.getpid():  # a forked child's copy says nothing about the owner's
        ledger.settle()


class _Fence:
    """A fork of this process while batches were leased: the child may still read them.

    The child inherits the writing end of a pipe (and so do its own children); end-of-file on
    the reading end means that all of them are gone or have exec'ed something else.
    """

    _read = -1

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def after_in_parent(self) -> None:
        os.close(self._write)

    def after_in_child(self) -> None:
        os.close(self._read)  # the writing end stays open: it is what the parent waits for
        self._read = -1

    def over(self) -> bool:
        if self._read >= 0:
            poll = select.poll()
            poll.register(self._read, select.POLLIN)
            if poll.poll(0):
                os.close(self._read)
                self._read = -1
        return self._read < 0

    def __del__(self, close: Any = os.close) -> None:
        if self._read >= 0:
            close(self._read)


class _Unending(_Fence):
    """No descriptor was left to learn when the child is gone: never recycle what it may read."""

    def __init__(self) -> None:
        pass

    def over(self) -> bool:
        return False


class _Ledger:
    """What is leased of one region. Outlives the arena while the caller holds batches.

    ``ended`` is filled by whoever drops the last reference to a batch, on any thread; all else
    belongs to the consumer's thread until the arena is closed. It is filled by ``deque.append``
    itself: in a callback written in Python a Ctrl-C could land, which Python swallows there, and
    the extent would be taken for good.
    """

    __slots__ = ("__weakref__", "active", "closed", "end", "ended", "fences", "owner", "region")

    def __init__(self, region: Region) -> None:
        self.region = region
        self.owner = os.getpid()
        self.closed = False
        self.active: dict[int, int] = {}  # start -> size
        self.ended: deque[_Watch] = deque()
        self.end = self.ended.append
        self.fences: list[tuple[_Fence, frozenset[int]]] = []
        _ledgers[id(self)] = self

    def drop_fences(self) -> None:
        """Forget the children that are gone, and with them a descriptor each."""
        self.fences = [pair for pair in self.fences if not pair[0].over()]

    def fenced(self, start: int) -> bool:
        """May a child still read the extent?"""
        return any(start in held for _, held in self.fences)

    def settle(self) -> None:
        """After the end of the arena: give back the pages of leases that are over."""
        self.drop_fences()
        for _ in range(len(self.ended)):
            try:
                watch = self.ended.popleft()
            except IndexError:
                return  # another thread settles too
            _watches.pop(id(watch), None)
            if watch.start < 0:
                continue
            if self.fenced(watch.start):
                self.ended.append(watch)  # they go with the next lease, or with the region
            elif self.active.pop(watch.start, None) is not None:
                self.region.remove(watch.start, watch.size)


_ledgers: weakref.WeakValueDictionary[int, _Ledger] = weakref.WeakValueDictionary()
_forking: dict[int, _Fence] = {}
"""By thread: two threads may fork at once, and each must close its own pipe only."""


def _before_fork() -> None:
    owner = os.getpid()
    holders = []
    for reference in _ledgers.valuerefs():  # a copy: other threads make loaders meanwhile
        ledger = reference()
        if ledger is not None and ledger.active and ledger.owner == owner:
            ledger.drop_fences()
            holders.append(ledger)
    if not holders:
        return
    try:
        fence = _forking[threading.get_ident()] = _Fence()
    except OSError:
        fence = _Unending()
    for ledger in holders:
        ledger.fences.append((fence, frozenset(ledger.active)))


def _after_fork_in_parent() -> None:
    fence = _forking.pop(threading.get_ident(), None)
    if fence is not None:
        fence.after_in_parent()


def _after_fork_in_child() -> None:
    fence = _forking.pop(threading.get_ident(), None)
    if fence is not None:
        fence.after_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )


class Arena:
    """The owner's side of the region. ``nbytes`` is the bound, ``region_bytes`` what is mapped."""

    def __init__(self, nbytes: int, most_bytes: int = 0) -> None:
        """Up to ``most_bytes`` the bound may be raised later, where so much can be mapped."""
        self.nbytes = page_ceil(max(nbytes, 1))
        self.region_bytes = self.nbytes
        region = None
        if most_bytes > nbytes and not _addresses_are_limited():
            try:
                region = self._map(page_ceil(most_bytes))
            except OSError:
                pass  # then the bound can't be raised
        if region is None:
            region = self._map(self.nbytes)
        self._whole = self._bytes.view(_Whole)
        self._ledger = _Ledger(region)
        self.overdraft_bytes = 0

    def _map(self, nbytes: int) -> Region:
        fd = memory_file("stoker-arena", nbytes)
        try:
            region, self._bytes = map_memory(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        self.fd = fd
        self.region_bytes = nbytes
        return region

    def resize(self, nbytes: int) -> int:
        """Change the bound, to what is mapped at most; says what it is now."""
        self.nbytes = min(page_floor(max(nbytes, 0)), self.region_bytes)
        return self.nbytes

    def view(self, extent: Extent, nbytes: int) -> Bytes:
        """Bytes of an extent, without a lease."""
        return self._bytes[extent.start : extent.start + nbytes]

    def all_bytes(self) -> Bytes:
        """The whole region, for workers in this process."""
        return self._bytes

    def private_copy(self, extent: Extent, nbytes: int) -> Lease:
        """A copy of an extent in the trainer's own memory."""
        return self.view(extent, nbytes).copy().view(Lease)

    def lease(self, extent: Extent, nbytes: int) -> Lease:
        """The first ``nbytes`` of an extent; ``ended()`` reports it once the caller let go."""
        start, size = extent
        lease = Lease((nbytes,), _BYTE, self._whole, start)
        self._ledger.active[start] = size
        self._watch(lease, start, size)
        return lease

    def adopt(self, fd: int, nbytes: int) -> Lease:
        """Memory that a worker brought itself (overdraft), mapped; the descriptor is closed."""
        try:
            _, own = map_memory(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)
        return self.adopt_memory(own, nbytes)

    def adopt_memory(self, own: Bytes, nbytes: int) -> Lease:
        """The same, for memory that is mapped already."""
        lease = Lease((nbytes,), _BYTE, own.view(_Whole))
        self.overdraft_bytes += own.size
        self._watch(lease, -1, own.size)
        return lease

    def _watch(self, lease: Lease, start: int, size: int) -> None:
        watch = _Watch(lease, self._ledger.end)
        watch.ledger = self._ledger
        watch.start = start
        watch.size = size
        _watches[id(watch)] = watch

    def ended(self) -> list[int]:
        """Starts of the extents whose leases are over since the last call."""
        ledger = self._ledger
        starts: list[int] = []
        if not ledger.ended or ledger.owner != os.getpid():
            return starts  # a forked child's copy says nothing about the owner's
        if ledger.fences:
            ledger.drop_fences()
        for _ in range(len(ledger.ended)):
            watch = ledger.ended.popleft()
            _watches.pop(id(watch), None)
            start = watch.start
            if start < 0:
                self.overdraft_bytes -= watch.size
            elif ledger.fences and ledger.fenced(start):
                ledger.ended.append(watch)
            else:
                del ledger.active[start]
                starts.append(start)
        return starts

    def give_back(self, extents: list[Extent]) -> None:
        """Return the pages of free extents to the system."""
        for extent in extents:
            self._ledger.region.remove(extent.start, extent.size)

    def close(self) -> None:
        """Give back all that is not leased; what the caller still holds goes when he lets go.

        Pages are removed, not only unmapped: a process forked since then has them mapped too.
        """
        ledger = self._ledger
        if ledger.closed or ledger.owner != os.getpid():
            return
        ledger.closed = True
        os.close(self.fd)
        _watch_on(ledger)
        at = 0
        for start, size in sorted(ledger.active.items()):
            ledger.region.remove(at, start - at)
            at = start + size
        ledger.region.remove(at, self.region_bytes - at)
        ledger.settle()
        del self._bytes, self._whole


def _watch_on(ledger: _Ledger) -> None:
    """Leases that outlive their arena give back their pages themselves."""
    for watch in [watch for watch in list(_watches.values()) if watch.ledger is ledger]:
        lease = watch()
        if lease is not None:  # else it is noted as ended
            later = _Watch(lease, _over_after_close)
            later.ledger = ledger
            later.start = watch.start
            later.size = watch.size
            _watches[id(later)] = later
            _watches.pop(id(watch), None)


def _addresses_are_limited() -> bool:
    """RLIMIT_AS: what we map for later is then missing elsewhere, in every worker too."""
    try:
        import resource
    except ImportError:  # not Unix
        return False
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
