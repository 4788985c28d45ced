"""This process and its descendants: name, signals, death with the parent, and an end for what ranks have started.

What a user's model starts, such as loaders and daemons, must not outlive the run. That works on Linux only, where a
process can adopt orphans, and ``/proc`` says whose child each process is.
"""

import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

# linux/prctl.h
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 1, 15, 36, 37
KILL_SECONDS = 5.0  # until all are gone; a process that sits in the kernel is not
POLL_SECONDS = 0.005


def prctl(option: int, argument: Any) -> None:
    """Call Linux's prctl; do nothing on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, argument)


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Ask Linux for this signal when the thread that started this process ends: no rank outlives its launcher."""
    prctl(PR_SET_PDEATHSIG, number)


def set_name(name: str) -> None:
    """Name the process for ``ps -o comm`` and ``top``, in up to 15 characters."""
    prctl(PR_SET_NAME, name.encode())


@contextmanager
def signal_handlers(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Set handlers of signals for the block; does nothing outside the main thread, where Python does not allow that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def postponed(number: signal.Signals) -> Iterator[None]:
    """Defer a signal until the end of a short block. Works in the main thread, which handles signals."""
    came: list[int] = []
    try:
        with signal_handlers({number: lambda number, _: came.append(number)}):
            yield
    finally:
        if came:
            signal.raise_signal(number)


def become_subreaper(wanted: bool = True) -> bool:
    """Have Linux make this process the parent of orphaned descendants, or not; return whether it was so before."""
    before = ctypes.c_int()
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    prctl(PR_SET_CHILD_SUBREAPER, int(wanted))
    return bool(before.value)


def kill_descendants() -> None:
    """Kill all descendants of this process, but for :func:`helpers`; for a process that has nothing else to do."""
    kill_trees(lambda: children_of(os.getpid(), ended=True) - helpers())


@contextmanager
def descendants_killed_at_end() -> Iterator[None]:
    """Kill at the end what this thread has started in the block, in a process that does other things as well.

    Earlier children are left alone with their descendants, and so is what other threads start. Orphaned daemons are
    killed only if this process had no other children, since otherwise nobody could tell whose they are.
    """
    before = children_of(os.getpid(), ended=True)
    in_main = threading.current_thread() is threading.main_thread()
    adopts = in_main and not children_of(os.getpid()) - helpers() and not become_subreaper()
    try:
        yield
    finally:
        # Without SIGCHLD, for which torch's DataLoader would raise in the main thread that a worker of its was killed.
        with signal_handlers({signal.SIGCHLD: signal.SIG_DFL}):
            kill_trees(lambda: children_of_this_thread() - before - helpers())
        if adopts:
            become_subreaper(False)


def kill_trees(roots: Callable[[], Iterable[int]]) -> None:
    """Kill the processes that ``roots`` returns, and all their descendants, until none lives or for KILL_SECONDS."""
    deadline = time.monotonic() + KILL_SECONDS
    while (found := living_trees(roots())) and time.monotonic() < deadline:
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def living_trees(roots: Iterable[int]) -> list[int]:
    """Return the living processes among ``roots`` and below them.

    A zombie can still have children while other threads of it run, so those below zombies are looked at, too.
    """
    all_processes = processes()
    found = [pid for pid in roots if pid in all_processes]
    for each in found:
        found += [pid for pid, (parent, _) in all_processes.items() if parent == each]
    return [pid for pid in found if all_processes[pid][1]]


def children_of(pid: int, *, ended: bool = False) -> set[int]:
    """Return a process's living children, and zombies if ``ended``."""
    return {child for child, (parent, lives) in processes().items() if parent == pid and (lives or ended)}


def children_of_this_thread() -> set[int]:
    """Return the children that this thread has started, or adopted as the main thread; all where Linux does not say."""
    own = children_of(os.getpid(), ended=True)
    try:
        listed = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    except OSError:
        return own
    return own & {int(pid) for pid in listed}


def processes() -> dict[int, tuple[int, bool]]:
    """Return each process's parent, and whether it has not ended; empty on systems without ``/proc``."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The command's name, in parentheses, may itself contain anything.
            state, parent = path.read_text(errors="replace").rpartition(")")[2].split()[:2]
            found[int(path.parent.name)] = (int(parent), state not in "ZX")
    return found


def out_of_memory_kills() -> int:
    """Return how many processes of this one's memory cgroup the kernel has killed because memory ran out.

    In a container that is the container's cgroup. 0 where the kernel does not say: not on Linux, or in no cgroup.
    """
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, own = line.split(":", 2)
            if controllers in ("", "memory"):  # version 2 and version 1 of cgroups
                root = Path("/sys/fs/cgroup", controllers)
                name = "memory.oom_control" if controllers else "memory.events"
                for folder in (root / own.lstrip("/"), root):  # a container may see its own cgroup as the root
                    with suppress(OSError):
                        if count := re.search(r"^oom_kill (\d+)$", (folder / name).read_text(), re.MULTILINE):
                            return int(count[1])
    return 0


def helpers() -> set[int]:
    """Return the children that Python and torch have started for themselves; these processes end with this one.

    Python's counts what processes share. torch's is where its compiler compiles for GPUs: if that is killed, whatever
    this process compiles later fails.
    """
    counts = getattr(resource_tracker._resource_tracker, "_pid", None)
    return {pid for pid in children_of(os.getpid()) if pid == counts or is_compile_worker(pid)}


def is_compile_worker(pid: int) -> bool:
    """Return whether torch's compiler has started the process from this one; reads its command line in ``/proc``."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"--parent={os.getpid()}".encode() in words and any(b"/torch/_inductor/" in word for word in words)
