"""What a test left behind: processes, threads, descriptors, names in shared memory.

Finds and names them. Does not decide when to look (conftest does) and does not clean up.

A worker's orphan is no longer our child, may have left our process group, and was forked without an
exec, so its environment does not tell. Two marks together find it anyway: what we exec'ed inherits
`MARK` in its environment, and what was only forked has the stack address of its parent, which the
kernel draws at random at each exec.
"""

from __future__ import annotations

import multiprocessing.forkserver as mp_forkserver
import multiprocessing.resource_tracker as mp_tracker
import os
import re
import sys
import threading
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

MARK = "STOKER_TEST_RUN"
SHARED_MEMORY = Path("/dev/shm")
_START_STACK = 25  # field 28 of /proc/[pid]/stat, counted from the one after the command's ")"


@dataclass(frozen=True)
class Holdings:
    """What this process and its descendants hold at one moment."""

    processes: frozenset[tuple[int, float]]
    threads: frozenset[threading.Thread]
    native_threads: int
    descriptors: Counter[str]
    shared_memory: frozenset[str]
    torch_loaded: bool


def mark_this_run() -> None:
    os.environ[MARK] = uuid.uuid4().hex


def take_stock() -> Holdings:
    return Holdings(
        processes=frozenset(_our_processes()),
        threads=frozenset(threading.enumerate()),
        native_threads=_native_threads(),
        descriptors=Counter(_descriptor_kinds()),
        shared_memory=frozenset(_shared_names()),
        torch_loaded="torch" in sys.modules,
    )


def left_behind(before: Holdings, after: Holdings) -> list[str]:
    """One line for each thing that `after` has and `before` had not."""
    leaks = [_describe_process(pid) for pid, _ in sorted(after.processes - before.processes)]
    threads = [thread for thread in after.threads - before.threads if thread.is_alive()]
    leaks += [f"thread {t.name!r}{' (daemon)' if t.daemon else ''}" for t in threads]
    # Importing torch starts pools that stay; the test that did it can't be judged by a count.
    extra = after.native_threads - before.native_threads
    if extra > 0 and before.torch_loaded == after.torch_loaded:
        leaks.append(f"{extra} native thread(s) that Python does not know")
    leaks += [
        f"descriptor {kind} ({before.descriptors[kind]} before, {count} after)"
        for kind, count in sorted(after.descriptors.items())
        if count > before.descriptors[kind]
    ]
    new_names = after.shared_memory - before.shared_memory
    return leaks + [f"/dev/shm/{name}" for name in sorted(new_names) if not _of_a_stranger(name)]


def start_thread_pools() -> None:
    """torch's pools start at first use and stay: use them before anything is counted."""
    torch = sys.modules.get("torch")
    if torch is not None:
        (torch.ones(512, 512) @ torch.ones(512, 512)).sum().item()
        torch.ones(1 << 20).add_(1)


def _our_processes() -> set[tuple[int, float]]:
    helpers = _python_helpers()
    found = set()
    candidates = {child.pid for child in psutil.Process().children(recursive=True)}
    candidates.update(pid for pid in psutil.pids() if pid != os.getpid() and _descends_from_us(pid))
    for pid in candidates - helpers:
        try:
            process = psutil.Process(pid)
            # An orphan that is a zombie has ended; only a zombie child of ours was forgotten.
            if process.status() != psutil.STATUS_ZOMBIE or process.ppid() == os.getpid():
                found.add((pid, process.create_time()))
        except psutil.Error:
            continue  # it ended while we looked
    return found


def _descends_from_us(pid: int) -> bool:
    try:
        stack = _start_stack(pid)
        if stack > 1 and stack == _start_stack(os.getpid()):
            return True
        mark = f"{MARK}={os.environ.get(MARK, '-')}".encode()
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False  # gone, or another user's


def _start_stack(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[_START_STACK])


def _python_helpers() -> set[int]:
    """The two processes that multiprocessing itself keeps for the rest of the run."""
    tracker = getattr(mp_tracker._resource_tracker, "_pid", None)
    server = getattr(mp_forkserver._forkserver, "_forkserver_pid", None)
    return {pid for pid in (tracker, server) if pid is not None}


def _python_helper_descriptors() -> set[int]:
    tracker = getattr(mp_tracker._resource_tracker, "_fd", None)
    server = getattr(mp_forkserver._forkserver, "_forkserver_alive_fd", None)
    return {fd for fd in (tracker, server) if fd is not None}


def _native_threads() -> int:
    """Threads of this process that Python did not start."""
    known = {thread.native_id for thread in threading.enumerate()}
    return sum(int(task) not in known for task in os.listdir("/proc/self/task"))


def _descriptor_kinds() -> list[str]:
    """`socket:[123]` becomes `socket`: the number differs each time, the kind is counted."""
    helpers = _python_helper_descriptors()
    kinds = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor of the listing itself
        if int(name) not in helpers:
            kinds.append(re.sub(r":\[\d+\]$", "", target))
    return kinds


def _shared_names() -> list[str]:
    return os.listdir(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else []


def _of_a_stranger(name: str) -> bool:
    """Whether a process that is not ours holds this name: other programs run on the machine too."""
    path = str(SHARED_MEMORY / name)
    ours = {pid for pid, _ in _our_processes()} | {os.getpid()} | _python_helpers()
    for pid in set(psutil.pids()) - ours:
        try:
            if path in Path(f"/proc/{pid}/maps").read_text():
                return True
            if any(path == os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()):
                return True
        except OSError:
            continue  # gone, or another user's
    return not os.path.exists(path)


def _describe_process(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        zombie = process.status() == psutil.STATUS_ZOMBIE
        command = process.name() if zombie else " ".join(process.cmdline())
        return f"process {pid} ({process.status()}, parent {process.ppid()}): {command[:120]}"
    except psutil.Error:
        return f"process {pid} (ended since)"
