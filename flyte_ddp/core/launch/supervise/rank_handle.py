"""The launcher's handles of ranks. A ProcessHandle is for a rank that is a child of this process."""

import math
import pickle
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from flyte_ddp.core.launch.supervise.failure_report import FailureReport
from flyte_ddp.core.launch.supervise.link import PipeEnd
from flyte_ddp.core.launch.supervise.messages import Assignment, Message, Notice, Saved
from flyte_ddp.core.launch.supervise.network import LOOPBACK
from flyte_ddp.core.machine.process import count_out_of_memory_kills, request_stack

READ_SECONDS = 0.1  # for messages of one rank, so that many messages delay neither other ranks nor requests to stop
JOIN_SECONDS = 10.0  # for a killed process to end; a process blocked in the kernel (NFS, a GPU's driver) does not
STACK_SECONDS = 1.0


class RankHandle(PipeEnd):
    """A launcher's knowledge of a rank, and its messages to the rank.

    ``pipe`` leads to the rank or to the rank's agent.
    """

    def __init__(self, rank: int, pipe: Connection, host: str) -> None:
        super().__init__(pipe)
        self.rank = rank
        self.host = host  # the address at which other ranks reach the rank
        self.sees_run_folder = True  # whether the rank writes into the launcher's output folder
        self.network = ""  # address of the interface for connections to other ranks; empty: any
        self.listening = True  # whether more messages may come through the pipe
        self.sentinel: Any = None  # becomes ready when the process ends; None: an agent sends a message instead
        self.exitcode: int | None = None  # of the rank's process; negative: a signal's number; None: not known yet
        self.report: FailureReport | None = None  # of the rank's failure
        self.completed = False  # whether the rank has reported that it has completed
        self.resumed_step = 0  # step of the checkpoint that the work resumes from
        self.answered = False  # whether the rank has answered a request for a checkpoint
        self.saved: int | None = None  # step of that checkpoint; None: the rank has no state to save
        self.last_write = -math.inf  # when the rank ended writing a checkpoint; infinite while it writes
        self.has_resumed = False  # whether the rank has just resumed from a checkpoint
        self.stop_requested = False  # whether the rank, or its agent, got SIGTERM
        self.memory_kills = count_out_of_memory_kills()  # on this host, before the rank's process starts

    def has_started(self) -> bool:
        """Return whether the rank was sent its work. A rank without work answers no message."""
        return True

    def poll_exit(self) -> bool:
        """Set ``exitcode`` if the rank's process has ended, and return whether the process has ended."""
        return self.exitcode is not None

    @property
    def lost(self) -> bool:
        """Whether the connection to an agent has ended before the exit code came. The exit code then stays unknown."""
        return self.sentinel is None and not self.listening and self.exitcode is None

    @property
    def failed(self) -> bool:
        return self.report is not None or (not self.completed and (self.exitcode is not None or self.lost))

    def ran_out_of_memory(self) -> bool:
        """Return whether the kernel has killed a process of this cgroup for lack of memory since the rank's start."""
        return count_out_of_memory_kills() > self.memory_kills

    def waitables(self) -> list[Any]:
        """Return the objects for ``connection.wait`` that become ready when the rank sends a message or ends."""
        end = [self.sentinel] if self.sentinel is not None and self.exitcode is None else []
        return [*end, *([self.pipe] if self.listening else [])]

    def queue_work(self, work: Any) -> None:
        """Send the rank its work, at once or as soon as the rank is ready."""
        self.send_work(work)

    def send_work(self, work: Any) -> None:
        self.resumed_step = work.checkpoint.step if work.checkpoint else 0
        self.send(Assignment(pickle.dumps(work), self.resumed_step, self.network))

    def read_messages(self) -> Iterator[Message]:
        """Yield the messages that have come from the rank, for up to 0.1 s.

        If the rank has ended, yields all messages. When the pipe has ended, sets ``listening`` to False. Does not wait.
        """
        deadline = time.monotonic() + READ_SECONDS if self.exitcode is None else math.inf
        try:
            while self.listening and time.monotonic() < deadline and self.pipe.poll():
                yield self.pipe.recv()
        except (EOFError, OSError):
            self.listening = False

    def handle_message(self, message: Message) -> None:
        """Store the state that a rank's message reports in the attributes."""
        match message:
            case FailureReport():
                self.report = message
            case Notice.COMPLETED:
                self.completed = True
            case Saved(step):
                self.answered, self.saved = True, step
            case Notice.WRITING:
                self.last_write = math.inf
            case Notice.WRITTEN:
                self.last_write = time.monotonic()
            case Notice.RESUMED:
                self.has_resumed = True
            case Notice.STOP:
                self.stop_requested = True

    def request_stack(self) -> str:
        """Return the rank's Python stack, or "" if none comes within 1 s (3 s from another host)."""
        raise NotImplementedError

    def kill(self) -> None:
        """Kill the rank's process, or all ranks of its group, without waiting."""
        raise NotImplementedError

    def close(self) -> None:
        """Wait up to 10 s for the end of the killed rank's process, and close its pipes."""
        raise NotImplementedError


class ProcessHandle(RankHandle):
    """A rank that is a child of this process. On SIGUSR1 the rank writes its stack to ``stacks``."""

    def __init__(self, rank: int, process: BaseProcess, pipe: Connection, stacks: Connection) -> None:
        super().__init__(rank, pipe, LOOPBACK)
        self.process, self.stacks, self.sentinel = process, stacks, process.sentinel
        self.pid = process.pid
        self.work: Any = None
        self.ready = False

    def has_started(self) -> bool:
        # Does not poll, because an exit code that is read outside the supervisor's wait does not end the next wait.
        return self.ready or self.exitcode is not None

    def queue_work(self, work: Any) -> None:
        """Keep the work until the rank reports that it is ready.

        Large work does not fit into a pipe that is not read.
        """
        self.work, self.resumed_step = work, work.checkpoint.step if work.checkpoint else 0

    def read_messages(self) -> Iterator[Message]:
        """Yield the messages that have come from the rank. Send the kept work when the rank is ready."""
        for message in super().read_messages():
            if message is Notice.READY:
                self.ready = True
                self.send_work(self.work)
            else:
                yield message

    def poll_exit(self) -> bool:
        self.exitcode = self.process.exitcode
        return self.exitcode is not None

    def request_stack(self) -> str:
        number = self.pid or self.process.pid
        return "" if self.poll_exit() or number is None else request_stack(number, self.stacks, STACK_SECONDS)

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        self.process.join(JOIN_SECONDS)
        self.pipe.close()
        self.stacks.close()
