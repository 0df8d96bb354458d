"""A memory cgroup for one contender: what its whole process tree holds, queued batches included.

PSS of a process tree misses torch's queued batches (shared memory files that nobody has mapped
yet); the kernel's own account does not. Creates a group below this process' own, and removes it.
Sets no limit.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

V1_ROOT = Path("/sys/fs/cgroup/memory")
V2_ROOT = Path("/sys/fs/cgroup")


class NoMemoryGroup(Exception):
    """A memory cgroup can't be made here; the message says why."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a group holds: its processes' anonymous memory, and shared memory (memfd, /dev/shm)."""

    anonymous_bytes: int
    shared_bytes: int

    @property
    def total_bytes(self) -> int:
        """Both together. The page cache of files is not in it: the kernel can drop that at will."""
        return self.anonymous_bytes + self.shared_bytes


class MemoryGroup:
    """A bracket: the group exists inside a `with`, and everything in it is killed at its end."""

    def __init__(self, name: str) -> None:
        parent, self._is_v1 = _own_group()
        self._path = parent / f"stoker-bench-{os.getpid()}-{name}"

    def __enter__(self) -> Self:
        try:
            self._path.mkdir()
        except OSError as error:
            raise NoMemoryGroup(f"can't create {self._path}: {error.strerror}") from error
        if not (self._path / "memory.stat").exists():
            self._path.rmdir()
            raise NoMemoryGroup(f"{self._path.parent} has no memory controller for its children")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for pid in self.pids():
                _kill(pid)
            try:
                self._path.rmdir()
                return
            except OSError:
                time.sleep(0.05)

    def command(self, arguments: list[str]) -> list[str]:
        """The same command, run inside the group from its first instruction on."""
        enter = 'echo $$ > "$0" && exec "$@"'
        return ["/bin/sh", "-c", enter, str(self._path / "cgroup.procs"), *arguments]

    def pids(self) -> list[int]:
        """The processes in the group."""
        try:
            return [int(line) for line in (self._path / "cgroup.procs").read_text().split()]
        except OSError:
            return []

    def usage(self) -> Usage:
        """The group's memory at this moment."""
        return _usage_of(self._path, self._is_v1)


def own_usage() -> Usage:
    """What the group of this process holds: in a measurement, the group that was made for it."""
    return _usage_of(*_own_group())


def private_bytes(pid: int) -> int:
    """Memory that only this process has: dirty pages of its private mappings.

    Read from smaps, not smaps_rollup: the rollup also calls a page of *shared* memory private as
    long as no second process has touched it, and would count an arena as its workers' own.
    """
    total, is_private = 0, False
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        key, _, rest = line.partition(" ")
        if not key.endswith(":"):
            is_private = rest[3] == "p"
        elif key == "Private_Dirty:" and is_private:
            total += int(rest.split()[0]) * 1024
    return total


def _own_group() -> tuple[Path, bool]:
    """The memory cgroup of this process, and whether it is version 1."""
    entries = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in entries:
        if "memory" in controllers.split(","):
            group = V1_ROOT / path.lstrip("/")
            # In a container the path is the host's; the mount shows only the container's part:
            # there our groups are right below its root.
            found = (group, V1_ROOT / group.name)
            return next((group for group in found if group.is_dir()), V1_ROOT), True
    for number, _, path in entries:
        if number == "0" and (V2_ROOT / "cgroup.controllers").exists():
            return V2_ROOT / path.lstrip("/"), False
    raise NoMemoryGroup("this system has no memory cgroup")


def _usage_of(group: Path, is_v1: bool) -> Usage:
    lines = (group / "memory.stat").read_text().splitlines()
    stat = dict(line.split(" ", 1) for line in lines)
    anonymous, shared = ("total_rss", "total_shmem") if is_v1 else ("anon", "shmem")
    return Usage(int(stat[anonymous]), int(stat[shared]))


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
