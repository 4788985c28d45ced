"""Starts the ranks of one machine as forks of the rank server. The server imports torch once for all ranks.

An import of torch takes more than a second of a CPU and some hundred MiB. The server process stays for later starts of
the same ranks. Ranks on GPUs import torch themselves, because a fork of torch was never tried there. The document
docs/design/fork-server.md explains why Python's ``forkserver`` is not used.
"""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import pkgutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NoReturn

from flyte_ddp.core.launch.supervise.failure_report import make_failure_report
from flyte_ddp.core.launch.supervise.link import RankInfo
from flyte_ddp.core.launch.supervise.rank_handle import JOIN_SECONDS, ProcessHandle, RankHandle, start_processes
from flyte_ddp.core.launch.supervise.rank_process import flush_output, start_rank
from flyte_ddp.core.machine.process import (
    become_subreaper,
    die_with_parent,
    kill_descendants,
    kill_process_trees,
    list_children,
    list_helper_pids,
    set_process_name,
    spawn_context,
)

POSSIBLE = sys.platform == "linux"  # on macOS, libraries rely on threads, which a fork does not have
PRELOADED_DEVICE_TYPES = ("cpu",)  # types of devices for which the server imports torch
SERVER = "rank server"  # the name of its process
END = signal.SIGUSR2  # makes the server kill its ranks and all processes that the ranks have started
REQUEST_BYTES = 1 << 16  # more than a RankInfo needs


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


@dataclass
class RankPipes:
    """The rank server's ends of a rank's pipes. The rank inherits ``pipe`` and ``stacks``."""

    info: RankInfo
    pipe: Connection  # to the launcher
    stacks: Connection  # gets the rank's stack on SIGUSR1
    exit_pipe: Connection
    pid: int = field(default=0, init=False)

    def close(self) -> None:
        for end in (self.pipe, self.stacks, self.exit_pipe):
            end.close()


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
        with spawn_context() as context:
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

    All ranks must have ended before the end of the block. On Linux, the end of the block waits up to 10 s for the rank
    server, and then kills the server.
    """
    if not POSSIBLE:
        yield start_processes
        return
    server = RankServer()
    try:
        yield server.start_ranks
    finally:
        server.close()


def run_rank_server(requests: socket.socket, with_torch: bool) -> NoReturn:
    """Fork the requested ranks, and send the launcher their process ids and exit codes, until the launcher ends.

    Then kills the ranks and exits with code 1. Call this function in a new process with SIGTERM and SIGINT blocked.
    Linux ends the server with the launcher, and the ranks with the server.

    Args:
        requests: The socket by which requests and pipes come.
        with_torch: Whether to import torch and the work's function before the first fork.
    """
    die_with_parent()
    become_subreaper()  # the server adopts processes that ranks leave behind, and kills them
    set_process_name(SERVER)
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until a rank has its own handler
    while ranks := receive_request(requests):
        if with_torch and "torch" not in sys.modules:
            import_torch(ranks)
        signal.signal(END, signal.SIG_DFL)  # while there is a rank to fork
        fork_ranks(ranks, requests)
        signal.signal(END, partial(kill_ranks, launcher.pid))
        die_with_parent(END)
        if os.getppid() != launcher.pid:  # the launcher ended before die_with_parent was called
            break
        wait_for_ranks(ranks)
    kill_ranks_and_exit()


def receive_request(requests: socket.socket) -> list[RankPipes]:
    """Wait for a request of the launcher, and return the pipes of the ranks to start.

    If the launcher has ended, returns [].
    """
    ranks: list[RankPipes] = []
    left = 1
    while left:
        request, files, *_ = socket.recv_fds(requests, REQUEST_BYTES, 3)
        if not request:
            return []
        info, left = pickle.loads(request)
        ranks.append(RankPipes(info, *(Connection(file) for file in files)))
    return ranks


def fork_ranks(ranks: list[RankPipes], requests: socket.socket) -> None:
    """Fork a process for each rank, and send the launcher the process id by the rank's ``exit_pipe``.

    Closes the server's ends of the ranks' other pipes. If a fork fails, reports the error as the rank's error, kills
    all ranks and exits. Call this function with SIGTERM and SIGINT blocked.
    """
    for each in ranks:
        try:
            each.pid = fork_rank(each, ranks, requests)
        except OSError as error:
            report_and_exit(error, [each])
        send_to_launcher(each, each.pid)
        each.pipe.close()
        each.stacks.close()


def wait_for_ranks(ranks: list[RankPipes]) -> None:
    """Wait for the ranks without a limit, and send the launcher each exit code.

    Kills the processes that ranks have left behind: at once when a rank fails, else after the last rank. When all
    processes have ended, sends None for each rank and closes the ranks' pipes.
    """
    running = {each.pid: each for each in ranks}
    while running:
        pid, status = os.wait()
        if pid in running:  # else it was an orphan of a rank
            send_to_launcher(running.pop(pid), os.waitstatus_to_exitcode(status))
            if status:  # a loader process of the rank may hold open the connections whose end other ranks wait for
                kill_process_trees(lambda: list_children(os.getpid()) - list_helper_pids() - running.keys())
    kill_descendants()
    with suppress(ChildProcessError):
        while True:
            os.wait()
    for each in ranks:
        send_to_launcher(each, None)
        each.exit_pipe.close()


def send_to_launcher(rank: RankPipes, number: int | None) -> None:
    with suppress(OSError):  # the launcher no longer waits for the rank
        rank.exit_pipe.send(number)


def import_torch(ranks: list[RankPipes]) -> None:
    """Import torch and the work's function, and exempt all present objects from garbage collection.

    If the import fails, reports the failure as each rank's error, and exits with code 1. During the import, SIGUSR1
    writes the stack to the first rank's ``stacks``.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as in start_rank, which runs after this import
    faulthandler.register(signal.SIGUSR1, file=ranks[0].stacks.fileno(), all_threads=False)  # for a slow import
    gc.disable()  # collections take a tenth of the import of torch, and free almost nothing
    try:
        pkgutil.resolve_name(ranks[0].info.function)
    except BaseException as error:
        report_and_exit(error, ranks)
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    flush_output()  # otherwise each fork would print the buffered text
    gc.freeze()  # the collector writes to visited objects, and forks do not share written memory
    gc.enable()


