"""What binds: the host, the mask, or any level of any hierarchy."""

from __future__ import annotations

import os

import pytest

from stoker.machine import limits
from stoker.machine.limits import MemoryRoom
from tests.unit.machine.conftest import UNIFIED, V1_CPU, V1_MEMORY, MakeTree

HOST = 48_000_000 * 1024
HOST_FREE = 40_000_000 * 1024
GB = 10**9


@pytest.fixture
def _many_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)), raising=False)


def v2(tree: MakeTree, group: str = "/", **files: str) -> object:
    named = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    return tree(cgroup=f"0::{group}\n", mountinfo=UNIFIED, files=named)


# --- memory -------------------------------------------------------------------------------------


def test_without_groups_the_host_binds(tree: MakeTree) -> None:
    root = tree(cgroup="", mountinfo="")
    assert limits.memory_room(root) == MemoryRoom(HOST, HOST_FREE, "host")


def test_v2_max_binds_and_idle_page_cache_counts_as_free(tree: MakeTree) -> None:
    root = v2(
        tree,
        **{
            "memory.max": f"{8 * GB}\n",
            "memory.high": "max\n",
            "memory.current": f"{5 * GB}\n",
            "memory.stat": f"anon {2 * GB}\nfile {3 * GB}\ninactive_file {2 * GB}\n",
        },
    )
    room = limits.memory_room(root)
    assert (room.limit_bytes, room.available_bytes) == (8 * GB, 5 * GB)
    assert room.source.endswith("/sys/fs/cgroup/memory.max")


def test_v2_high_is_a_limit_and_low_and_min_are_not(tree: MakeTree) -> None:
    root = v2(
        tree,
        **{
            "memory.max": f"{8 * GB}\n",
            "memory.high": f"{6 * GB}\n",
            "memory.low": f"{1 * GB}\n",
            "memory.min": f"{1 * GB}\n",
            "memory.current": f"{1 * GB}\n",
        },
    )
    room = limits.memory_room(root)
    assert (room.limit_bytes, room.available_bytes) == (6 * GB, 5 * GB)
    assert room.source.endswith("memory.high")


def test_v2_a_parents_limit_binds_although_the_own_group_has_none(tree: MakeTree) -> None:
    root = v2(
        tree,
        "/pod/job",
        **{
            "pod/job/memory.max": "max\n",
            "pod/memory.max": f"{4 * GB}\n",
            "pod/memory.current": f"{1 * GB}\n",
        },
    )
    room = limits.memory_room(root)
    assert (room.limit_bytes, room.available_bytes) == (4 * GB, 3 * GB)
    assert room.source.endswith("/pod/memory.max")


def test_the_least_that_is_left_may_be_another_levels_than_the_least_limit(tree: MakeTree) -> None:
    """A sibling has filled the parent, although the own group's limit is smaller."""
    root = v2(
        tree,
        "/pod/job",
        **{
            "pod/job/memory.max": f"{4 * GB}\n",
            "pod/job/memory.current": f"{1 * GB}\n",
            "pod/memory.max": f"{10 * GB}\n",
            "pod/memory.current": f"{9 * GB}\n",
        },
    )
    room = limits.memory_room(root)
    assert (room.limit_bytes, room.available_bytes) == (4 * GB, 1 * GB)
    assert room.source.endswith("/pod/job/memory.max")


def test_a_limit_above_the_host_does_not_bind(tree: MakeTree) -> None:
    root = v2(tree, **{"memory.max": f"{500 * GB}\n", "memory.current": "0\n"})
    assert limits.memory_room(root) == MemoryRoom(HOST, HOST_FREE, "host")


def test_a_group_above_its_limit_has_nothing_left_not_less(tree: MakeTree) -> None:
    root = v2(tree, **{"memory.high": f"{1 * GB}\n", "memory.current": f"{2 * GB}\n"})
    assert limits.memory_room(root).available_bytes == 0


@pytest.mark.parametrize("unlimited", ["9223372036854771712", "18446744073709551615"])
def test_v1_largest_number_is_no_limit(tree: MakeTree, unlimited: str) -> None:
    root = tree(
        cgroup="4:memory:/\n",
        mountinfo=V1_MEMORY,
        files={"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{unlimited}\n"},
    )
    assert limits.memory_room(root).source == "host"


