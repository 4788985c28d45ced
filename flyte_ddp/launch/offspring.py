"""What ranks have started, such as a user's own loaders and daemons: it must not outlive the run.

Only on Linux, where a process can take in those whose parents have ended, and ``/proc`` says whose child each is.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h
KILL_SECONDS = 5.0  # until all are gone; a process that sits in the kernel is not
POLL_SECONDS = 0.005


def take_in_orphans(wanted: bool = True) -> bool:
    """Has Linux make this process the parent of descendants that have lost theirs; returns whether it was so before."""
    if sys.platform != "linux":
        return False
    library, before = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
    library.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    library.prctl(PR_SET_CHILD_SUBREAPER, int(wanted))
    return bool(before.value)


def end_offspring() -> None:
    """Kills all that this process has started, and what that has; for a process that has nothing else to do."""
    kill_trees(lambda: children_of(os.getpid()) - helpers())


@contextmanager
def ended_with_the_block() -> Iterator[None]:
    """Kills in the end what this thread has started in the block, in a process that does other things as well.

    What was there before is left alone with all its children, and so is what other threads start. Daemons that have
    left their parent are found where there is nobody else whose daemons they could be.
    """
    before = children_of(os.getpid())
    takes_in = (
        threading.current_thread() is threading.main_thread() and not before - helpers() and not take_in_orphans()
    )
    try:
        yield
    finally:
        with no_reports_of_children():
            kill_trees(lambda: children_of_this_thread() - before - helpers())
        if takes_in:
            take_in_orphans(False)


def kill_trees(roots: Callable[[], Iterable[int]]) -> None:
    """Kills these processes with all their descendants, until there are none."""
    deadline = time.monotonic() + KILL_SECONDS
    while (found := living_trees(roots())) and time.monotonic() < deadline:
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def living_trees(roots: Iterable[int]) -> list[int]:
    """Those of them that live, and their descendants."""
    parents = living()
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found = [pid for pid in roots if pid in parents]
    for each in found:
        found += children.get(each, [])
    return found


def children_of(pid: int) -> set[int]:
    """Its living children."""
    return {child for child, parent in living().items() if parent == pid}


def children_of_this_thread() -> set[int]:
    """The living children that this thread has started, or taken in as the main thread; all where that is not known."""
    own = children_of(os.getpid())
    try:
        listed = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    except OSError:
        return own
    return own & {int(pid) for pid in listed}


def living() -> dict[int, int]:
    """The parent of each process that has not ended; none on systems without ``/proc``."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The command's name, in parentheses, may itself contain anything.
            state, parent = path.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state not in "ZX":
                found[int(path.parent.name)] = int(parent)
    return found


def helpers() -> set[int]:
    """Python's own process that keeps count of what processes share; it ends with this one."""
    pid = getattr(resource_tracker._resource_tracker, "_pid", None)
    return {pid} if pid is not None else set()


@contextmanager
def no_reports_of_children() -> Iterator[None]:
    """Keeps torch's DataLoader from raising, in the main thread, that a worker of its was killed."""
    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
        yield
        return
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)
