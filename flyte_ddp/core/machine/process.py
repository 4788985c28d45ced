"""Name, signals, child processes and descendants of this process.

Processes that a user's model starts, such as loaders and daemons, must not outlive the run. The library kills leftover
processes only on Linux, where a process can adopt orphans and ``/proc`` lists each process's parent.
"""

import ctypes
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
from multiprocessing import resource_tracker, util
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any, NoReturn

# linux/prctl.h
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 1, 15, 36, 37
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # from glibc's malloc.h
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # that ask a run to stop
KILL_SECONDS = 5.0  # to wait for killed processes; a process that is blocked in the kernel stays
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
    """Make Linux send a signal (by default SIGKILL) to this process when the parent thread ends.

    Does nothing on other systems.
    """
    prctl(PR_SET_PDEATHSIG, number)


def set_process_name(name: str) -> None:
    """Set the name that ``ps -o comm`` and ``top`` show for this process (Linux only).

    The name is cut to 15 characters.
    """
    prctl(PR_SET_NAME, name.encode())


def become_subreaper(wanted: bool = True) -> bool:
    """Make this process adopt orphaned descendants, or with False no longer adopt orphans (Linux only).

    Returns whether adoption was on before.
    """
    before = ctypes.c_int()
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    prctl(PR_SET_CHILD_SUBREAPER, int(wanted))
    return bool(before.value)


# Functions that undo this process's signal handling in a process that user code forks, the newest last.
undo_in_forks: list[Callable[[], object]] = []


forking = threading.local()  # ``mask``: the signals that a thread blocked before a fork


def block_before_fork() -> None:
    """Block stop signals around a fork, so that no signal is lost before the forked process has set its handlers."""
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
    """Let each process that is forked during the block call ``undo`` first. Inner blocks come before outer blocks."""
    undo_in_forks.append(undo)
    try:
        yield
    finally:
        if undo in undo_in_forks:  # else this process is a fork, which has called ``undo``
            undo_in_forks.remove(undo)


@contextmanager
def use_signal_handlers(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Use other signal handlers during the block, and restore the earlier handlers afterwards.

    Processes that are forked during the block use the earlier handlers. Does nothing outside the main thread.
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


def list_stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask a run to stop: SIGTERM, SIGINT and, unless ignored as by ``nohup``, SIGHUP."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(number for number in SIGNALS if not (ignored and number == signal.SIGHUP))


def use_default_start_method() -> None:
    """Let multiprocessing start processes by the platform's default method in this process, not by spawn.

    Otherwise a spawned process would also spawn the processes of user code, which takes longer.
    """
    multiprocessing.set_start_method(None, force=True)


def ignore_signals(numbers: Collection[signal.Signals]) -> None:
    """Ignore and unblock signals in this process from now on, but not in child processes.

    The signals still end child processes and programs that this process starts. Does not use SIG_IGN, which programs
    would inherit.
    """
    heeded = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]  # not ignored by nohup
    before = {number: signal.signal(number, lambda *_: None) for number in heeded}
    undo_in_forks.append(partial(set_handlers, before))
    for number in heeded:
        signal.siginterrupt(number, False)  # system calls of user code do not fail
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


@contextmanager
def postpone_signal(number: signal.Signals) -> Iterator[None]:
    """Hold back a signal during the block, and raise the signal once at the end, also after an error.

    Does nothing outside the main thread.
    """
    came: list[int] = []
    try:
        with use_signal_handlers({number: lambda number, _: came.append(number)}):
            yield
    finally:
        if came:
            signal.raise_signal(number)


@contextmanager
def hide_main_script() -> Iterator[None]:
    """Keep processes that are spawned during the block from running the main script again.

    During the block, the module ``__main__`` has no file and no spec.
    """
    main = vars(sys.modules["__main__"])
    before: Mapping[str, object] = {name: main[name] for name in ("__file__", "__spec__") if name in main}
    main.pop("__file__", None)
    main["__spec__"] = None
    try:
        yield
    finally:
        main.update(before)


@contextmanager
def open_spawn_context() -> Iterator[SpawnContext]:
    """Yield multiprocessing's spawn context, whose new processes do not run the main script.

    During the block, this thread and new processes block the stop signals SIGNALS. Starts multiprocessing's resource
    tracker, a process.
    """
    resource_tracker.ensure_running()  # before signals are blocked, because it unblocks them
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        with hide_main_script():
            yield multiprocessing.get_context("spawn")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def kill_descendants() -> None:
    """Kill all descendants of this process, and wait up to 5 s (KILL_SECONDS) for their end.

    Does not kill the helper processes of Python and torch.
    """
    kill_process_trees(lambda: list_children(os.getpid(), ended=True) - list_helper_pids())


def kill_descendants_and_exit(*_: object) -> NoReturn:
    """Kill all descendants, and exit with code 1, without clean-up: freeing torch takes a second.

    Waits up to 5 s for the end of the descendants. This function may be the handler of a signal, which may come again
    meanwhile.
    """
    kill_descendants()
    os._exit(1)


