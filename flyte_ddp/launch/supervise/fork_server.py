"""Ranks of one machine as forks of a process, the rank server, that has imported torch for all of them.

That takes more than a second of a CPU and some hundred MiB, which ranks that import torch themselves take once each.
Ranks on GPUs do: the server starts each as a fresh interpreter, as a fork was never tried on a GPU.
Why it is not Python's own ``forkserver``: docs/design/fork-server.md.
"""

from __future__ import annotations

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
from typing import Any, NoReturn

from flyte_ddp.launch.supervise.link import described
from flyte_ddp.launch.supervise.processes import JOIN_SECONDS, ProcessHandle, starting
from flyte_ddp.launch.supervise.rank_handle import RankHandle
from flyte_ddp.launch.supervise.rank_info import RankInfo
from flyte_ddp.launch.supervise.rank_process import flush, quiet_torch, start_rank
from flyte_ddp.process import become_subreaper, die_with_parent, kill_descendants, set_name

POSSIBLE = sys.platform == "linux"  # elsewhere libraries rely on what a fork does not have
TRIED_ON = ("cpu",)  # types of devices that forked ranks have trained on
SERVER = "rank server"  # the name of its process
END = signal.SIGUSR2  # has the server kill its ranks and what they have started, and end


@dataclass
class RankPipes:
    """A rank's ends of its pipes; by ``exit_pipe`` the server says its process id, and later its exit code."""

    info: RankInfo
    pipe: Connection
    stacks: Connection
    exit_pipe: Connection

    def close(self) -> None:
        """Closes all of them."""
        for end in (self.pipe, self.stacks, self.exit_pipe):
            end.close()


class ForkedHandle(ProcessHandle):
    """A rank that is a process of the server's, which is one of this process's."""

    def __init__(
        self, rank: int, server: BaseProcess, pipe: Connection, stacks: Connection, exit_pipe: Connection
    ) -> None:
        super().__init__(rank, server, pipe, stacks)
        self.exit_pipe = exit_pipe
        self.pid = None

    def has_begun(self) -> bool:
        """See :class:`RankHandle`."""
        return self.has_ended() or self.pid is not None

    def has_ended(self) -> bool:
        """See :class:`RankHandle`. Linux ends ranks with their server: the end of one is then the server's."""
        server = self.process.exitcode  # first, as what it has said of its ranks is then in the pipes
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

    def waitables(self) -> list[Any]:
        """Its pipe, and that of its exit code."""
        return [*([self.exit_pipe] if self.exitcode is None else []), *([self.pipe] if self.listening else [])]

    def kill(self) -> None:
        """See :class:`RankHandle`."""
        if self.process.is_alive() and self.process.pid:
            os.kill(self.process.pid, END)

    def close(self) -> None:
        """See :class:`RankHandle`. Forks have the server's sentinel, too: it is ready when all have ended."""
        if connection.wait([self.process.sentinel], JOIN_SECONDS):
            self.process.join()
        else:
            self.process.kill()
        for end in (self.pipe, self.stacks, self.exit_pipe):
            end.close()


def start(group: list[RankHandle], infos: Iterable[RankInfo], device_type: str) -> None:
    """Starts ranks by a server of theirs and adds them to the group; they wait for their job."""
    handles: list[RankHandle] = []
    ranks: list[RankPipes] = []
    with starting() as context:
        server = context.Process(target=serve, args=(ranks, device_type in TRIED_ON), name=SERVER)
        for info in infos:
            pipe, its_pipe = context.Pipe()
            stacks, its_stacks = context.Pipe(duplex=False)
            exit_pipe, its_exit_pipe = context.Pipe(duplex=False)
            ranks.append(RankPipes(info, its_pipe, its_stacks, its_exit_pipe))
            handles.append(ForkedHandle(info.rank, server, pipe, stacks, exit_pipe))
        server.start()
        group.extend(handles)
        for each in ranks:
            each.close()


def serve(ranks: list[RankPipes], forks: bool) -> None:
    """The server's only function, called with ``SIGNALS`` blocked, as they are not for it; ends the process."""
    die_with_parent()
    become_subreaper()
    set_name(SERVER)
    if forks:
        import_torch(ranks)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until a rank has its own handler
    running = dict[int, RankPipes]()
    fresh = dict[int, BaseProcess]()
    for each in ranks:
        try:
            pid = forked(each, ranks) if forks else spawned(each, fresh)
        except OSError as error:
            give_up(error, [each])
        running[pid] = each
        each.exit_pipe.send(pid)
        each.pipe.close()
        each.stacks.close()
    for pid, process in fresh.items():
        if process.exitcode is not None:  # multiprocessing waits for those that end before the next one starts
            running.pop(pid).exit_pipe.send(process.exitcode)
    signal.signal(END, end)
    die_with_parent(END)
    launcher = multiprocessing.parent_process()
    while running and launcher is not None and os.getppid() == launcher.pid:  # else it has ended before
        pid, status = os.wait()
        if pid in running:  # and not what a rank has left behind
            running.pop(pid).exit_pipe.send(os.waitstatus_to_exitcode(status))
    end()


def import_torch(ranks: list[RankPipes]) -> None:
    """Imports what all ranks need, and makes ready to be forked."""
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
    """Ends the server, and by that its ranks, for what these ranks lack."""
    for each in ranks:
        with suppress(OSError):
            each.pipe.send(described(error))
    end()


def end(*_: object) -> NoReturn:
    """Ends the server with all that is below it."""
    signal.signal(END, signal.SIG_IGN)
    kill_descendants()
    os._exit(1)  # as a rank does: it takes a second to take torch apart


def forked(own: RankPipes, ranks: list[RankPipes]) -> int:
    """Starts a rank as a fork, and returns its process id."""
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        for other in ranks:
            if other is not own:
                other.close()
        own.exit_pipe.close()
        multiprocessing.current_process().name = f"rank {own.info.rank}"
        if "numpy.random" in sys.modules:  # as it is with Python's own generator
            sys.modules["numpy.random"].seed()
        become(own.info, own.pipe, own.stacks, server)
    return pid


def spawned(own: RankPipes, fresh: dict[int, BaseProcess]) -> int:
    """Starts a rank as a fresh interpreter, which is added to the others, and returns its process id."""
    arguments = (own.info, own.pipe, own.stacks, os.getpid())
    process = multiprocessing.get_context("spawn").Process(target=become, args=arguments, name=f"rank {own.info.rank}")
    process.start()
    assert process.pid is not None
    fresh[process.pid] = process
    return process.pid


def become(info: RankInfo, pipe: Connection, stacks: Connection, server: int) -> None:
    """Makes this process, which is the server's, a rank; does not return."""
    die_with_parent()
    if os.getppid() != server:  # which has ended before
        os._exit(1)
    start_rank(info, pipe, stacks)
