"""Keeps workers from oversubscribing the CPU: one compute thread each, as torch intends.

torch caps only its own threads in workers; BLAS, OpenMP and OpenCV pools of N workers would
still start N x cores threads. What the user set in the environment wins.
"""

from __future__ import annotations

import os
import sys

import threadpoolctl
import torch

_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "OPENCV_FOR_THREADS_NUM",
)
_pools: tuple[int, threadpoolctl.ThreadpoolController] | None = None


def find_pools() -> threadpoolctl.ThreadpoolController:
    """The thread pools of loaded libraries. Looked for again only if something was imported.

    Called in the trainer before it forks: finding them takes longer (5 ms) than a fork.
    """
    global _pools
    if _pools is None or _pools[0] != len(sys.modules):
        found = threadpoolctl.ThreadpoolController()
        _pools = (len(sys.modules), found)
    return _pools[1]


def cap_threads() -> None:
    """Call in a process before it forks workers."""
    torch.set_num_threads(1)
    users = {name for name in _VARIABLES if name in os.environ}
    for name in _VARIABLES:
        os.environ.setdefault(name, "1")  # for libraries imported from here on
    if not users:
        find_pools().limit(limits=1)  # for those already loaded
    cv2 = sys.modules.get("cv2")
    if cv2 is not None and "OPENCV_FOR_THREADS_NUM" not in users:
        cv2.setNumThreads(0)
