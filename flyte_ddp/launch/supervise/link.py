"""The pipe between a rank and its launcher: what became of the rank goes one way, an address and requests the other."""

from __future__ import annotations

import os
import pickle
import queue
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from flyte_ddp.errors import CollectiveTimeoutError, PeerGoneError, UnreachableError, UserError
from flyte_ddp.launch.supervise.network import use_network

if TYPE_CHECKING:
    from flyte_ddp.runs.job import Job

# How gloo and NCCL say, in a RuntimeError, that another rank has gone or did not come.
PEER_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "failed to recv, got 0 bytes",  # the store's server, which rank 0 holds
)
TIMED_OUT = (
    "Timed out waiting",
    "timed out",
    "wait timeout after",  # the store: a rank did not come to the process group
    "Wait timeout",  # the same, where the store is a file
    "Watchdog caught collective operation timeout",
)

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
        """Tells the launcher something."""
        with self._sending:
            self._pipe.send({"kind": kind, **values})

    def report(self, error: BaseException) -> None:
        """Tells the launcher how this rank failed."""
        self.send(**described(error))

    def job(self) -> Job:
        """What there is to do, when the launcher has said so."""
        pickled, network = self._jobs.get()
        if network:
            use_network(network)
        job: Job = pickle.loads(pickled)  # here, not while the main thread imports things, too
        return job

    def address(self, timeout: float) -> tuple[str, int]:
        """Rank 0's host and port, from rank 0 by way of the launcher; CollectiveTimeoutError after so many seconds."""
        try:
            return self._addresses.get(timeout=timeout)
        except queue.Empty:
            raise CollectiveTimeoutError(f"rank 0 did not say within {timeout:g} s where the ranks meet") from None

    def offer_saving(self, save: Callable[[], int]) -> None:
        """Takes what the launcher may ask for: to write a checkpoint at once, which returns its step."""
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
        """Does what the launcher says."""
        if message["kind"] == "job":
            saved: int = message["saved"]
            self._save = lambda: saved
            self._jobs.put((message["job"], message["network"]))
        elif message["kind"] == "address":
            self._addresses.put((message["host"], message["port"]))
        elif message["kind"] == "save":
            self.send("saved", step=self._save())

    def launcher_is_gone(self) -> None:
        """Ends this process; where Linux does it, it has been killed already."""
        os._exit(1)


def described(error: BaseException) -> dict[str, Any]:
    """What the launcher is told of a failure, whatever the error is like: a user's may be long, or fail to say it."""
    return {
        "kind": "error",
        "time": time.time(),
        "cause": cause(error),
        "type": type(error).__name__,
        "message": words(error)[0],
        "traceback": shortened("".join(traceback.format_exception(error))),
    }


def words(error: BaseException) -> tuple[str, bool]:
    """What it says, and whether that is all of it."""
    try:
        said = str(error)
    except BaseException as failure:
        return f"(what it says cannot be had, as its __str__ raises {type(failure).__name__})", False
    short = shortened(said)
    return short, short is said


def shortened(text: str) -> str:
    """A text, or the head and the tail of a long one."""
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half:,} characters left out) ...\n{text[-half:]}"


def cause(error: BaseException) -> str:
    """``mistake`` of the user's, ``unreachable`` data, ``peer`` gone, ``timeout`` of waiting for one, or ``own``."""
    if isinstance(error, UserError):
        return "unreachable" if isinstance(error, UnreachableError) else "mistake"
    if isinstance(error, PeerGoneError):
        return "peer"
    if isinstance(error, CollectiveTimeoutError):
        return "timeout"
    if isinstance(error, RuntimeError):
        said, _ = words(error)
        if any(sign in said for sign in PEER_GONE):
            return "peer"
        if any(sign in said for sign in TIMED_OUT):
            return "timeout"
    return "own"
