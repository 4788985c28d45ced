"""A rank's end of the pipe to its launcher: reports go to the launcher, the job and requests come from it."""

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
from flyte_ddp.launch.supervise.network import set_network_interface

if TYPE_CHECKING:
    from flyte_ddp.runs.job import Job

MAX_CHARACTERS = 20_000  # of an error's message, and of its traceback


class Link:
    """A rank's connection to its launcher. Starts a thread that handles messages whatever the rank is doing.

    Args:
        pipe: connection to the launcher.
        saved: step of the checkpoint that the run resumes from; 0 without one, or if the job is still to come.
    """

    def __init__(self, pipe: Connection, saved: int = 0) -> None:
        self._pipe = pipe
        self._sending = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[bytes, str]] = queue.SimpleQueue()
        self._addresses: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._save: Callable[[], int] = lambda: saved
        threading.Thread(target=self._listen, name="launcher", daemon=True).start()

    def send(self, kind: str, **values: Any) -> None:
        """Send the launcher a message, from any thread; wait until the pipe has taken it.

        Does nothing if the launcher is gone. An exception would replace the error that the rank is reporting, and the
        listening thread ends this process anyway.
        """
        with self._sending, suppress(OSError):
            self._pipe.send({"kind": kind, **values})

    def report_error(self, error: BaseException) -> None:
        """Send the launcher the error that this rank failed with."""
        self.send(**describe_error(error))

    def receive_job(self) -> Job:
        """Wait for the job, without a limit, and return it.

        Sets gloo's and NCCL's variables of the environment to the network interface that the launcher names.
        """
        pickled, network = self._jobs.get()
        if network:
            set_network_interface(network)
        job: Job = pickle.loads(pickled)  # in the main thread: two threads that import at once may deadlock
        return job

    def receive_address(self, timeout: float) -> tuple[str, int]:
        """Wait for host and port of rank 0's store, which the launcher passes on, and return them.

        Raises:
            CollectiveTimeoutError: nothing has come within ``timeout`` seconds.
        """
        try:
            return self._addresses.get(timeout=timeout)
        except queue.Empty:
            raise CollectiveTimeoutError(f"rank 0 did not say within {timeout:g} s where the ranks meet") from None

    def set_save_function(self, save: Callable[[], int]) -> None:
        """Set the function that is called when the launcher asks for a checkpoint.

        Args:
            save: writes a checkpoint and returns its step; is called in the listening thread.
        """
        self._save = save

    def _listen(self) -> None:
        """Handle the launcher's messages until the connection ends; an exception is reported and ends this process."""
        try:
            while True:
                self.handle_message(self._pipe.recv())
        except (EOFError, OSError):
            self.handle_lost_launcher()
        except Exception as error:  # nobody else would notice that this rank hears nothing any more
            self.report_error(error)
            os._exit(1)

    def handle_message(self, message: dict[str, Any]) -> None:
        """Do what a message of the launcher's asks for: take the job or an address, or write a checkpoint."""
        if message["kind"] == "job":
            saved: int = message["saved"]
            self._save = lambda: saved
            self._jobs.put((message["job"], message["network"]))
        elif message["kind"] == "address":
            self._addresses.put((message["host"], message["port"]))
        elif message["kind"] == "save":
            self.send("saved", step=self._save())

    def handle_lost_launcher(self) -> None:
        """End this process with exit code 1. On Linux the kernel has killed it already, with its launcher."""
        os._exit(1)


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return the message that reports a failure: time, cause, type, text and traceback; these two are shortened."""
    raised = error.__cause__ if type(error) is CollectiveError and error.__cause__ else error  # torch's own error
    return {
        "kind": "error",
        "time": time.monotonic(),
        "cause": classify_failure(error),
        "type": type(raised).__name__,
        "message": exception_message(raised),
        "traceback": shorten("".join(traceback.format_exception(error))),
    }


def exception_message(error: BaseException) -> str:
    """Return the text of an exception, shortened to MAX_CHARACTERS; a placeholder if its ``__str__`` raises."""
    return shorten(str(traceback.TracebackException.from_exception(error)))


def shorten(text: str) -> str:
    """Return a text unchanged, or the head and the tail of a text of more than MAX_CHARACTERS."""
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half:,} characters left out) ...\n{text[-half:]}"


def classify_failure(error: BaseException) -> str:
    """Return why a rank failed, by the types of its exception and of that exception's causes; imports no torch.

    Returns:
        ``mistake``: a UserError. ``unreachable``: an UnreachableError. ``timeout``: a collective operation has waited
        for FLYTE_DDP_TIMEOUT. ``peer``: a collective operation failed earlier. ``own``: anything else.
    """
    if isinstance(error, UserError):
        return "unreachable" if isinstance(error, UnreachableError) else "mistake"
    # NCCL and torch's stores raise DistError. Without torch there is none, and CollectiveError stands in.
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
