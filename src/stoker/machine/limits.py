"""How many CPUs and how much memory this process may use.

Looks at the host, at the affinity mask and at every level of the control groups, and gives the
number that binds, with where it came from. Does not predict, reserve or enforce anything, and
measures no process: it says what may be used, not who uses it.

`memory.low` and `memory.min` are protections, not ceilings, and are not read. `memory.high` is read
as a limit: above it the kernel does not kill but throttles, and a throttled run is what we are to
prevent.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.machine.cgroup import ROOT, Hierarchy, hierarchies

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

# v1 writes "no limit" as the largest multiple of the page size in a signed 64-bit integer (on old
# kernels in an unsigned one). No real limit is near it: this is an exbibyte.
_UNLIMITED_FROM = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """How much memory there may be and how much of it is left.

    `source` is where `limit_bytes` came from: "host", or the path of the file that says so.
    """

    limit_bytes: int
    available_bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """One level of a memory hierarchy that has a limit."""

    limit_bytes: int
    used_bytes: int
    reclaimable_bytes: int
    source: str

    @property
    def available_bytes(self) -> int:
        """What is left; page cache that nobody used lately counts as free, the kernel drops it."""
        held = max(0, self.used_bytes - self.reclaimable_bytes)
        return max(0, self.limit_bytes - held)


def usable_cpus(root: Path = ROOT) -> int:
    """How many CPUs this process can keep busy: the affinity mask and every quota, at least 1.

    A quota of 2.5 CPUs counts as 2: a third busy worker would be throttled for half of the time.
    """
    try:
        affinity = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS and Windows have no mask that one can ask for
        affinity = os.cpu_count() or 1
    quotas = [
        quota
        for hierarchy in hierarchies("cpu", root)
        for level in hierarchy.levels
        if (quota := _cpu_quota(hierarchy.version, level)) is not None
    ]
    return max(1, int(min([affinity, *quotas])))


def memory_room(root: Path = ROOT) -> MemoryRoom:
    """The binding limit, and what is left under all of them together."""
    return bind(_host_memory(root), _limited_groups(hierarchies("memory", root)))


def bind(host: MemoryRoom, groups: Iterable[GroupMemory]) -> MemoryRoom:
    """The smallest limit with its source, and the smallest remainder, which may be another's."""
    limit, available, source = host.limit_bytes, host.available_bytes, host.source
    for group in groups:
        if group.limit_bytes < limit:
            limit, source = group.limit_bytes, group.source
        available = min(available, group.available_bytes)
    return MemoryRoom(limit, min(limit, available), source)


def oom_kills(root: Path = ROOT) -> int | None:
    """How many processes of our group the kernel has killed for memory; None if it can't say."""
    for hierarchy in hierarchies("memory", root):
        name = "memory.events" if hierarchy.version == 2 else "memory.oom_control"
        kills = parse_counters(_read(hierarchy.levels[0] / name)).get("oom_kill")
        if kills is not None:
            return kills
    return None


def local_world_size(environ: Mapping[str, str] | None = None) -> int:
    """How many training processes share this machine, as torchrun says; 1 if nobody does."""
    said = (os.environ if environ is None else environ).get("LOCAL_WORLD_SIZE", "")
    number = _number(said)
    return max(1, number) if number is not None else 1


def default_workers(cpus: int, gpus: int = 0) -> int:
    """Where nothing was measured: 4 a GPU, 8 without one, at most half the cores and 16.

    `gpus` is the number that the one process feeds: under torchrun that is 1.
    """
    return max(1, min(4 * gpus or 8, cpus // 2, 16))


def parse_cpu_max(text: str) -> float | None:
    """v2's cpu.max ("max 100000", "150000 100000") as a number of CPUs; None is no quota."""
    words = text.split()
    if len(words) != 2:
        return None
    return _quota(_number(words[0]), _number(words[1]))


def parse_counters(text: str) -> dict[str, int]:
    """A file of "name number" lines, such as memory.stat."""
    counters = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        number = _number(value)
        if number is not None:
            counters[name] = number
    return counters


def parse_limit(text: str) -> int | None:
    """A memory limit in bytes; None where there is none ("max", or v1's largest number)."""
    number = _number(text)
    return number if number is not None and 0 <= number < _UNLIMITED_FROM else None


def _limited_groups(found: Iterable[Hierarchy]) -> list[GroupMemory]:
    return [
        group
        for hierarchy in found
        for level in hierarchy.levels
        for group in _limits_of(hierarchy.version, level)
    ]


def _limits_of(version: int, level: Path) -> list[GroupMemory]:
    limits = ["memory.max", "memory.high"] if version == 2 else ["memory.limit_in_bytes"]
    usage = "memory.current" if version == 2 else "memory.usage_in_bytes"
    known = {level / name: parse_limit(_read(level / name)) for name in limits}
    bounds = {path: limit for path, limit in known.items() if limit is not None}
    if not bounds:
        return []  # memory.stat is not cheap to make: only where something is limited
    used = _number(_read(level / usage)) or 0
    stat = parse_counters(_read(level / "memory.stat"))
    # v1 counts the group alone under the plain name and the groups below it under total_; its usage
    # and limit are for all of them.
    idle = stat.get("inactive_file" if version == 2 else "total_inactive_file", 0)
    return [GroupMemory(limit, used, idle, str(path)) for path, limit in bounds.items()]


def _cpu_quota(version: int, level: Path) -> float | None:
    if version == 2:
        return parse_cpu_max(_read(level / "cpu.max"))
    return _quota(
        _number(_read(level / "cpu.cfs_quota_us")), _number(_read(level / "cpu.cfs_period_us"))
    )


def _quota(microseconds: int | None, period: int | None) -> float | None:
    if microseconds is None or period is None or microseconds <= 0 or period <= 0:
        return None  # v1 says -1 for none
    return microseconds / period


def _host_memory(root: Path) -> MemoryRoom:
    facts = {}
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        number = _number(value.removesuffix("kB"))
        if number is not None:
            facts[name] = number * 1024
    total = facts.get("MemTotal")
    if total is None:  # not Linux
        import psutil

        memory = psutil.virtual_memory()
        return MemoryRoom(memory.total, memory.available, "host")
    return MemoryRoom(total, facts.get("MemAvailable", facts.get("MemFree", total)), "host")


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _read(path: Path) -> str:
    """The file's text; "" where it is missing, which for a limit means that there is none here.

    A group's root has no limit files, and a group can vanish while we look at it.
    """
    try:
        return path.read_text()
    except OSError:
        return ""