@contextmanager
def kill_new_descendants_at_end() -> Iterator[None]:
    """Kill, at the end of the block, the processes that this thread has started in the block, and all descendants.

    Waits up to 5 s for the end of the processes. Does not kill the helper processes of Python and torch. Kills adopted
    orphans only in the main thread of a process that had no other children, because otherwise the origin is unknown.

    First terminates the pools of multiprocessing that were made in the block, because a pool would replace killed
    workers.
    """
    before = list_children(os.getpid(), ended=True)
    pools = list_process_pools()
    in_main = threading.current_thread() is threading.main_thread()
    # If the last call is reached, it switches adoption on, and returns whether adoption was on before.
    adopts = in_main and not list_children(os.getpid()) - list_helper_pids() and not become_subreaper()
    try:
        yield
    finally:
        # Ignores SIGCHLD, because torch's handler would raise an error about the killed DataLoader worker.
        with use_signal_handlers({signal.SIGCHLD: signal.SIG_DFL}):
            for pool in set(list_process_pools()) - set(pools):
                pool.terminate()
            kill_process_trees(lambda: list_children_of_this_thread() - before - list_helper_pids())
        if adopts:
            become_subreaper(False)


def list_process_pools() -> list[Any]:
    """Return the ``multiprocessing.Pool`` objects of processes in this process, except terminated pools."""
    if (module := sys.modules.get("multiprocessing.pool")) is None:
        return []
    registry: dict[Any, Any] = util._finalizer_registry  # type: ignore[attr-defined]
    # A pool registers a call that terminates the pool at the end of this process. A terminated pool is not registered.
    # A registered call without an owner has no reference.
    references = [getattr(each, "_weakref", None) for each in [*registry.values()]]
    owners = [reference() for reference in references if reference is not None]
    return [owner for owner in owners if type(owner) is module.Pool]


def kill_process_trees(roots: Callable[[], Iterable[int]]) -> None:
    """Kill the processes with the ids ``roots()`` and all descendants, and wait up to 5 s (KILL_SECONDS) for their end.

    Calls ``roots()`` and kills again until no process is left. If a process remains, does not raise an error.
    """
    deadline = time.monotonic() + KILL_SECONDS
    while (found := list_living_trees(roots())) and time.monotonic() < deadline:
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def list_living_trees(roots: Iterable[int]) -> list[int]:
    """Return the ids of the processes ``roots`` and all descendants, without processes that have exited."""
    all_processes = read_process_table()
    found = [pid for pid in roots if pid in all_processes]
    for each in found:  # zombies too, because a zombie has children while other threads of the process run
        found += [pid for pid, (parent, _) in all_processes.items() if parent == each]
    return [pid for pid in found if all_processes[pid][1]]


def list_children(pid: int, *, ended: bool = False) -> set[int]:
    """Return the ids of a process's children, with zombies only if ``ended``."""
    return {child for child, (parent, lives) in read_process_table().items() if parent == pid and (lives or ended)}


def list_children_of_this_thread() -> set[int]:
    """Return the ids of the processes that this thread has started, including zombies.

    For the main thread, includes adopted orphans. If Linux does not list the children of a thread, returns all children
    of this process.
    """
    children = list_children(os.getpid(), ended=True)
    with suppress(OSError):
        listed = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
        return children & {int(pid) for pid in listed}
    return children


def read_process_table() -> dict[int, tuple[int, bool]]:
    """Return all processes of the machine: by process id, the parent's id and whether the process is alive.

    Returns {} on systems without ``/proc``.
    """
    found: dict[int, tuple[int, bool]] = {}
    if not (folder := Path("/proc")).exists():
        return found
    for name in os.listdir(folder):  # noqa: PTH208 (with pathlib's paths, the loop takes three times as long)
        if name.isdecimal():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                # The command's name stands in parentheses and may contain spaces and parentheses.
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                found[int(name)] = (int(parent), state not in b"ZX")
    return found


def list_helper_pids() -> set[int]:
    """Return the ids of multiprocessing's resource tracker and torch's compiling process for GPUs."""
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    # Later compilations would fail without the compiling process, which is found by its command line.
    compiler = f"--parent={os.getpid()}".encode()
    found = set()
    for pid in list_children(os.getpid()):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if pid == tracker or (compiler in words and any(b"/torch/_inductor/" in word for word in words)):
                found.add(pid)
    return found


def request_stack(pid: int, pipe: Connection, seconds: float) -> str:
    """Send SIGUSR1 to a process, and return the stack that the process then writes to ``pipe``.

    Waits up to ``seconds`` for the first text, and up to 0.5 s for each further text. The process must have called
    ``faulthandler.register``, because otherwise the signal kills the process.

    Returns:
        The stack, or "" if no text comes in time or the process has ended.
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
    """Return how many processes of this process's container (cgroup) the kernel has killed for lack of memory.

    Returns 0 if the number is unknown.
    """
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, own = line.split(":", 2)
            if controllers in ("", "memory"):  # version 2 and version 1 of cgroups
                root = Path("/sys/fs/cgroup", controllers)
                name = "memory.oom_control" if controllers else "memory.events"
                for folder in (root / own.lstrip("/"), root):  # a container may see the files of its cgroup at the root
                    with suppress(OSError):
                        if count := re.search(r"^oom_kill (\d+)$", (folder / name).read_text(), re.MULTILINE):
                            return int(count[1])
    return 0
