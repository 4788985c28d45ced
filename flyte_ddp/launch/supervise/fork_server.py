"""Starts the ranks of one machine as forks of a process, the rank server, which imports torch once for all of them.

An import takes more than a second of a CPU and some hundred MiB. For ranks on GPUs each imports torch itself, because a
fork of torch was never tried there. Why this is not Python's own ``forkserver``: docs/design/fork-server.md.
"""

import faulthandler
import gc
import multiprocessing
import os
import pkgutil
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NoReturn

from flyte_ddp.launch.supervise.link import RankInfo, describe_error
from flyte_ddp.launch.supervise.rank_handle import JOIN_SECONDS, ProcessHandle, RankHandle
from flyte_ddp.launch.supervise.rank_process import flush_output, start_rank
from flyte_ddp.machine.process import (
    become_subreaper,
    die_with_parent,
    kill_descendants,
    set_process_name,
    spawn_context,
)

POSSIBLE = sys.platform == "linux"  # macOS's libraries rely on threads, which a fork does not have
TRIED_ON = ("cpu",)  # types of devices for which the server imports torch
SERVER = "rank server"  # the name of its process
END = signal.SIGUSR2  # makes the server kill its ranks with all that they have started, and exit


class ForkedHandle(ProcessHandle):
    """A rank forked by the rank server, which sends the process's id and at its end the exit code, by ``exit_pipe``."""

    def __init__(
        self, rank: int, server: BaseProcess, pipe: Connection, stacks: Connection, exit_pipe: Connection
    ) -> None:
        super().__init__(rank, server, pipe, stacks)
        self.exit_pipe = self.sentinel = exit_pipe
        self.pid = None

    def poll_exit(self) -> bool:
        server = self.process.exitcode  # before the pipe is read: the server's last messages are then in the pipe
        with suppress(EOFError, OSError):
            while self.exitcode is None and self.exit_pipe.poll():
                number = self.exit_pipe.recv()
                if self.pid is None:
                    self.pid = number
                else:
                    self.exitcode = number
        if self.exitcode is None:
            self.exitcode = server  # Linux kills ranks with their server
        return self.exitcode is not None

    def kill(self) -> None:
        if self.process.is_alive() and self.process.pid:
            os.kill(self.process.pid, END)

    def close(self) -> None:
        """Wait up to 10 s for the end of all ranks and of the rank server, then kill it; close this rank's pipes."""
        # Ranks have inherited the writing end of the server's sentinel, so that it is ready when all have ended.
        if not connection.wait([self.process.sentinel], JOIN_SECONDS):
            self.process.kill()
        super().close()
        self.exit_pipe.close()


@dataclass
class RankPipes:
    """The rank server's ends of a rank's pipes; the rank inherits the first two."""

    info: RankInfo
    pipe: Connection  # to the launcher
    stacks: Connection  # takes the rank's stack on SIGUSR1
    exit_pipe: Connection

    def close(self) -> None:
        for end in (self.pipe, self.stacks, self.exit_pipe):
            end.close()


def start_ranks(group: list[RankHandle], infos: Sequence[RankInfo], *, with_torch: bool) -> None:
    """Start the rank server, which forks the ranks, and append their handles to ``group``; ranks then wait for work."""
    with spawn_context() as context:
        pipes = [(context.Pipe(), context.Pipe(duplex=False), context.Pipe(duplex=False)) for _ in infos]
        ranks = [RankPipes(info, *(theirs for _, theirs in ends)) for info, ends in zip(infos, pipes, strict=True)]
        server = context.Process(target=run_rank_server, args=(ranks, with_torch), name=SERVER)
        server.start()
        for each, ends in zip(ranks, pipes, strict=True):
            group.append(ForkedHandle(each.info.rank, server, *(ours for ours, _ in ends)))
            each.close()


def run_rank_server(ranks: list[RankPipes], with_torch: bool) -> NoReturn:
    """Fork the ranks, send the launcher their process ids and exit codes, and exit after the last rank has ended.

    Call it with SIGTERM and SIGINT blocked. Linux ends the server with the launcher, and the ranks with the server.
    """
    die_with_parent()
    become_subreaper()  # the server adopts processes that ranks leave behind, and kills them before it exits
    set_process_name(SERVER)
    if with_torch:
        import_torch(ranks)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until a rank has its own handler
    running = dict[int, RankPipes]()
    for each in ranks:
        try:
            pid = fork_rank(each, ranks)
        except OSError as error:
            report_and_exit(error, [each])
        running[pid] = each
        each.exit_pipe.send(pid)
        each.pipe.close()
        each.stacks.close()
    signal.signal(END, kill_ranks_and_exit)
    die_with_parent(END)
    launcher = multiprocessing.parent_process()
    # With another parent now, the launcher ended before die_with_parent was called.
    while running and launcher is not None and os.getppid() == launcher.pid:
        pid, status = os.wait()
        if pid in running:  # else it was an orphan of a rank
            running.pop(pid).exit_pipe.send(os.waitstatus_to_exitcode(status))
    kill_ranks_and_exit()


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
    flush_output()  # what is in the buffers now would be printed by each fork
    gc.freeze()  # the collector writes to the objects that it visits, and forks no longer share written memory
    gc.enable()


def fork_rank(own: RankPipes, ranks: list[RankPipes]) -> int:
    """Fork a process that runs the rank, and return its id; call it with SIGTERM and SIGINT blocked."""
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        if os.getppid() != server:  # the server ended before die_with_parent was called
            os._exit(1)
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


def kill_ranks_and_exit(*_: object) -> NoReturn:
    signal.signal(END, signal.SIG_IGN)
    kill_descendants()
    os._exit(1)  # without clean-up: freeing torch takes a second
