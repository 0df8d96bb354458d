"""What this platform lacks for worker processes of ours, and what is used instead.

Linux (5.3 and later) has it all. Elsewhere everything here is experimental: it is written after
the documentation of the platform, and not tested on one.
"""

from __future__ import annotations

import functools
import logging
import os
import socket

FALLBACKS = {"thread": "threads", "torch": "torch's own loader"}


def missing() -> str | None:
    """The first thing without which our worker processes can't be used, or None."""
    if not hasattr(os, "fork"):
        return "fork"
    if not hasattr(socket, "AF_UNIX") or not hasattr(socket, "SOCK_SEQPACKET"):
        return "sequenced-packet sockets"
    return None


@functools.cache
def say_once(text: str) -> None:
    """One line in the log, however many loaders it concerns."""
    logging.getLogger("stoker.loader").warning("%s", text)
