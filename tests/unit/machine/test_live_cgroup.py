"""A real limit on a real process, where cgroup v1's memory controller is live and ours to use."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from stoker.machine import cgroup

LIMIT = 300_000_000 // 4096 * 4096
PARENT_LIMIT = 200_000_000 // 4096 * 4096

REPORT = """
import json, sys
from stoker.machine import limits
ballast = bytearray(int(sys.argv[1]))
for at in range(0, len(ballast), 4096):
    ballast[at] = 1
room = limits.memory_room()
print(json.dumps([room.limit_bytes, room.available_bytes, room.source, limits.oom_kills()]))
"""
# The process joins before it becomes Python, so that all it ever allocates is charged to the group.
JOIN = 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"'


class Report(NamedTuple):
    limit_bytes: int
    available_bytes: int
    source: str
    oom_kills: int


@pytest.fixture
def group() -> Iterator[Path]:
    """A group of our own below the one we are in, with another below it."""
    v1 = [found for found in cgroup.hierarchies("memory") if found.version == 1]
    if not v1:
        pytest.skip("no cgroup v1 memory controller on this machine")
    parent = v1[0].levels[0] / f"stoker-test-{uuid.uuid4().hex}"
    try:
        parent.mkdir()
        (parent / "inner").mkdir()
    except OSError as error:
        pytest.skip(f"may not create a memory cgroup: {error}")
    try:
        yield parent
    finally:
        (parent / "inner").rmdir()
        parent.rmdir()


def limit_to(group: Path, limit_bytes: int) -> None:
    (group / "memory.limit_in_bytes").write_text(str(limit_bytes))


def run_in(group: Path, ballast_bytes: int) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", JOIN, "sh", str(group), sys.executable, "-c", REPORT, str(ballast_bytes)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)


def report_from(group: Path, ballast_bytes: int) -> Report:
    done = run_in(group, ballast_bytes)
    assert done.returncode == 0, done.stderr
    return Report(*json.loads(done.stdout))


def test_a_process_in_a_group_sees_the_groups_limit(group: Path) -> None:
    limit_to(group, LIMIT)
    report = report_from(group, 100_000_000)
    assert report.limit_bytes == LIMIT
    assert report.available_bytes <= LIMIT - 100_000_000
    assert report.source == str(group / "memory.limit_in_bytes")
    assert report.oom_kills == 0


def test_a_tighter_limit_one_level_up_binds(group: Path) -> None:
    limit_to(group, PARENT_LIMIT)
    limit_to(group / "inner", LIMIT)
    report = report_from(group / "inner", 50_000_000)
    assert report.limit_bytes == PARENT_LIMIT
    assert report.available_bytes <= PARENT_LIMIT - 50_000_000
    assert report.source == str(group / "memory.limit_in_bytes")


def test_a_kill_for_memory_is_counted(group: Path) -> None:
    if psutil.swap_memory().total:
        pytest.skip("with swap the process is swapped out instead of killed")
    limit_to(group, 60_000_000 // 4096 * 4096)
    assert run_in(group, 200_000_000).returncode == -signal.SIGKILL
    limit_to(group, LIMIT)
    assert report_from(group, 0).oom_kills == 1
