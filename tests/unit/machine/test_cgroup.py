"""Which directories bind this process, for every way in which groups are mounted."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from stoker.machine.cgroup import (
    Hierarchy,
    Mount,
    hierarchies,
    levels_of,
    parse_membership,
    parse_mounts,
)
from tests.unit.machine.conftest import UNIFIED, V1_CPU, V1_MEMORY, MakeTree


def levels(hierarchy: Hierarchy, root: Path) -> list[str]:
    return [str(level.relative_to(root)) for level in hierarchy.levels]


def test_membership_of_v1_v2_and_named_hierarchies() -> None:
    text = "12:cpu,cpuacct:/job\n4:memory:/user/x:y\n1:name=systemd:/init\n0::/unified\nnonsense\n"
    assert parse_membership(text) == {
        "cpu": PurePosixPath("/job"),
        "cpuacct": PurePosixPath("/job"),
        "memory": PurePosixPath("/user/x:y"),
        "name=systemd": PurePosixPath("/init"),
        "": PurePosixPath("/unified"),
    }


def test_mounts_are_read_with_optional_fields_and_escaped_names() -> None:
    text = (
        "23 1 8:1 / / rw - ext4 /dev/sda rw\n"
        "30 23 0:26 / /sys/fs/my\\040groups rw shared:9 master:1 - cgroup2 cgroup2 rw\n"
        "31 23 0:27 /a /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        "broken line\n"
    )
    unified, cpu = parse_mounts(text)
    assert unified == Mount(2, frozenset(), PurePosixPath("/"), PurePosixPath("/sys/fs/my groups"))
    assert cpu.version == 1
    assert {"cpu", "cpuacct"} <= cpu.controllers
    assert cpu.root == PurePosixPath("/a")


def test_every_level_up_to_the_mount_is_given_lowest_first() -> None:
    mount = Mount(2, frozenset(), PurePosixPath("/"), PurePosixPath("/cg"))
    assert [str(level) for level in levels_of(mount, PurePosixPath("/a/b/c"))] == [
        "/cg/a/b/c",
        "/cg/a/b",
        "/cg/a",
        "/cg",
    ]


def test_a_container_that_sees_the_hosts_path_of_its_group_finds_it_at_the_mount() -> None:
    mount = Mount(1, frozenset({"memory"}), PurePosixPath("/docker/abc"), PurePosixPath("/cg"))
    assert levels_of(mount, PurePosixPath("/docker/abc")) == [PurePosixPath("/cg")]
    assert levels_of(mount, PurePosixPath("/docker/abc/job")) == [
        PurePosixPath("/cg/job"),
        PurePosixPath("/cg"),
    ]


def test_a_group_outside_of_what_is_mounted_leaves_the_mount_point() -> None:
    mount = Mount(2, frozenset(), PurePosixPath("/docker/abc"), PurePosixPath("/cg"))
    for group in ("/docker/abcd", "/", "/../other", "/docker/abc/../x"):
        assert levels_of(mount, PurePosixPath(group)) == [PurePosixPath("/cg")], group


def test_unified(tree: MakeTree) -> None:
    root = tree(
        cgroup="0::/user.slice/job\n",
        mountinfo=UNIFIED,
        files={"sys/fs/cgroup/user.slice/job/memory.max": "max\n"},
    )
    for controller in ("memory", "cpu"):
        (only,) = hierarchies(controller, root)
        assert only.version == 2
        assert levels(only, root) == [
            "sys/fs/cgroup/user.slice/job",
            "sys/fs/cgroup/user.slice",
            "sys/fs/cgroup",
        ]


def test_v1_takes_the_mount_and_the_group_of_each_controller(tree: MakeTree) -> None:
    root = tree(
        cgroup="4:memory:/job\n1:cpu,cpuacct:/\n",
        mountinfo=V1_MEMORY + V1_CPU,
        files={
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "1",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
        },
    )
    (memory,) = hierarchies("memory", root)
    assert levels(memory, root) == ["sys/fs/cgroup/memory/job", "sys/fs/cgroup/memory"]
    (cpu,) = hierarchies("cpu", root)
    assert levels(cpu, root) == ["sys/fs/cgroup/cpu,cpuacct"]


def test_hybrid_gives_both(tree: MakeTree) -> None:
    root = tree(
        cgroup="4:memory:/job\n0::/\n",
        mountinfo=V1_MEMORY + UNIFIED.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified"),
        files={
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "1",
            "sys/fs/cgroup/unified/cgroup.procs": "",
        },
    )
    assert [hierarchy.version for hierarchy in hierarchies("memory", root)] == [1, 2]


def test_levels_that_can_not_be_seen_are_left_out(tree: MakeTree) -> None:
    root = tree(
        cgroup="0::/gone/with/the/wind\n",
        mountinfo=UNIFIED,
        files={"sys/fs/cgroup/gone/memory.max": "max"},
    )
    (only,) = hierarchies("memory", root)
    assert levels(only, root) == ["sys/fs/cgroup/gone", "sys/fs/cgroup"]


def test_nothing_mounted_and_no_proc_are_no_groups(tree: MakeTree, tmp_path: Path) -> None:
    assert hierarchies("memory", tmp_path / "nowhere") == ()
    assert hierarchies("memory", tree(cgroup="0::/\n", mountinfo="")) == ()
    assert hierarchies("memory", tree(cgroup="", mountinfo=UNIFIED)) == ()
    assert hierarchies("memory", tree(cgroup="0::/\n", mountinfo=UNIFIED)) == ()
