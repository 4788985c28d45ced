"""Ranks of one machine as forks of a process that has imported torch for all of them.

That takes more than a second of a CPU and some hundred MiB, which ranks that import torch themselves take once each.
Python's own ``forkserver`` lives as long as the process that first wanted one, with the environment of then; this one
is started for a run, and ends with its ranks.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from flyte_ddp.launch.gang import Member
from flyte_ddp.launch.link import described
from flyte_ddp.launch.offspring import end_offspring, take_in_orphans
from flyte_ddp.launch.place import Place
from flyte_ddp.launch.processes import JOIN_SECONDS, ProcessMember, starting
from flyte_ddp.launch.rank_process import die_with_parent, flush, quiet_torch, set_name, start_rank

POSSIBLE = sys.platform == "linux"  # elsewhere libraries rely on what a fork does not have
SERVER = "rank server"  # the name of its process
SERVER_SECONDS = 1.0  # for the server to end after a rank that others may still follow


@dataclass
class Seat:
    """A rank's ends of its pipes; by ``fate`` the server says which process it is, and with which code it has ended."""

    place: Place
    pipe: Connection
    stacks: Connection
    fate: Connection

    def close(self) -> None:
        """Closes those that are open."""
        for end in (self.pipe, self.stacks, self.fate):
            end.close()


class ForkedMember(ProcessMember):
    """A rank that is a process of the server's, which is one of this process's."""

    def __init__(self, rank: int, server: BaseProcess, pipe: Connection, stacks: Connection, fate: Connection) -> None:
        super().__init__(rank, server, pipe, stacks)
        self.fate = fate
        self.pid = None

    def has_begun(self) -> bool:
        """See :class:`Member`."""
        return self.has_ended() or self.pid is not None

    def has_ended(self) -> bool:
        """See :class:`Member`. Linux ends ranks with their server: of whom it says nothing, its own end is the end."""
        server = self.process.exitcode  # first, as what it has said of its ranks is then in the pipes
        with suppress(EOFError, OSError):
            while self.exitcode is None and self.fate.poll():
                told = self.fate.recv()
                if self.pid is None:
                    self.pid = told
                else:
                    self.exitcode = told
        if self.exitcode is None:
            self.exitcode = server
        return self.exitcode is not None

    def waitables(self) -> list[Any]:
        """Its pipe and its fate."""
        return [*([self.fate] if self.exitcode is None else []), *([self.pipe] if self.listening else [])]

    def kill(self) -> None:
        """See :class:`Member`."""
        if self.has_ended():  # its process's number may be another's
            return
        if self.pid is None:
            self.process.kill()
        else:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """See :class:`Member`."""
        deadline = time.monotonic() + JOIN_SECONDS
        while not self.has_ended() and (left := deadline - time.monotonic()) > 0:
            connection.wait([self.fate], left)
        connection.wait([self.process.sentinel], SERVER_SECONDS)  # forks have it, too: it is ready when all have ended
        self.process.join(SERVER_SECONDS)
        for end in (self.pipe, self.stacks, self.fate):
            end.close()


def start(gang: list[Member], places: Iterable[Place]) -> None:
    """Starts ranks by a server of theirs and adds them to the gang; they wait for their job."""
    members: list[ForkedMember] = []
    seats: list[Seat] = []
    with starting() as context:
        server = context.Process(target=serve, args=(seats,), name=SERVER)
        for place in places:
            pipe, its_pipe = context.Pipe()
            stacks, its_stacks = context.Pipe(duplex=False)
            fate, its_fate = context.Pipe(duplex=False)
            seats.append(Seat(place, its_pipe, its_stacks, its_fate))
            members.append(ForkedMember(place.rank, server, pipe, stacks, fate))
        server.start()
        gang.extend(members)
        for seat in seats:
            seat.close()


def serve(seats: list[Seat]) -> None:
    """The server's only function, called with ``SIGNALS`` blocked, as they are not for it; ends the process.

    What ranks have started, the server takes in when they end, and ends it in the end.
    """
    die_with_parent()
    take_in_orphans()
    set_name(SERVER)
    quiet_torch()
    faulthandler.register(signal.SIGUSR1, file=seats[0].stacks.fileno(), all_threads=False)
    try:
        import flyte_ddp.launch.rank  # noqa: F401
    except BaseException as error:
        give_up(error, seats)
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until a rank has its own handler
    flush()  # what was printed until now would be printed by each fork
    gc.collect()
    gc.freeze()  # the collector writes to what it looks at, and memory that is written to is no longer shared
    server, seats_of = os.getpid(), dict[int, Seat]()
    for seat in seats:
        try:
            pid = os.fork()
        except OSError as error:
            give_up(error, [seat])
        if pid == 0:
            become(seat, seats, server)
        seats_of[pid] = seat
        seat.fate.send(pid)
        seat.pipe.close()
        seat.stacks.close()
    end_with_launcher()
    while seats_of:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        if (left := seats_of.pop(ended.si_pid, None)) is not None:
            with suppress(OSError):  # the launcher waits no more for one that took too long to end
                left.fate.send(code)
        os.waitpid(ended.si_pid, 0)  # only now can the number become that of another process
    end_offspring()
    os._exit(0)  # as a rank does: it takes a second to take torch apart


def give_up(error: BaseException, seats: list[Seat]) -> NoReturn:
    """Ends the server, and by that its ranks, for what these ranks lack."""
    for seat in seats:
        with suppress(OSError):
            seat.pipe.send(described(error))
    end_offspring()
    os._exit(1)


def end_with_launcher() -> None:
    """Ends the ranks, and what they have started, when the launcher has ended; from when there are ranks."""

    def end(*_: object) -> None:
        end_offspring()
        os._exit(1)

    launcher = multiprocessing.parent_process()
    assert launcher is not None
    signal.signal(signal.SIGUSR2, end)
    die_with_parent(signal.SIGUSR2)
    if os.getppid() != launcher.pid:  # which has ended before
        end()


def become(seat: Seat, seats: list[Seat], server: int) -> None:
    """Makes a fork the rank of a seat; does not return."""
    die_with_parent()
    if os.getppid() != server:  # which has ended before
        os._exit(1)
    for other in seats:
        if other is not seat:
            other.close()
    seat.fate.close()
    multiprocessing.current_process().name = f"rank {seat.place.rank}"
    if "numpy.random" in sys.modules:  # as it is with Python's own generator
        sys.modules["numpy.random"].seed()
    start_rank(seat.place, seat.pipe, seat.stacks)
