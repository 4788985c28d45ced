"""A rank as its launcher sees it."""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from flyte_ddp.process import out_of_memory_kills

if TYPE_CHECKING:
    from flyte_ddp.runs.job import Job

MESSAGES_AT_ONCE = 100  # so that others, and requests to stop, are heard while a rank talks without pause


class RankHandle:
    """A rank as its launcher sees it. Launchers differ in how it is started and how it ends.

    Args:
        rank: its number.
        pipe: to the rank, or to its agent.
        host: the address at which other ranks reach it.
    """

    def __init__(self, rank: int, pipe: Connection, host: str) -> None:
        self.rank, self.pipe, self.host = rank, pipe, host
        self.sending = threading.Lock()
        self.network = ""  # address of the interface over which it should talk to other ranks; empty: any
        self.error: dict[str, Any] | None = None
        self.completed = False
        self.saved: int | None = None  # step of the checkpoint that it was asked for
        self.sentinel: Any = None  # what becomes ready when its process ends; None: an agent says so through the pipe
        self.listening = True
        self.resumes_after = 0  # step of the checkpoint that its job resumes from
        self.clock_behind = 0.0  # seconds from its host's clock to the launcher's; both are ``time.monotonic()``
        self.exitcode: int | None = None  # of its process; None as long as that is not known
        self.memory_kills = out_of_memory_kills()  # on this host, before its process can be one of them

    def has_begun(self) -> bool:
        """Return whether the process of the rank has started, so that it answers."""
        return True

    def has_ended(self) -> bool:
        """Look for the exit code of its process, and return whether there is one."""
        return self.exitcode is not None

    @property
    def lost(self) -> bool:
        """Whether nobody knows any more what became of its process."""
        return False

    def ran_out_of_memory(self) -> bool:
        """Return whether the kernel has killed a process of this host's cgroup for lack of memory since the start."""
        return out_of_memory_kills() > self.memory_kills

    def waitables(self) -> list[Any]:
        """Return what becomes ready when the rank sends something or ends."""
        end = [self.sentinel] if self.sentinel is not None and self.exitcode is None else []
        return [*end, *([self.pipe] if self.listening else [])]

    def stack(self) -> str:
        """Return its Python stack, which the rank writes even while it runs no Python code; empty if none comes."""
        raise NotImplementedError

    def kill(self) -> None:
        """End its process, whatever that is doing; all ranks of its group end with it."""
        raise NotImplementedError

    def close(self) -> None:
        """Wait for up to 10 s for the end of a process that was killed, and close the pipes."""
        raise NotImplementedError

    def hand_over(self, job: Job) -> None:
        """Send the rank its job."""
        self.resumes_after = job.checkpoint.step if job.checkpoint else 0
        self.send("job", job=pickle.dumps(self.localize(job)), saved=self.resumes_after, network=self.network)

    def localize(self, job: Job) -> Job:
        """Return the job with the paths that its files have where the rank is."""
        return job

    def send(self, kind: str, **values: Any) -> None:
        """Send the rank a message, if it is still there; from any thread."""
        with self.sending, suppress(OSError):
            self.pipe.send({"kind": kind, **values})

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield what the rank has sent since the last call; up to MESSAGES_AT_ONCE of a rank that still runs."""
        left = MESSAGES_AT_ONCE if self.exitcode is None else math.inf
        try:
            while self.listening and left > 0 and self.pipe.poll():
                yield self.pipe.recv()
                left -= 1
        except (EOFError, OSError):
            self.listening = False

    def failed(self) -> bool:
        """Return whether it has reported an error, or ended without having completed."""
        return self.error is not None or (not self.completed and (self.exitcode is not None or self.lost))
