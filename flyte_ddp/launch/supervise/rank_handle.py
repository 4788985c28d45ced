"""A rank as its launcher sees it."""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from flyte_ddp.launch.supervise.handed_in import Inbox
from flyte_ddp.process import out_of_memory_kills

if TYPE_CHECKING:
    from flyte_ddp.runs.job import Job

MESSAGES_AT_ONCE = 100  # so that others, and requests to stop, are heard while a rank talks without pause


class RankHandle:
    """A rank as its launcher sees it. How it is started and how it ends is what launchers differ in.

    Args:
        rank: which one.
        pipe: to it.
        host: under which address the other ranks reach it.
    """

    def __init__(self, rank: int, pipe: Connection, host: str) -> None:
        self.rank, self.pipe, self.host = rank, pipe, host
        self.sending = threading.Lock()
        self.network = ""  # address of the interface that it should talk over to other ranks, if that matters
        self.error: dict[str, Any] | None = None
        self.completed = False
        self.saved: int | None = None  # step of the checkpoint that it was asked for
        self.listening = True
        self.inbox: Inbox | None = None  # from when it is handed its job
        self.resumes_after = 0  # step of the checkpoint that its job goes on from
        self.clock_behind = 0.0  # seconds from its host's clock to the launcher's; both are ``time.monotonic()``
        self.exitcode: int | None = None  # of its process; None as long as that is not known
        self.memory_kills = out_of_memory_kills()  # on this host, before its process can be one of them

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

    def ran_out_of_memory(self) -> bool:
        """Return whether the kernel has killed a process of this host's cgroup for lack of memory since the start."""
        return out_of_memory_kills() > self.memory_kills

    def waitables(self) -> list[Any]:
        """What becomes ready when there is something new about it."""
        raise NotImplementedError

    def stack(self) -> str:
        """Where it is, by its own account, which takes no Python code to run; empty if it says nothing."""
        raise NotImplementedError

    def kill(self) -> None:
        """Ends its process, whatever that is doing, as all of its group end."""
        raise NotImplementedError

    def close(self) -> None:
        """Waits a little for the end of a process that was killed, and lets go of what there was."""
        raise NotImplementedError

    def hand_over(self, job: Job) -> None:
        """Send the rank its job."""
        self.inbox = Inbox(job.run_folder, lambda: self.send("written"))
        self.resumes_after = job.checkpoint.step if job.checkpoint else 0
        self.send("job", job=pickle.dumps(self.localized(job)), saved=self.resumes_after, network=self.network)

    def localized(self, job: Job) -> Job:
        """Return the job with the paths that its files have where the rank is."""
        return job

    def send(self, kind: str, **values: Any) -> None:
        """Tells the rank something, if it is still there; from any thread."""
        with self.sending, suppress(OSError):
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
