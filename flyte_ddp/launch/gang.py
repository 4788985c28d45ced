"""The ranks of a run as their launcher sees them: it listens to them, and ends all of them when one has failed.

How a rank is started, and how its launcher learns that it has ended, is what launchers differ in; see :class:`Member`.
"""

from __future__ import annotations

import math
import pickle
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from flyte_ddp import results
from flyte_ddp.launch.failures import cause_is_known, did_not_begin, first_failure
from flyte_ddp.launch.stopping import StopRequest

if TYPE_CHECKING:
    from flyte_ddp.job import Job

SETTLE_SECONDS = 0.2  # from the first failure on
LONGEST_SETTLE_SECONDS = 2.0  # the same, as long as nothing but consequences is known
MESSAGES_AT_ONCE = 100  # so that others, and requests to stop, are heard while a rank talks without pause
SAVE_SECONDS = 8.0  # for a checkpoint before a gang is ended
BEGIN_SECONDS = 300.0  # for an import of torch, which a network's file system draws out


class Member:
    """A rank as its launcher sees it.

    Args:
        rank: which one.
        pipe: to it.
        host: under which address the other ranks reach it.
    """

    def __init__(self, rank: int, pipe: Connection, host: str) -> None:
        self.rank, self.pipe, self.host = rank, pipe, host
        self.error: dict[str, Any] | None = None
        self.completed = False
        self.saved: int | None = None  # step of the checkpoint that it was asked for
        self.listening = True
        self.result_writer: results.ResultWriter  # from when it is handed its job
        self.resumes_after = 0  # step of the checkpoint that its job goes on from
        self.exitcode: int | None = None  # of its process; None as long as that is not known

    def has_begun(self) -> bool:
        """Whether there is somebody who listens."""
        return True

    def has_ended(self) -> bool:
        """Whether its process has; looks for its exit code, which nothing else does."""
        return self.exitcode is not None

    @property
    def lost(self) -> bool:
        """Whether nobody knows any more what became of its process."""
        return False

    def waitables(self) -> list[Any]:
        """What becomes ready when there is something new about it."""
        raise NotImplementedError

    def stack(self) -> str:
        """Where it is, by its own account, which takes no Python code to run; empty if it says nothing."""
        raise NotImplementedError

    def kill(self) -> None:
        """Ends its process, whatever that is doing."""
        raise NotImplementedError

    def close(self) -> None:
        """Waits a little for the end of a process that was killed, and lets go of what there was."""
        raise NotImplementedError

    def hand_over(self, job: Job) -> None:
        """Tells the rank what there is to do."""
        self.result_writer = results.ResultWriter(job.run_folder)
        self.resumes_after = job.checkpoint.step if job.checkpoint else 0
        self.send("job", job=pickle.dumps(job), saved=self.resumes_after)

    def send(self, kind: str, **values: Any) -> None:
        """Tells the rank something, if it is still there."""
        with suppress(OSError):
            self.pipe.send({"kind": kind, **values})

    def messages(self) -> Iterator[dict[str, Any]]:
        """What the rank has sent since the last call; of one that is still there not more than some at a time."""
        left = MESSAGES_AT_ONCE if self.exitcode is None else math.inf
        try:
            while self.listening and left > 0 and self.pipe.poll():
                yield self.pipe.recv()
                left -= 1
        except (EOFError, OSError):
            self.listening = False

    def failed(self) -> bool:
        """Whether it has reported an error, or ended without having completed."""
        return self.error is not None or (not self.completed and (self.exitcode is not None or self.lost))


def watch(gang: Sequence[Member], stop: StopRequest, job: Job) -> None:
    """Returns when all ranks have completed; raises when one has failed, or the run is to stop."""
    deadline = time.monotonic() + BEGIN_SECONDS
    while not all(member.completed for member in gang):
        late = next((member for member in gang if not member.has_begun()), None)
        listen(gang, stop, max(0.0, deadline - time.monotonic()) if late else None)
        if any(member.failed() for member in gang):
            save(gang, stop)  # first, as rank 0 reports a failure of its own after it has saved
            settle(gang, stop)
            raise first_failure(gang, job.settings.timeout)
        if stop.signal is not None:
            raise stop.error(save(gang, stop))
        if late and not late.has_begun() and time.monotonic() >= deadline:
            raise did_not_begin(late, BEGIN_SECONDS)


def listen(gang: Sequence[Member], stop: StopRequest, seconds: float | None = None) -> None:
    """Waits for a message or the end of a rank, or for a request to stop, and takes the messages in."""
    waitables = [waitable for member in gang for waitable in member.waitables()]
    connection.wait([*waitables, *([] if stop.signal else [stop.reader])], seconds)
    for member in gang:
        member.has_ended()  # looked for first: what it sent before is then in the pipe
        for message in member.messages():
            take_in(message, member, gang, stop)
        if member.exitcode is not None:  # which of a rank on another host is its last message
            member.listening = False


def take_in(message: dict[str, Any], member: Member, gang: Sequence[Member], stop: StopRequest) -> None:
    """Takes in what one of the ranks has sent."""
    kind = message["kind"]
    if kind == "error":
        member.error = message
    elif kind == "completed":
        member.completed = True
    elif kind == "saved":
        member.saved = message["step"]
    elif kind == "stop":
        stop.make(signal.SIGTERM)
    elif kind == "port":
        for other in gang[1:]:
            other.send("address", host=member.host, port=message["port"])
    elif kind in results.KINDS:
        member.result_writer.write(**message)


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
    if not leader.has_begun():
        return leader.resumes_after
    leader.saved = None
    leader.send("save")
    deadline = time.monotonic() + SAVE_SECONDS
    while leader.saved is None and leader.listening and (left := deadline - time.monotonic()) > 0:
        listen(gang, stop, left)
    return leader.saved


def end(gang: Sequence[Member]) -> None:
    """Kills the ranks that are still there; nothing of theirs needs them for its clean-up."""
    for member in gang:
        member.kill()
    for member in gang:
        member.close()
