"""A rank's connection to its launcher. Imports no torch."""

import os
import pickle
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from flyte_ddp.core.errors import CollectiveTimeoutError
from flyte_ddp.core.launch.supervise.failure_report import make_failure_report
from flyte_ddp.core.launch.supervise.messages import Assignment, Message, Save, Saved, StoreAddress
from flyte_ddp.core.launch.supervise.network import set_network_interface
from flyte_ddp.core.runs.checkpoint import Handover

SaveFunction = Callable[[float], int]  # saves a checkpoint within so many seconds; returns the newest checkpoint's step
OfferSaving = Callable[[SaveFunction], None]
StandIn = Callable[[Handover], int | None]  # saves in rank 0's place; returns the newest checkpoint's step, or None


@dataclass(frozen=True)
class RankInfo:
    """The place of a rank in its run."""

    rank: int
    world_size: int
    local_rank: int  # the number of its GPU among the GPUs that its process sees
    function: str = ""  # of the work; the rank imports its module while waiting for the work
    device_type: str = ""  # of the rank
    store: str = ""  # file of the store in which ranks of a single host find each other (Rank.join)


class PipeEnd:
    """An end of the pipe between a rank and its launcher."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self._sending = pipe, threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message, from any thread.

        Waits without a limit while the pipe is full. If the other side has ended, does nothing.
        """
        with self._sending, suppress(OSError):
            self.pipe.send(message)


class Link(PipeEnd):
    """A rank's connection to its launcher, with a thread that handles messages at any time.

    ``resumed_step`` is the step of the checkpoint from which the run resumes. Without a checkpoint, or before the work
    comes, the step is 0.
    """

    def __init__(self, pipe: Connection, resumed_step: int = 0) -> None:
        super().__init__(pipe)
        self._assignments = queue.SimpleQueue[Assignment]()
        self._addresses = queue.SimpleQueue[StoreAddress]()
        self._save: SaveFunction = lambda _: resumed_step
        self._stand_in: StandIn = lambda _: None
        threading.Thread(target=self._listen, name="launcher", daemon=True).start()

    def report_error(self, error: BaseException) -> None:
        self.send(make_failure_report(error))

    def receive_work(self) -> Any:
        """Wait for the Work without a limit, and return the Work.

        Imports the modules of the Work's classes. Sets the environment variables of the network interface that the
        launcher names.
        """
        assignment = self._assignments.get()
        if assignment.network:
            set_network_interface(assignment.network)
        return pickle.loads(assignment.work)  # in the main thread: two threads that import at once may deadlock

    def receive_address(self, timeout: float) -> StoreAddress:
        """Wait for the address of rank 0's store.

        Raises:
            CollectiveTimeoutError: No address has come within ``timeout`` seconds.
        """
        try:
            return self._addresses.get(timeout=timeout)
        except queue.Empty:
            raise CollectiveTimeoutError(
                f"rank 0 did not publish the rendezvous address within {timeout:g} s"
            ) from None

    def offer_saving(self, save: SaveFunction) -> None:
        self._save = save

    def offer_standing_in(self, stand_in: StandIn) -> None:
        """Let the launcher request a checkpoint from this rank when rank 0 is lost."""
        self._stand_in = stand_in

    def _listen(self) -> None:
        """Handle messages in the link's thread until the pipe ends. Then end this process with exit code 1.

        If a message cannot be handled, reports the error and ends this process in the same way.
        """
        while True:
            try:
                message = self.pipe.recv()
            except (EOFError, OSError):
                os._exit(1)  # on Linux, the kernel has already killed this process together with its launcher
            try:
                self.handle_message(message)
            except Exception as error:  # otherwise this rank would receive no messages, undetected
                self.report_error(error)
                os._exit(1)

    def handle_message(self, message: Message) -> None:
        """Store the work or rank 0's address for the main thread, or save a checkpoint and answer with its step."""
        match message:
            case Assignment():
                self._save = lambda _: message.resumed_step
                self._assignments.put(message)
            case StoreAddress():
                self._addresses.put(message)
            case Save(seconds):
                self.send(Saved(self._save(seconds)))
            case Handover():
                self.send(Saved(self._stand_in(message)))