def fork_rank(own: RankPipes, ranks: list[RankPipes], requests: socket.socket) -> int:
    """Fork a process that runs the rank, and return the process's id.

    Returns only in the server. The new process seeds NumPy's global generator, and ends with the rank. Call this
    function with SIGTERM and SIGINT blocked.

    Args:
        own: The pipes of the rank.
        ranks: The pipes of all ranks. The new process closes the other ranks' pipes.
        requests: The server's socket, which the new process closes.
    """
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        if os.getppid() != server:  # the server ended before die_with_parent was called
            os._exit(1)
        requests.close()
        for other in ranks:
            if other is not own:
                other.close()
        own.exit_pipe.close()
        multiprocessing.current_process().name = f"rank {own.info.rank}"
        if "numpy.random" in sys.modules:  # Python's generator is seeded in a fork, NumPy's is not
            sys.modules["numpy.random"].seed()
        start_rank(own.info, own.pipe, own.stacks)
    return pid


def report_and_exit(error: BaseException, ranks: list[RankPipes]) -> NoReturn:
    """Send the launcher the error as each rank's error, kill all ranks, and exit with code 1."""
    for each in ranks:
        with suppress(OSError):
            each.pipe.send(make_failure_report(error))
    kill_ranks_and_exit()


def kill_ranks(launcher: int | None, *_: object) -> None:
    kill_descendants()
    if os.getppid() != launcher:
        os._exit(1)


def kill_ranks_and_exit() -> NoReturn:
    kill_descendants()
    os._exit(1)  # without clean-up: freeing torch takes a second
