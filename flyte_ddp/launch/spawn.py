"""Launches ranks on this machine as spawned processes, and watches over them.

This is what ``torch.multiprocessing.spawn`` does, without its import of torch, which the launcher itself does not need:
the ranks start that much earlier.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from flyte_ddp.launch.gang import Member, end, watch
from flyte_ddp.launch.place import Place
from flyte_ddp.launch.rank_process import start_rank
from flyte_ddp.launch.stopping import SIGNALS, StopRequest

if TYPE_CHECKING:
    from flyte_ddp.job import Job

HOST = "127.0.0.1"
JOIN_SECONDS = 10.0  # for a killed process to end, which one that sits in the kernel (NFS, a GPU's driver) does not
STACK_SECONDS = 1.0


class ProcessMember(Member):
    """A rank that is a process of this one's."""

    def __init__(self, rank: int, process: BaseProcess, pipe: Connection, stacks: Connection) -> None:
        super().__init__(rank, pipe, HOST)
        self.process, self.stacks = process, stacks

    def has_ended(self) -> bool:
        """See :class:`Member`."""
        self.exitcode = self.process.exitcode
        return self.exitcode is not None

    def waitables(self) -> list[Any]:
        """Its pipe and its process."""
        alive = [self.process.sentinel] if self.exitcode is None else []
        return [*alive, *([self.pipe] if self.listening else [])]

    def stack(self) -> str:
        """See :class:`Member`."""
        assert self.process.pid is not None
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        written, deadline = b"", time.monotonic() + STACK_SECONDS
        while self.stacks.poll(0.1 if written else max(0.0, deadline - time.monotonic())):
            if not (chunk := os.read(self.stacks.fileno(), 1 << 16)):
                break
            written += chunk
        return written.decode(errors="replace").strip()

    def kill(self) -> None:
        """See :class:`Member`."""
        self.process.kill()

    def close(self) -> None:
        """See :class:`Member`."""
        self.process.join(JOIN_SECONDS)
        if self.process.exitcode is not None:
            self.process.close()
        self.pipe.close()
        self.stacks.close()


def launch(job: Job, *, num_ranks: int) -> None:
    """Runs the job on ``num_ranks`` processes.

    Raises:
        UserError: the user's mistake, as the rank that failed first reported it.
        RankError: any other failure of a rank, named by the rank that failed first.
        StoppedError: the process got SIGTERM; for Ctrl-C it is a KeyboardInterrupt.

    """
    gang: list[Member] = []
    with StopRequest() as stop:
        try:
            start(gang, [Place(rank, num_ranks, device=rank) for rank in range(num_ranks)])
            for member in gang:
                member.hand_over(job)
            watch(gang, stop, job)
        finally:
            end(gang)


def start(gang: list[Member], places: Iterable[Place]) -> None:
    """Starts some of a run's ranks, one after the other, and adds them to the gang; they wait for their job."""
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # it unblocks signals, so before they are blocked
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the ranks have their own handlers
    try:
        with main_script_hidden():
            for place in places:
                pipe, its_pipe = context.Pipe()
                stacks, its_stacks = context.Pipe(duplex=False)
                process = context.Process(
                    target=start_rank, args=(place, its_pipe, its_stacks), name=f"rank {place.rank}"
                )
                process.start()
                gang.append(ProcessMember(place.rank, process, pipe, stacks))
                its_pipe.close()  # so that the end of the rank is the end of the pipe
                its_stacks.close()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@contextmanager
def main_script_hidden() -> Iterator[None]:
    """Keeps spawned processes from running this process's main script (``pyflyte``) again, which costs 0.7 s each."""
    main = sys.modules["__main__"]
    file, spec = getattr(main, "__file__", None), main.__spec__
    if file is not None:
        del main.__file__
    main.__spec__ = None
    try:
        yield
    finally:
        main.__spec__ = spec
        if file is not None:
            main.__file__ = file
