"""Starts the ranks of one machine as forks of a process, the rank server, which imports torch once for all of them.

An import takes more than a second of a CPU and some hundred MiB. The server stays for later starts of the same ranks.
Ranks on GPUs import torch themselves, because a fork of torch was never tried there. Why this is not Python's own
``forkserver``: docs/design/fork-server.md.
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

from flyte_ddp.launch.supervise.link import RankInfo, describe_error
from flyte_ddp.launch.supervise.rank_handle import JOIN_SECONDS, ProcessHandle, RankHandle, start_processes
from flyte_ddp.launch.supervise.rank_process import flush_output, start_rank
from flyte_ddp.machine.process import (
    become_subreaper,
    die_with_parent,
    kill_descendants,
    kill_process_trees,
    list_children,
    list_helper_pids,
    set_process_name,
    spawn_context,
)

POSSIBLE = sys.platform == "linux"  # macOS's libraries rely on threads, which a fork does not have
TRIED_ON = ("cpu",)  # types of devices for which the server imports torch
SERVER = "rank server"  # the name of its process
END = signal.SIGUSR2  # makes the server kill its ranks with all that they have started
REQUEST_BYTES = 1 << 16  # more than a RankInfo takes


class ForkedHandle(ProcessHandle):
    """A rank forked by the rank server, which sends by ``exit_pipe`` the process's id, and at its end the exit code.

    The last message, None, comes when all ranks have ended, with all that they have started.
    """

    def __init__(
        self, rank: int, server: BaseProcess, pipe: Connection, stacks: Connection, exit_pipe: Connection
    ) -> None:
        super().__init__(rank, server, pipe, stacks)
        self.exit_pipe = self.sentinel = exit_pipe
        self.pid = None
        self.all_ended = self.server_ended = False

    def poll_exit(self) -> bool:
        server = self.process.exitcode  # before the pipe is read: the server's last messages are then in the pipe
        self._read_exit_pipe()
        if self.exitcode is None:
            self.exitcode = server  # Linux kills ranks with their server
        return self.exitcode is not None

    def _read_exit_pipe(self) -> None:
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
        if self.process.is_alive() and self.process.pid:
            os.kill(self.process.pid, END)

    def close(self) -> None:
        """Wait up to 10 s for the end of all ranks, then kill the rank server; close this rank's pipes."""
        deadline = time.monotonic() + JOIN_SECONDS
        self._read_exit_pipe()
        while not (self.all_ended or self.server_ended) and (left := deadline - time.monotonic()) > 0:
            connection.wait([self.exit_pipe], left)
            self._read_exit_pipe()
        # Ranks have inherited the writing end of the server's sentinel, which is ready when all of them have ended.
        if not self.all_ended and not connection.wait([self.process.sentinel], max(0.0, deadline - time.monotonic())):
            self.process.kill()
        for pipe in (self.pipe, self.stacks, self.exit_pipe):
            pipe.close()


@dataclass
class RankPipes:
    """The rank server's ends of a rank's pipes; the rank inherits the first two."""

    info: RankInfo
    pipe: Connection  # to the launcher
    stacks: Connection  # takes the rank's stack on SIGUSR1
    exit_pipe: Connection
    pid: int = field(default=0, init=False)

    def close(self) -> None:
        for end in (self.pipe, self.stacks, self.exit_pipe):
            end.close()


