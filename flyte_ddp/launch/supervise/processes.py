"""Ranks that are children of this process."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

from flyte_ddp.launch.supervise.rank_handle import RankHandle
from flyte_ddp.launch.supervise.rank_process import RankInfo, start_rank
from flyte_ddp.launch.supervise.stopping import SIGNALS

HOST = "127.0.0.1"
JOIN_SECONDS = 10.0  # for a killed process to end, which one that sits in the kernel (NFS, a GPU's driver) does not
STACK_SECONDS = 1.0


class ProcessHandle(RankHandle):
    """A rank that is a child of this process. The rank writes its stack to ``stacks`` on SIGUSR1."""

    def __init__(self, rank: int, process: BaseProcess, pipe: Connection, stacks: Connection) -> None:
        super().__init__(rank, pipe, HOST)
        self.process, self.stacks, self.sentinel = process, stacks, process.sentinel
        self.pid = process.pid

    def poll_exit(self) -> bool:
        """Set ``exitcode`` if the rank's process has ended; return whether it has."""
        self.exitcode = self.process.exitcode
        return self.exitcode is not None

    def read_stack(self) -> str:
        """Send the rank SIGUSR1, on which it writes its Python stack, even while it is in C code; return the stack.

        Returns an empty string if the rank has ended, or nothing comes within STACK_SECONDS.
        """
        number = self.pid or self.process.pid
        if self.poll_exit() or number is None:
            return ""
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGUSR1)
        stack, deadline = b"", time.monotonic() + STACK_SECONDS
        while self.stacks.poll(0.1 if stack else max(0.0, deadline - time.monotonic())):
            if not (chunk := os.read(self.stacks.fileno(), 1 << 16)):
                break
            stack += chunk
        return stack.decode(errors="replace").strip()

    def kill(self) -> None:
        """Send the rank's process SIGKILL; do not wait for its end."""
        self.process.kill()

    def close(self) -> None:
        """Wait up to JOIN_SECONDS for the end of the rank's process, and close the pipes."""
        self.process.join(JOIN_SECONDS)
        self.pipe.close()
        self.stacks.close()


def start_process(group: list[RankHandle], info: RankInfo) -> None:
    """Start a rank as a spawned process, which waits for its job, and append its handle to the group."""
    with spawn_context() as context:
        pipe, its_pipe = context.Pipe()
        stacks, its_stacks = context.Pipe(duplex=False)
        process = context.Process(target=start_rank, args=(info, its_pipe, its_stacks), name=f"rank {info.rank}")
        process.start()
        group.append(ProcessHandle(info.rank, process, pipe, stacks))
        its_pipe.close()  # so that the end of the rank is the end of the pipe
        its_stacks.close()


@contextmanager
def spawn_context() -> Iterator[SpawnContext]:
    """Yield multiprocessing's spawn context; processes that are started in the block begin with SIGNALS blocked.

    SIGNALS are blocked in this thread, too, until the end. Spawned processes do not run this process's main script.
    """
    resource_tracker.ensure_running()  # before signals are blocked, because it unblocks them
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        with hide_main_script():
            yield multiprocessing.get_context("spawn")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@contextmanager
def hide_main_script() -> Iterator[None]:
    """Keep processes that are spawned during the block from running the main script again.

    Removes ``__file__`` and ``__spec__`` from the main module, and restores them. Saves 0.7 s a process with pyflyte.
    """
    main = vars(sys.modules["__main__"])
    before: dict[str, Any] = {name: main[name] for name in ("__file__", "__spec__") if name in main}
    main.pop("__file__", None)
    main["__spec__"] = None
    try:
        yield
    finally:
        main.update(before)
