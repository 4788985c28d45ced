"""The rank server: a process that imports torch once, and forks the ranks of one machine.

The launcher's side is in rank_starter.py. The document docs/design/fork-server.md explains why Python's ``forkserver``
is not used.
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
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import NoReturn

from flyte_ddp.core.launch.supervise.failure_report import make_failure_report
from flyte_ddp.core.launch.supervise.link import RankInfo
from flyte_ddp.core.launch.supervise.rank_process import flush_output, start_rank
from flyte_ddp.core.machine.process import (
    become_subreaper,
    die_with_parent,
    kill_descendants,
    kill_descendants_and_exit,
    kill_process_trees,
    list_children,
    list_helper_pids,
    set_process_name,
)

SERVER = "rank server"  # the name of its process
END = signal.SIGUSR2  # makes the server kill its ranks and all processes that the ranks have started
REQUEST_BYTES = 1 << 16  # more than a RankInfo needs


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
    kill_descendants_and_exit()


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
    kill_descendants_and_exit()


def kill_ranks(launcher: int | None, *_: object) -> None:
    kill_descendants()
    if os.getppid() != launcher:
        os._exit(1)
