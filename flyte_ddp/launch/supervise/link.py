"""The pipe between a rank and its launcher: what became of the rank goes one way, an address and requests the other."""

from __future__ import annotations

import os
import pickle
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from flyte_ddp.errors import CollectiveError, CollectiveTimeoutError, UnreachableError, UserError
from flyte_ddp.launch.supervise.network import use_network

if TYPE_CHECKING:
    from flyte_ddp.runs.job import Job

MOST_CHARACTERS = 20_000  # of what an error says, and of its traceback


class Link:
    """A rank's end of the pipe. A thread listens to the launcher, so that it is heard whatever the rank is doing.

    Args:
        pipe: to the launcher.
        saved: step of the checkpoint that the run goes on from, where that is known already; 0 without one.
    """

    def __init__(self, pipe: Connection, saved: int = 0) -> None:
        self._pipe = pipe
        self._sending = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[bytes, str]] = queue.SimpleQueue()
        self._addresses: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._save: Callable[[], int] = lambda: saved
        threading.Thread(target=self._listen, name="launcher", daemon=True).start()

    def send(self, kind: str, **values: Any) -> None:
        """Send the launcher a message; waits until the pipe has taken it.

        A launcher that is gone gets nothing, and no exception says so: the thread that listens notices it as well, and
        sees to the end of this process. Here it would take the place of what the rank has to report.
        """
        with self._sending, suppress(OSError):
            self._pipe.send({"kind": kind, **values})

    def report(self, error: BaseException) -> None:
        """Tell the launcher how this rank failed."""
        self.send(**describe_error(error))

    def job(self) -> Job:
        """Wait for the job and return it; has the ranks talk over the network interface that the launcher names."""
        pickled, network = self._jobs.get()
        if network:
            use_network(network)
        job: Job = pickle.loads(pickled)  # in the main thread: two threads that import at once may deadlock
        return job

    def address(self, timeout: float) -> tuple[str, int]:
        """Wait for rank 0's host and port, which come from rank 0 by way of the launcher.

        Raises:
            CollectiveTimeoutError: they have not come within ``timeout`` seconds.
        """
        try:
            return self._addresses.get(timeout=timeout)
        except queue.Empty:
            raise CollectiveTimeoutError(f"rank 0 did not say within {timeout:g} s where the ranks meet") from None

    def offer_saving(self, save: Callable[[], int]) -> None:
        """Take the function that writes a checkpoint at once and returns its step, for when the launcher asks."""
        self._save = save

    def _listen(self) -> None:
        try:
            while True:
                self.hear(self._pipe.recv())
        except (EOFError, OSError):
            self.launcher_is_gone()
        except Exception as error:  # nobody else would notice that this rank hears nothing any more
            self.report(error)
            os._exit(1)

    def hear(self, message: dict[str, Any]) -> None:
        """Do what a message of the launcher's asks for."""
        if message["kind"] == "job":
            saved: int = message["saved"]
            self._save = lambda: saved
            self._jobs.put((message["job"], message["network"]))
        elif message["kind"] == "address":
            self._addresses.put((message["host"], message["port"]))
        elif message["kind"] == "save":
            self.send("saved", step=self._save())

    def launcher_is_gone(self) -> None:
        """End this process, off Linux, where the kernel does not kill it with its launcher."""
        os._exit(1)


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return the message that reports a failure: type, text and traceback, each of bounded length."""
    raised = error.__cause__ if type(error) is CollectiveError and error.__cause__ else error  # torch's own error
    return {
        "kind": "error",
        "time": time.monotonic(),
        "cause": classify_error(error),
        "type": type(raised).__name__,
        "message": exception_message(raised),
        "traceback": shorten("".join(traceback.format_exception(error))),
    }


def exception_message(error: BaseException) -> str:
    """Return the text of an exception, shortened if it is long, and as tracebacks have it if its ``__str__`` fails."""
    return shorten(str(traceback.TracebackException.from_exception(error)))


def shorten(text: str) -> str:
    """Return a text, or the head and the tail of one of more than MOST_CHARACTERS."""
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half:,} characters left out) ...\n{text[-half:]}"


def classify_error(error: BaseException) -> str:
    """Tell why a rank failed, by the type of what it raised, and of what that was raised ``from``; imports no torch.

    Returns:
        ``mistake`` of the user's, ``unreachable`` data, ``timeout`` or ``peer`` for a collective operation that failed,
        the first only where the rank has waited for FLYTE_DDP_TIMEOUT, and ``own`` for anything else.
    """
    if isinstance(error, UserError):
        return "unreachable" if isinstance(error, UnreachableError) else "mistake"
    # A DistError comes from NCCL or a store.
    of_torch = getattr(sys.modules.get("torch.distributed"), "DistError", CollectiveError)
    origin: BaseException | None = error
    seen: set[int] = set()  # `raise error from error` is its own cause
    while origin is not None and id(origin) not in seen:
        seen.add(id(origin))
        if isinstance(origin, CollectiveTimeoutError):
            return "timeout"
        if isinstance(origin, (CollectiveError, of_torch)):
            return "peer"
        origin = origin.__cause__
    return "own"
