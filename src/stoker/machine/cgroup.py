"""Where this process' control groups are, in cgroup v1, v2 and the hybrid of both.

Finds directories; what the files in them say is the business of limits.py. A limit can sit on any
level, so every level from the process' own group up to the mount is given, not only the lowest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

Controller = Literal["memory", "cpu"]
ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Mount:
    """One mounted cgroup hierarchy: `root` is the part of it that is visible at `point`."""

    version: Literal[1, 2]
    controllers: frozenset[str]
    root: PurePosixPath
    point: PurePosixPath


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """The groups that bind this process for one controller: its own first, the mount's last."""

    version: Literal[1, 2]
    levels: tuple[Path, ...]


def hierarchies(controller: Controller, root: Path = ROOT) -> tuple[Hierarchy, ...]:
    """Every mounted hierarchy that may limit this process' `controller`; empty where there is none.

    On a hybrid system that is both: which of the two has the controller is seen by which of them
    has the files. `root` is where the file system begins, for tests on a made-up one.
    """
    groups = parse_membership(_text(root / "proc/self/cgroup"))
    found = []
    for mount in parse_mounts(_text(root / "proc/self/mountinfo")):
        if mount.version == 1 and controller not in mount.controllers:
            continue
        group = groups.get(controller if mount.version == 1 else "")
        if group is None:
            continue
        levels = tuple(root / str(level).lstrip("/") for level in levels_of(mount, group))
        found.append(Hierarchy(mount.version, tuple(path for path in levels if path.is_dir())))
    return tuple(hierarchy for hierarchy in found if hierarchy.levels)


def parse_membership(text: str) -> dict[str, PurePosixPath]:
    """/proc/self/cgroup as {controller: group}; the unified (v2) hierarchy has the key ""."""
    groups = {}
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, separator, group = rest.partition(":")
        if separator and group.startswith("/"):
            groups.update(dict.fromkeys(controllers.split(","), PurePosixPath(group)))
    return groups


def parse_mounts(text: str) -> list[Mount]:
    """The cgroup mounts of /proc/self/mountinfo, in its order."""
    mounts = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if not separator or len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] not in ("cgroup", "cgroup2"):
            continue
        root, point = PurePosixPath(_unescape(fields[3])), PurePosixPath(_unescape(fields[4]))
        if kind[0] == "cgroup2":
            mounts.append(Mount(2, frozenset(), root, point))
        else:
            mounts.append(Mount(1, frozenset(kind[2].split(",")), root, point))
    return mounts


def levels_of(mount: Mount, group: PurePosixPath) -> list[PurePosixPath]:
    """The directories of `group` and of all groups above it that can be seen through `mount`."""
    relative = _below(mount.root, group)
    inside = [relative, *relative.parents]  # the last is ".", the mount point
    return [mount.point / level for level in inside]


def _below(mounted: PurePosixPath, group: PurePosixPath) -> PurePosixPath:
    """`group` as seen from the mount point.

    A container without a cgroup namespace sees the host's path of its group in both files, and only
    its own group mounted: the common part falls away. With a namespace of its own both are relative
    to it. A path that leads out of what is mounted ("/..", or another branch) leaves only the mount
    point itself: it is the nearest group whose limits we can read.
    """
    if ".." not in group.parts and group.is_relative_to(mounted):
        return group.relative_to(mounted)
    return PurePosixPath(".")


def _unescape(path: str) -> str:
    """mountinfo writes a space as \\040, and so on."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="surrogateescape")
    except OSError:  # not Linux, or /proc is not mounted: then there are no groups to find
        return ""
