"""A made-up file system with control groups in it, for what the machine at hand does not have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

MEMINFO = "MemTotal:       48000000 kB\nMemFree:         1000000 kB\nMemAvailable:   40000000 kB\n"

UNIFIED = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MEMORY = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
V1_CPU = "36 31 0:33 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"

MakeTree = Callable[..., Path]


@pytest.fixture
def tree(tmp_path: Path) -> MakeTree:
    """`tree(cgroup=…, mountinfo=…, files={"sys/fs/cgroup/memory.max": "max"})` -> its root."""

    def make(
        *, cgroup: str, mountinfo: str, files: dict[str, str] | None = None, meminfo: str = MEMINFO
    ) -> Path:
        everything = {
            "proc/self/cgroup": cgroup,
            "proc/self/mountinfo": mountinfo,
            "proc/meminfo": meminfo,
            **(files or {}),
        }
        for name, text in everything.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make
