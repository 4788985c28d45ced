"""Starts ranks on this host: on Linux as forks of the rank server (fork_server.py), else as spawned processes.

An import of torch takes more than a second of a CPU and some hundred MiB. The server imports torch once for all ranks,
and stays for later starts of the same ranks. Ranks on GPUs import torch themselves, because a fork of torch was never
tried there.
"""

import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from flyte_ddp.core.launch.supervise.fork_server import END, SERVER, run_rank_server
from flyte_ddp.core.launch.supervise.link import RankInfo
from flyte_ddp.core.launch.supervise.rank_handle import JOIN_SECONDS, ProcessHandle, RankHandle
from flyte_ddp.core.launch.supervise.rank_process import start_rank
from flyte_ddp.core.machine.process import open_spawn_context

POSSIBLE = sys.platform == "linux"  # on macOS, libraries rely on threads, which a fork does not have
PRELOADED_DEVICE_TYPES = ("cpu",)  # types of devices for which the server imports torch


class ForkedHandle(ProcessHandle):
    """A rank forked by the rank server.

    The server sends the id of the rank's process by ``exit_pipe``, and later the exit code. The last message, None,
    comes when all ranks and all processes started by ranks have ended.
    """

    def __init__(
        self, rank: int, server: BaseProcess, pipe: Connection, stacks: Connection, exit_pipe: Connection
    ) -> None:
        super().__init__(rank, server, pipe, stacks)
        self.exit_pipe = self.sentinel = exit_pipe
        self.pid = None
        self.all_ended = self.server_ended = False

    def poll_exit(self) -> bool:
        """Read the server's messages, and return whether the rank has ended.

        If the server has ended first, its exit code counts as the rank's.
        """
        server = self.process.exitcode  # before the pipe is read: the server's last messages are then in the pipe
        self._read_exit_pipe()
        if self.exitcode is None:
            self.exitcode = server  # Linux kills ranks with their server
        return self.exitcode is not None

    def _read_exit_pipe(self) -> None:
        """Store the process id, the exit code and the end of all ranks, if the server has sent them. Does not wait."""
        try:
            while not self.all_ended and self.exit_pipe.poll():
                number = self.exit_pipe.recv()
                if number is None:
                    self.all_ended = True
                elif self.pid is None:
                    self.pid = number
                else:
                    self.exitcode = number
        except (EOFError, OSError):
            self.server_ended = True

    def kill(self) -> None:
        """Make the server kill all its ranks, not only this rank."""
        if self.process.is_alive() and self.process.pid:
            os.kill(self.process.pid, END)

    def close(self) -> None:
        """Wait up to 10 s for the end of all ranks, and close this rank's pipes.

        If a rank still lives then, kills the rank server.
        """
        deadline = time.monotonic() + JOIN_SECONDS
        self._read_exit_pipe()
        while not (self.all_ended or self.server_ended) and (left := deadline - time.monotonic()) > 0:
            connection.wait([self.exit_pipe], left)
            self._read_exit_pipe()
        # Ranks have inherited the writing end of the server's sentinel, so it is ready when all ranks have ended.
        if not self.all_ended and not connection.wait([self.process.sentinel], max(0.0, deadline - time.monotonic())):
            self.process.kill()
        for pipe in (self.pipe, self.stacks, self.exit_pipe):
            pipe.close()


class RankServer:
    """The launcher's interface to the rank server. Call :meth:`close` when all ranks have ended."""

    def __init__(self) -> None:
        self.process: BaseProcess | None = None
        self.requests: socket.socket | None = None

    def start_ranks(self, group: list[RankHandle], infos: Sequence[RankInfo]) -> None:
        """Have the server fork ranks, and append their handles to ``group``.

        Does not wait for the ranks, which then wait for work. If the server does not run, starts the server. All ranks
        of an earlier start must have ended. If the server ends meanwhile, the handles report the ranks as ended.
        """
        with open_spawn_context() as context:
            if self.process is None or not self.process.is_alive() or self.requests is None:
                self.close()
                self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with_torch = infos[0].device_type in PRELOADED_DEVICE_TYPES
                with theirs:
                    process = context.Process(target=run_rank_server, args=(theirs, with_torch), name=SERVER)
                    process.start()
                self.process = process
            for number, info in enumerate(infos, 1):
                pairs = context.Pipe(), context.Pipe(duplex=False), context.Pipe(duplex=False)
                group.append(ForkedHandle(info.rank, self.process, *(ours for ours, _ in pairs)))
                request = pickle.dumps((info, len(infos) - number))
                with suppress(OSError):  # the server has ended, which the handle will report
                    socket.send_fds(self.requests, [request], [end.fileno() for _, end in pairs])
                for _, end in pairs:
                    end.close()

    def close(self) -> None:
        """End the server, and kill a server that has not ended after 10 s."""
        if self.requests is not None:
            self.requests.close()
        if self.process is not None:
            self.process.join(JOIN_SECONDS)
            self.process.kill()


@contextmanager
def open_rank_starter() -> Iterator[Callable[[list[RankHandle], Sequence[RankInfo]], None]]:
    """Yield a function that starts ranks on this host and appends their handles to a list.

    All ranks must have ended before the function is called again, and before the end of the block. On Linux, the end of
    the block waits up to 10 s for the rank server (the process that forks ranks), and then kills the server.
    """
    if not POSSIBLE:
        yield start_processes
        return
    server = RankServer()
    try:
        yield server.start_ranks
    finally:
        server.close()


def start_processes(group: list[RankHandle], infos: Sequence[RankInfo]) -> None:
    """Spawn a process for each rank, and append its handle to ``group`` as soon as the process has started."""
    for info in infos:
        with open_spawn_context() as context:
            pipe, rank_pipe = context.Pipe()
            stacks, rank_stacks = context.Pipe(duplex=False)
            process = context.Process(target=start_rank, args=(info, rank_pipe, rank_stacks), name=f"rank {info.rank}")
            process.start()
            group.append(ProcessHandle(info.rank, process, pipe, stacks))
            rank_pipe.close()  # so that the pipe ends when the rank ends
            rank_stacks.close()
