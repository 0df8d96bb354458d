"""The loader can be imported where half of what it uses does not exist, as on Windows."""

from __future__ import annotations

import subprocess
import sys

# torch is imported before the platform changes: what it needs there is its own affair.
WINDOWS = """
import ctypes, mmap, os, select, signal, socket, sys
import torch, torch.utils.data, numpy, multiprocessing.reduction, multiprocessing.context
import torch.utils.data._utils.worker, torch.utils.data._utils.pin_memory, psutil, threadpoolctl
import faulthandler, tempfile, logging, concurrent.futures

real = ctypes.CDLL

class CDLL(real):
    def __init__(self, name, *args, **more):
        if name is None:
            raise TypeError("bad argument type for built-in operation")
        super().__init__(name, *args, **more)

ctypes.CDLL = CDLL
for module, names in {
    socket: "AF_UNIX SOCK_SEQPACKET CMSG_SPACE CMSG_LEN SCM_RIGHTS MSG_CMSG_CLOEXEC MSG_DONTWAIT",
    os: "fork register_at_fork memfd_create eventfd pidfd_open sched_getaffinity getppid",
    signal: "SIGKILL SIGCHLD SIGRTMIN pthread_sigmask pidfd_send_signal",
    mmap: "PROT_READ PROT_WRITE MAP_SHARED MADV_REMOVE",
    select: "poll POLLIN",
    multiprocessing.reduction: "DupFd",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
sys.modules["resource"] = sys.modules["fcntl"] = None
sys.platform = "win32"
import stoker
from stoker import DataLoader, Knobs
loader = DataLoader(list(range(8)), batch_size=4, num_workers=0)
print([batch.tolist() for batch in loader], loader.apply(Knobs(in_flight_bytes=5000)))
"""


def test_the_loader_can_be_imported_and_used_without_workers_on_windows() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WINDOWS], capture_output=True, text=True, timeout=50, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == (
        "[[0, 1, 2, 3], [4, 5, 6, 7]] Knobs(workers=None, in_flight_bytes=5000)\n"
    )
