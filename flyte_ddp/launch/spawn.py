"""Launches ranks on this machine as spawned processes, and watches over them.

This is what ``torch.multiprocessing.spawn`` does, without its import of torch, which the launcher itself does not need:
the ranks start that much earlier.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from flyte_ddp.errors import StoppedError
from flyte_ddp.job import Job
from flyte_ddp.launch.failures import cause_is_known, first_failure
from flyte_ddp.launch.rank_process import start_rank
from flyte_ddp.launch.stopping import SIGNALS, StopRequest

SETTLE_SECONDS = 0.2  # from the first failure on
LONGEST_SETTLE_SECONDS = 2.0  # the same, as long as nothing but consequences is known
JOIN_SECONDS = 10.0  # for a killed process to end, which one that sits in the kernel (NFS, a GPU's driver) does not
SAVE_SECONDS = 8.0  # for a checkpoint before a gang is ended


class Member:
    """A rank as its launcher sees it."""

    def __init__(self, rank: int, process: BaseProcess, pipe: Connection, stacks: Connection) -> None:
        self.rank, self.process, self.pipe, self.stacks = rank, process, pipe, stacks
        self.error: dict[str, Any] | None = None
        self.completed = False
        self.saved: int | None = None  # step of the checkpoint that it was asked for
        self.listening = True

    @property
    def pid(self) -> int:
        """Process id; the process has been started."""
        assert self.process.pid is not None
        return self.process.pid

    def send(self, kind: str, **values: Any) -> None:
        """Tells the rank something, if it is still there."""
        with suppress(OSError):
            self.pipe.send({"kind": kind, **values})

    def messages(self) -> Iterator[dict[str, Any]]:
        """What the rank has sent since the last call."""
        try:
            while self.listening and self.pipe.poll():
                yield self.pipe.recv()
        except (EOFError, OSError):
            self.listening = False

    def failed(self) -> bool:
        """Whether it has reported an error, or ended without having completed."""
        return self.error is not None or (self.process.exitcode is not None and not self.completed)


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
            start(gang, job, num_ranks)
            watch(gang, stop, job)
        finally:
            end(gang)


def start(gang: list[Member], job: Job, num_ranks: int) -> None:
    """Starts the ranks, one after the other, and adds them to the gang."""
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # it unblocks signals, so before they are blocked
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the ranks have their own handlers
    try:
        with main_script_hidden():
            for rank in range(num_ranks):
                pipe, its_pipe = context.Pipe()
                stacks, its_stacks = context.Pipe(duplex=False)
                process = context.Process(
                    target=start_rank, args=(job, rank, num_ranks, its_pipe, its_stacks), name=f"rank {rank}"
                )
                process.start()
                gang.append(Member(rank, process, pipe, stacks))
                its_pipe.close()  # so that the end of the rank is the end of the pipe
                its_stacks.close()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def watch(gang: Sequence[Member], stop: StopRequest, job: Job) -> None:
    """Returns when all ranks have completed; raises when one has failed, or the run is to stop."""
    while not all(member.completed for member in gang):
        listen(gang, stop)
        if any(member.failed() for member in gang):
            save(gang, stop)  # first, as rank 0 reports a failure of its own after it has saved
            settle(gang, stop)
            raise first_failure(gang, job.settings.timeout)
        if stop.signal is not None:
            step = save(gang, stop)
            if stop.signal == signal.SIGINT:
                raise KeyboardInterrupt
            raise StoppedError(stop.signal.name, step)


def listen(gang: Sequence[Member], stop: StopRequest, seconds: float | None = None) -> None:
    """Waits for a message or the end of a rank, or for a request to stop, and takes the messages in."""
    pipes = [member.pipe for member in gang if member.listening]
    alive = [member.process.sentinel for member in gang if member.process.exitcode is None]
    connection.wait([*pipes, *alive, *([] if stop.signal else [stop.reader])], seconds)
    for member in gang:
        ended = member.process.exitcode is not None  # what it sent before is in the pipe
        for message in member.messages():
            if message["kind"] == "error":
                member.error = message
            elif message["kind"] == "completed":
                member.completed = True
            elif message["kind"] == "saved":
                member.saved = message["step"]
            elif message["kind"] == "stop":
                stop.make(signal.SIGTERM)
            elif message["kind"] == "port":
                for other in gang[1:]:
                    other.send("port", port=message["port"])
        if ended:
            member.listening = False


def settle(gang: Sequence[Member], stop: StopRequest) -> None:
    """Listens for what came first: it may show itself later than its consequences."""
    begin = time.monotonic()
    while not all(member.failed() for member in gang):
        if time.monotonic() - begin > (SETTLE_SECONDS if cause_is_known(gang) else LONGEST_SETTLE_SECONDS):
            break
        listen(gang, stop, 0.1)


def save(gang: Sequence[Member], stop: StopRequest) -> int | None:
    """Has rank 0 write a checkpoint, if it is still able to; returns the step of the newest one, 0 without any."""
    leader = gang[0]
    leader.saved = None
    leader.send("save")
    deadline = time.monotonic() + SAVE_SECONDS
    while leader.saved is None and leader.listening and (left := deadline - time.monotonic()) > 0:
        listen(gang, stop, left)
    return leader.saved


def end(gang: Sequence[Member]) -> None:
    """Kills the ranks that are still there; nothing of theirs needs them for its clean-up."""
    for member in gang:
        member.process.kill()
    for member in gang:
        member.process.join(JOIN_SECONDS)
        if member.process.exitcode is not None:
            member.process.close()
        member.pipe.close()
        member.stacks.close()


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