def test_v1_limit_uses_the_counters_of_the_whole_subtree(tree: MakeTree) -> None:
    base = "sys/fs/cgroup/memory/job"
    root = tree(
        cgroup="4:memory:/job\n",
        mountinfo=V1_MEMORY,
        files={
            f"{base}/memory.limit_in_bytes": f"{8 * GB}\n",
            f"{base}/memory.usage_in_bytes": f"{6 * GB}\n",
            f"{base}/memory.stat": f"inactive_file 0\ntotal_inactive_file {3 * GB}\n",
        },
    )
    room = limits.memory_room(root)
    assert (room.limit_bytes, room.available_bytes) == (8 * GB, 5 * GB)


def test_hybrid_takes_the_limit_from_where_the_controller_is(tree: MakeTree) -> None:
    root = tree(
        cgroup="4:memory:/job\n0::/\n",
        mountinfo=UNIFIED.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified") + V1_MEMORY,
        files={
            "sys/fs/cgroup/unified/cgroup.procs": "",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{2 * GB}\n",
            "sys/fs/cgroup/memory/job/memory.oom_control": "oom_kill_disable 0\noom_kill 3\n",
        },
    )
    assert limits.memory_room(root).limit_bytes == 2 * GB
    assert limits.oom_kills(root) == 3


# --- kills --------------------------------------------------------------------------------------


def test_v2_oom_kills_are_those_of_the_own_group(tree: MakeTree) -> None:
    root = v2(
        tree,
        "/job",
        **{
            "job/memory.events": "low 0\nhigh 7\nmax 9\noom 2\noom_kill 1\noom_group_kill 0\n",
            "memory.events": "oom_kill 50\n",
        },
    )
    assert limits.oom_kills(root) == 1


def test_oom_kills_are_unknown_without_a_memory_controller(tree: MakeTree) -> None:
    assert limits.oom_kills(tree(cgroup="", mountinfo="")) is None
    assert limits.oom_kills(v2(tree, **{"cgroup.procs": ""})) is None


# --- CPUs ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_many_cpus")
@pytest.mark.parametrize(
    ("cpu_max", "expected"),
    [
        ("max 100000", 32),
        ("400000 100000", 4),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("9000000 100000", 32),
        ("", 32),
        ("nonsense here", 32),
        ("100000 0", 32),
    ],
)
def test_v2_quota(tree: MakeTree, cpu_max: str, expected: int) -> None:
    assert limits.usable_cpus(v2(tree, **{"cpu.max": f"{cpu_max}\n"})) == expected


@pytest.mark.usefixtures("_many_cpus")
def test_the_tightest_quota_of_all_levels_binds(tree: MakeTree) -> None:
    root = v2(
        tree,
        "/pod/job",
        **{"pod/job/cpu.max": "1600000 100000\n", "pod/cpu.max": "300000 100000\n"},
    )
    assert limits.usable_cpus(root) == 3


@pytest.mark.usefixtures("_many_cpus")
@pytest.mark.parametrize(("quota", "expected"), [("-1", 32), ("600000", 6), ("0", 32)])
def test_v1_quota(tree: MakeTree, quota: str, expected: int) -> None:
    root = tree(
        cgroup="1:cpu,cpuacct:/job\n",
        mountinfo=V1_CPU,
        files={
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": f"{quota}\n",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
        },
    )
    assert limits.usable_cpus(root) == expected


def test_the_affinity_mask_binds() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert limits.usable_cpus() == 1
    finally:
        os.sched_setaffinity(0, before)


# --- the rest -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "expected"), [("4", 4), (" 2 ", 2), ("0", 1), ("-3", 1), ("many", 1), ("", 1)]
)
def test_local_world_size_is_at_least_one(said: str, expected: int) -> None:
    assert limits.local_world_size({"LOCAL_WORLD_SIZE": said}) == expected


def test_local_world_size_is_one_where_nobody_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert limits.local_world_size() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert limits.local_world_size() == 8


@pytest.mark.parametrize(
    ("cpus", "gpus", "expected"),
    [(32, 0, 8), (32, 1, 4), (32, 3, 12), (64, 8, 16), (4, 1, 2), (2, 0, 1), (1, 0, 1), (1, 4, 1)],
)
def test_default_workers(cpus: int, gpus: int, expected: int) -> None:
    assert limits.default_workers(cpus, gpus) == expected


def test_the_machine_at_hand_gives_sound_numbers() -> None:
    room = limits.memory_room()
    assert 0 < room.available_bytes <= room.limit_bytes
    assert 1 <= limits.usable_cpus() <= (os.cpu_count() or 1)
