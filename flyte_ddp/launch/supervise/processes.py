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
    """A rank that is a child of this process."""

    def __init__(self, rank: int, process: BaseProcess, pipe: Connection, stacks: Connection) -> None:
        super().__init__(rank, pipe, HOST)
        self.process, self.stacks, self.sentinel = process, stacks, process.sentinel
        self.pid = process.pid

    def has_ended(self) -> bool:
        """See :class:`RankHandle`."""
        self.exitcode = self.process.exitcode
        return self.exitcode is not None

    def stack(self) -> str:
        """See :class:`RankHandle`."""
        number = self.pid or self.process.pid
        if self.has_ended() or number is None:
            return ""
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGUSR1)
        written, deadline = b"", time.monotonic() + STACK_SECONDS
        while self.stacks.poll(0.1 if written else max(0.0, deadline - time.monotonic())):
            if not (chunk := os.read(self.stacks.fileno(), 1 << 16)):
                break
            written += chunk
        return written.decode(errors="replace").strip()

    def kill(self) -> None:
        """See :class:`RankHandle`."""
        self.process.kill()

    def close(self) -> None:
        """See :class:`RankHandle`."""
        self.process.join(JOIN_SECONDS)
        self.pipe.close()
        self.stacks.close()


def start(group: list[RankHandle], info: RankInfo) -> None:
    """Start a rank as a process of its own and add it to the group; it waits for its job."""
    with starting() as context:
        pipe, its_pipe = context.Pipe()
        stacks, its_stacks = context.Pipe(duplex=False)
        process = context.Process(target=start_rank, args=(info, its_pipe, its_stacks), name=f"rank {info.rank}")
        process.start()
        group.append(ProcessHandle(info.rank, process, pipe, stacks))
        its_pipe.close()  # so that the end of the rank is the end of the pipe
        its_stacks.close()


@contextmanager
def starting() -> Iterator[SpawnContext]:
    """Block SIGNALS during the block, so that processes started in it begin with them blocked; give their context."""
    resource_tracker.ensure_running()  # before signals are blocked, as it unblocks them
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        with main_script_hidden():
            yield multiprocessing.get_context("spawn")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@contextmanager
def main_script_hidden() -> Iterator[None]:
    """Keep spawned processes from running this process's main script (``pyflyte``) again, which costs 0.7 s each."""
    main = vars(sys.modules["__main__"])
    before: dict[str, Any] = {name: main[name] for name in ("__file__", "__spec__") if name in main}
    main.pop("__file__", None)
    main["__spec__"] = None
    try:
        yield
    finally:
        main.update(before)