class RankServer:
    """The rank server as its launcher sees it. Call :meth:`close` when its ranks have ended."""

    def __init__(self) -> None:
        self.process: BaseProcess | None = None
        self.requests: socket.socket | None = None

    def start_ranks(self, group: list[RankHandle], infos: Sequence[RankInfo]) -> None:
        """Have the server fork ranks, and append their handles to ``group``; the ranks then wait for work.

        Starts the server if it does not live. All ranks of an earlier start must have ended.
        """
        with spawn_context() as context:
            if self.process is None or not self.process.is_alive() or self.requests is None:
                self.close()
                self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with_torch = infos[0].device_type in TRIED_ON
                with theirs:
                    process = context.Process(target=run_rank_server, args=(theirs, with_torch), name=SERVER)
                    process.start()
                self.process = process
            for number, info in enumerate(infos, 1):
                pairs = context.Pipe(), context.Pipe(duplex=False), context.Pipe(duplex=False)
                group.append(ForkedHandle(info.rank, self.process, *(ours for ours, _ in pairs)))
                request = pickle.dumps((info, len(infos) - number))
                with suppress(OSError):  # the server has ended, as the handle will show
                    socket.send_fds(self.requests, [request], [end.fileno() for _, end in pairs])
                for _, end in pairs:
                    end.close()

    def close(self) -> None:
        """End the server, and wait up to 10 s before it is killed."""
        if self.requests is not None:
            self.requests.close()
        if self.process is not None:
            self.process.join(JOIN_SECONDS)
            self.process.kill()


@contextmanager
def open_starter() -> Iterator[Callable[[list[RankHandle], Sequence[RankInfo]], None]]:
    """Yield a function that starts ranks here, and appends their handles to a list; at the end no rank may live."""
    if not POSSIBLE:
        yield start_processes
        return
    server = RankServer()
    try:
        yield server.start_ranks
    finally:
        server.close()


def run_rank_server(requests: socket.socket, with_torch: bool) -> NoReturn:
    """Fork the ranks that are requested, and send the launcher their process ids and exit codes, until that ends.

    Call it with SIGTERM and SIGINT blocked. Linux ends the server with the launcher, and the ranks with the server.
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
    """Wait for the ranks of a start, and return their pipes; empty if the launcher has ended."""
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
    for each in ranks:
        try:
            each.pid = fork_rank(each, ranks, requests)
        except OSError as error:
            report_and_exit(error, [each])
        send_to_launcher(each, each.pid)
        each.pipe.close()
        each.stacks.close()


def wait_for_ranks(ranks: list[RankPipes]) -> None:
    """Send the ranks' exit codes, kill what they have left behind, and close their pipes when all of it has ended."""
    running = {each.pid: each for each in ranks}
    while running:
        pid, status = os.wait()
        if pid in running:  # else it was an orphan of a rank
            send_to_launcher(running.pop(pid), os.waitstatus_to_exitcode(status))
            if status:  # a loader process of the rank keeps the rank's connections open, for which other ranks wait
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
    """Import torch and the work's function, and freeze all objects; report a failure as each rank's error, and exit."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as start_rank does, which comes after this import
    faulthandler.register(signal.SIGUSR1, file=ranks[0].stacks.fileno(), all_threads=False)  # for a slow import
    gc.disable()  # collections, which free next to nothing here, take a tenth of an import of torch
    try:
        pkgutil.resolve_name(ranks[0].info.function)
    except BaseException as error:
        report_and_exit(error, ranks)
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    flush_output()  # what is in the buffers now would be printed by each fork
    gc.freeze()  # the collector writes to the objects that it visits, and forks no longer share written memory
    gc.enable()


def fork_rank(own: RankPipes, ranks: list[RankPipes], requests: socket.socket) -> int:
    """Fork a process that runs the rank, and return its id; call it with SIGTERM and SIGINT blocked."""
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
        if "numpy.random" in sys.modules:  # a fork seeds Python's own generator, but not NumPy's
            sys.modules["numpy.random"].seed()
        start_rank(own.info, own.pipe, own.stacks)
    return pid


def report_and_exit(error: BaseException, ranks: list[RankPipes]) -> NoReturn:
    for each in ranks:
        with suppress(OSError):
            each.pipe.send(describe_error(error))
    kill_ranks_and_exit()


def kill_ranks(launcher: int | None, *_: object) -> None:
    kill_descendants()
    if os.getppid() != launcher:
        os._exit(1)


def kill_ranks_and_exit() -> NoReturn:
    kill_descendants()
    os._exit(1)  # without clean-up: freeing torch takes a second
