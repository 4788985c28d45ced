"""Name this process, handle its signals, let it die with its parent, spawn others, and kill its descendants.

Processes that a user's model starts, such as loaders and daemons, must not outlive the run. They are killed on Linux
only, where a process can adopt orphans and ``/proc`` lists each process's parent.
"""

import ctypes
import gc
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

# linux/prctl.h
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 1, 15, 36, 37
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # from glibc's malloc.h
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # that ask a run to stop
KILL_SECONDS = 5.0  # how long to wait for killed processes; one that is blocked in the kernel stays
POLL_SECONDS = 0.005
STACK_PAUSE_SECONDS = 0.5  # between two lines of a stack, at most


def prctl(option: int, argument: Any) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, argument)


def set_malloc_option(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(option, value)


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have Linux send this signal to this process when the thread that started it ends; do nothing elsewhere."""
    prctl(PR_SET_PDEATHSIG, number)


def set_process_name(name: str) -> None:
    """Set the name that ``ps -o comm`` and ``top`` show for this process, up to 15 characters; Linux only."""
    prctl(PR_SET_NAME, name.encode())


def become_subreaper(wanted: bool = True) -> bool:
    """Tell Linux whether this process adopts its orphaned descendants; return whether it did before."""
    before = ctypes.c_int()
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    prctl(PR_SET_CHILD_SUBREAPER, int(wanted))
    return bool(before.value)


# Undo, in a process that user code forks, what this process does about signals. The newest is the last.
undo_in_forks: list[Callable[[], object]] = []


forking = threading.local()  # ``mask``: the signals that a thread blocked before it began to fork


def block_before_fork() -> None:
    """Let signals wait until the fork has its own handlers: one that comes earlier would be lost."""
    forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS) if undo_in_forks else None


def unblock_after_fork() -> None:
    if forking.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)


def restore_fork() -> None:
    while undo_in_forks:
        undo_in_forks.pop()()
    unblock_after_fork()


os.register_at_fork(before=block_before_fork, after_in_parent=unblock_after_fork, after_in_child=restore_fork)


@contextmanager
def undone_in_forks(undo: Callable[[], object]) -> Iterator[None]:
    """Call ``undo`` in each process that is forked during the block."""
    undo_in_forks.append(undo)
    try:
        yield
    finally:
        if undo in undo_in_forks:  # else this is such a process
            undo_in_forks.remove(undo)


@contextmanager
def signal_handlers(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Set handlers of signals for the block and restore the earlier ones; outside the main thread set none.

    Processes that are forked during the block have the earlier handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    restore = partial(set_handlers, before)
    try:
        with undone_in_forks(restore):
            yield
    finally:
        restore()


def set_handlers(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return SIGNALS, without SIGHUP where it is ignored, as by nohup: a terminal that is closed then stops nothing."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(number for number in SIGNALS if not (ignored and number == signal.SIGHUP))


def restore_start_method() -> None:
    """Have user code's processes start as on this platform by default, and not by spawn, as this process did.

    A spawned process imports torch anew, and gets functions and data by pickling.
    """
    multiprocessing.set_start_method(None, force=True)


def ignore_signals(numbers: Collection[signal.Signals]) -> None:
    """Ignore signals in this process from now on, and unblock them, but not in the processes that it starts.

    So their programs can be ended by signals, unlike those of a process that blocks signals, or has SIG_IGN.
    """
    heeded = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]  # by nohup
    before = {number: signal.signal(number, lambda *_: None) for number in heeded}
    undo_in_forks.append(partial(set_handlers, before))
    for number in heeded:
        signal.siginterrupt(number, False)  # no system call of user code fails
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


@contextmanager
def postpone_signal(number: signal.Signals) -> Iterator[None]:
    """Defer a signal that comes during the block, and raise it once at the end; outside the main thread defer none."""
    came: list[int] = []
    try:
        with signal_handlers({number: lambda number, _: came.append(number)}):
            yield
    finally:
        if came:
            signal.raise_signal(number)


@contextmanager
def hide_main_script() -> Iterator[None]:
    """Keep processes spawned during the block from running the main script again: with pyflyte 0.7 s each."""
    main = vars(sys.modules["__main__"])
    before: dict[str, Any] = {name: main[name] for name in ("__file__", "__spec__") if name in main}
    main.pop("__file__", None)
    main["__spec__"] = None
    try:
        yield
    finally:
        main.update(before)


@contextmanager
def spawn_context() -> Iterator[SpawnContext]:
    """Yield multiprocessing's spawn context; during the block this thread, and new processes, block SIGNALS."""
    resource_tracker.ensure_running()  # before signals are blocked, because it unblocks them
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        with hide_main_script():
            yield multiprocessing.get_context("spawn")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def kill_descendants() -> None:
    """SIGKILL all descendants of this process but Python's and torch's own helpers; wait up to KILL_SECONDS (5 s)."""
    kill_process_trees(lambda: list_children(os.getpid(), ended=True) - list_helper_pids())


@contextmanager
def kill_new_descendants_at_end() -> Iterator[None]:
    """SIGKILL, at the end of the block, the processes that this thread has started in it, and their descendants.

    Spares Python's and torch's helpers. Kills adopted orphans only in the main thread of a process that had no other
    children: only there is it known who started them. Terminates multiprocessing's pools first, because a pool whose
    workers were killed starts others, and waits for ever when this process ends.
    """
    before = list_children(os.getpid(), ended=True)
    pools = find_pools()
    in_main = threading.current_thread() is threading.main_thread()
    # The last call, if it comes to that, switches adoption on; it returns whether it was on before.
    adopts = in_main and not list_children(os.getpid()) - list_helper_pids() and not become_subreaper()
    try:
        yield
    finally:
        # SIGCHLD is ignored: torch's handler would raise, in the main thread, that a DataLoader's worker was killed.
        with signal_handlers({signal.SIGCHLD: signal.SIG_DFL}):
            for pool in set(find_pools()) - set(pools):
                pool.terminate()
            kill_process_trees(lambda: list_children_of_this_thread() - before - list_helper_pids())
        if adopts:
            become_subreaper(False)


def find_pools() -> list[Any]:
    """Return the multiprocessing.Pools of processes that this process holds."""
    if (module := sys.modules.get("multiprocessing.pool")) is None:
        return []
    return [each for each in gc.get_objects() if type(each) is module.Pool]


def kill_process_trees(roots: Callable[[], Iterable[int]]) -> None:
    """SIGKILL the processes ``roots()`` and their descendants, until none lives or KILL_SECONDS (5 s) are over."""
    deadline = time.monotonic() + KILL_SECONDS
    while (found := list_living_trees(roots())) and time.monotonic() < deadline:
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def list_living_trees(roots: Iterable[int]) -> list[int]:
    """Return the ids of those processes among ``roots`` and their descendants that have not exited."""
    all_processes = list_processes()
    found = [pid for pid in roots if pid in all_processes]
    for each in found:  # zombies too, which have children while other threads of theirs run
        found += [pid for pid, (parent, _) in all_processes.items() if parent == each]
    return [pid for pid in found if all_processes[pid][1]]


def list_children(pid: int, *, ended: bool = False) -> set[int]:
    """Return the ids of a process's children; zombies only if ``ended``."""
    return {child for child, (parent, lives) in list_processes().items() if parent == pid and (lives or ended)}


def list_children_of_this_thread() -> set[int]:
    """Return the ids of this thread's children, zombies too; the main thread's include adopted orphans."""
    own = list_children(os.getpid(), ended=True)
    with suppress(OSError):
        listed = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
        return own & {int(pid) for pid in listed}
    return own


def list_processes() -> dict[int, tuple[int, bool]]:
    """Return each process id with its parent's id and whether it is alive; empty on systems without ``/proc``."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The command's name stands in parentheses and may contain spaces and parentheses.
            state, parent = path.read_text(errors="replace").rpartition(")")[2].split()[:2]
            found[int(path.parent.name)] = (int(parent), state not in "ZX")
    return found


def list_helper_pids() -> set[int]:
    """Return the ids of multiprocessing's resource tracker and torch's compiling process for GPUs."""
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    # Without the compiling process, known by its command line, later compilations would fail.
    compiler = f"--parent={os.getpid()}".encode()
    found = set()
    for pid in list_children(os.getpid()):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if pid == tracker or (compiler in words and any(b"/torch/_inductor/" in word for word in words)):
                found.add(pid)
    return found


def read_stack(pid: int, pipe: Connection, seconds: float) -> str:
    """Return the stack that a process writes to the pipe on SIGUSR1, or "" if no line comes within ``seconds``.

    The process has called ``faulthandler.register``, which writes line by line.
    """
    stack = b""
    with suppress(OSError):  # the process has ended
        os.kill(pid, signal.SIGUSR1)
        while pipe.poll(STACK_PAUSE_SECONDS if stack else seconds):
            if not (lines := os.read(pipe.fileno(), 1 << 16)):
                break
            stack += lines
    return stack.decode(errors="replace").strip()


def count_out_of_memory_kills() -> int:
    """Return how many processes of this one's memory cgroup the kernel has killed for lack of memory; 0 if unknown."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, own = line.split(":", 2)
            if controllers in ("", "memory"):  # version 2 and version 1 of cgroups
                root = Path("/sys/fs/cgroup", controllers)
                name = "memory.oom_control" if controllers else "memory.events"
                for folder in (root / own.lstrip("/"), root):  # a container may see its own cgroup's files at the root
                    with suppress(OSError):
                        if count := re.search(r"^oom_kill (\d+)$", (folder / name).read_text(), re.MULTILINE):
                            return int(count[1])
    return 0
