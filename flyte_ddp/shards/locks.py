"""Locks of a cache's shards: one of its folder for each that is fetched, and one on each file that is read."""

from __future__ import annotations

import fcntl
import os

from flyte_ddp.locks import unlock

LOCKS = 1024  # files to lock; shards that share one are fetched one after the other


def lock_again(file: int) -> bool:
    """Locks an open file again; False if it was evicted meanwhile, or is about to be."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    if os.fstat(file).st_nlink:
        return True
    unlock(file)
    return False


def stripe(name: str) -> str:
    """The lock that goes with a shard's name."""
    return f"{int(name, 16) % LOCKS:04d}"
