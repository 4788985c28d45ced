"""Ranks of one machine as forks of a process, the rank server, that has imported torch for all of them.

That takes more than a second of a CPU and some hundred MiB, which ranks that import torch themselves take once each.
Ranks on GPUs do: the server does not import torch for them, as a fork of torch was never tried on a GPU.
Why it is not Python's own ``forkserver``: docs/design/fork-server.md.
"""

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NoReturn

from flyte_ddp.launch.supervise.link import describe_error
from flyte_ddp.launch.supervise.processes import JOIN_SECONDS, ProcessHandle, starting
from flyte_ddp.launch.supervise.rank_handle import RankHandle
from flyte_ddp.launch.supervise.rank_process import RankInfo, flush, quiet_torch, start_rank
from flyte_ddp.process import become_subreaper, die_with_parent, kill_descendants, set_name

POSSIBLE = sys.platform == "linux"  # elsewhere libraries rely on what a fork does not have
TRIED_ON = ("cpu",)  # types of devices that forks of a process with torch have trained on
SERVER = "rank server"  # the name of its process
END = signal.SIGUSR2  # has the server kill its ranks and what they have started, and end


@dataclass
class RankPipes:
    """A rank's ends of its pipes; through ``exit_pipe`` the server sends its process id, and later its exit code."""

    info: RankInfo
    pipe: Connection
    stacks: Connection
    exit_pipe: Connection

    def close(self) -> None:
        """Close all of them."""
        for end in (self.pipe, self.stacks, self.exit_pipe):
            end.close()


class ForkedHandle(ProcessHandle):
    """A rank that is a child of the server, which is a child of this process."""

    def __init__(
        self, rank: int, server: BaseProcess, pipe: Connection, stacks: Connection, exit_pipe: Connection
    ) -> None:
        super().__init__(rank, server, pipe, stacks)
        self.exit_pipe = self.sentinel = exit_pipe
        self.pid = None

    def has_begun(self) -> bool:
        """See :class:`RankHandle`."""
        return self.has_ended() or self.pid is not None

    def has_ended(self) -> bool:
        """See :class:`RankHandle`. Linux ends ranks with their server: the end of one is then the server's."""
        server = self.process.exitcode  # before the pipe is read: what the server has sent of its ranks is then there
        with suppress(EOFError, OSError):
            while self.exitcode is None and self.exit_pipe.poll():
                number = self.exit_pipe.recv()
                if self.pid is None:
                    self.pid = number
                else:
                    self.exitcode = number
        if self.exitcode is None:
            self.exitcode = server
        return self.exitcode is not None

    def kill(self) -> None:
        """See :class:`RankHandle`."""
        if self.process.is_alive() and self.process.pid:
            os.kill(self.process.pid, END)

    def close(self) -> None:
        """See :class:`RankHandle`. Ranks have inherited the server's sentinel: it is ready when all have ended."""
        if connection.wait([self.process.sentinel], JOIN_SECONDS):
            self.process.join()
        else:
            self.process.kill()
        for end in (self.pipe, self.stacks, self.exit_pipe):
            end.close()


def start(group: list[RankHandle], infos: Iterable[RankInfo], *, with_torch: bool) -> None:
    """Start a server and by it the ranks, and add these to the group; they wait for their job.

    Args:
        with_torch: the server imports torch before it forks, else each rank does.
    """
    ours: list[tuple[int, Connection, Connection, Connection]] = []
    ranks: list[RankPipes] = []
    with starting() as context:
        server = context.Process(target=serve, args=(ranks, with_torch), name=SERVER)
        for info in infos:
            pipe, its_pipe = context.Pipe()
            stacks, its_stacks = context.Pipe(duplex=False)
            exit_pipe, its_exit_pipe = context.Pipe(duplex=False)
            ranks.append(RankPipes(info, its_pipe, its_stacks, its_exit_pipe))
            ours.append((info.rank, pipe, stacks, exit_pipe))
        server.start()
        group.extend(ForkedHandle(rank, server, *pipes) for rank, *pipes in ours)
        for each in ranks:
            each.close()


def serve(ranks: list[RankPipes], with_torch: bool) -> NoReturn:
    """Fork the ranks and report their ends; the server's only function, called with ``SIGNALS`` blocked."""
    die_with_parent()
    become_subreaper()
    set_name(SERVER)
    if with_torch:
        import_torch(ranks)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until a rank has its own handler
    running = dict[int, RankPipes]()
    for each in ranks:
        try:
            pid = fork_rank(each, ranks)
        except OSError as error:
            give_up(error, [each])
        running[pid] = each
        each.exit_pipe.send(pid)
        each.pipe.close()
        each.stacks.close()
    signal.signal(END, end)
    die_with_parent(END)
    launcher = multiprocessing.parent_process()
    while running and launcher is not None and os.getppid() == launcher.pid:  # else the launcher has ended before
        pid, status = os.wait()
        if pid in running:  # and not what a rank has left behind
            running.pop(pid).exit_pipe.send(os.waitstatus_to_exitcode(status))
    end()


def import_torch(ranks: list[RankPipes]) -> None:
    """Import what all ranks need, and prepare to be forked. Meanwhile the server answers SIGUSR1 in rank 0's place."""
    quiet_torch()
    faulthandler.register(signal.SIGUSR1, file=ranks[0].stacks.fileno(), all_threads=False)
    try:
        import flyte_ddp.launch.supervise.rank  # noqa: F401
    except BaseException as error:
        give_up(error, ranks)
    faulthandler.unregister(signal.SIGUSR1)
    flush()  # what was printed until now would be printed by each fork
    gc.collect()
    gc.freeze()  # the collector writes to what it looks at, and memory that is written to is no longer shared


def give_up(error: BaseException, ranks: list[RankPipes]) -> NoReturn:
    """Report an error as that of these ranks, and end the server with all ranks."""
    for each in ranks:
        with suppress(OSError):
            each.pipe.send(describe_error(error))
    end()


def end(*_: object) -> NoReturn:
    """Kill all processes below the server, and end it."""
    signal.signal(END, signal.SIG_IGN)
    kill_descendants()
    os._exit(1)  # as a rank does: it takes a second to take torch apart


def fork_rank(own: RankPipes, ranks: list[RankPipes]) -> int:
    """Start a rank as a fork of this process, and return its process id."""
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        if os.getppid() != server:  # which has ended before
            os._exit(1)
        for other in ranks:
            if other is not own:
                other.close()
        own.exit_pipe.close()
        multiprocessing.current_process().name = f"rank {own.info.rank}"
        if "numpy.random" in sys.modules:  # which a fork does not seed, as it does Python's own generator
            sys.modules["numpy.random"].seed()
        start_rank(own.info, own.pipe, own.stacks)
    return pid
