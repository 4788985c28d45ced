"""Ranks on other hosts: an agent there starts each, as a process of its own, and stands for it (agent.py, standing.py).

An engine such as Ray or Dask starts the agents where it has room, and hands each its :class:`Invitation`. They come to
the launcher over TCP, and from then on their ranks are members of a gang like any others.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from flyte_ddp.checkpoint import go_on_from
from flyte_ddp.code_digest import library_digest
from flyte_ddp.errors import RankError, UnreachableError, UserError
from flyte_ddp.job import Job
from flyte_ddp.launch.arrivals import HELLO_SECONDS, Arrival, Door, launchers_host
from flyte_ddp.launch.files import APPENDED, Receiver, send_file
from flyte_ddp.launch.gang import Member, end, watch
from flyte_ddp.launch.network import cut_off_after, keep_alive
from flyte_ddp.launch.place import Place
from flyte_ddp.launch.stopping import StopRequest

COME_SECONDS = 300.0  # for all agents: images may have to be pulled, and nodes added
CONNECT_SECONDS = 10.0  # to an address that may be none of the launcher's
JOIN_SECONDS = 10.0  # for a killed rank to end
STACK_SECONDS = 3.0  # more than the agent's own


@dataclass(frozen=True)
class Invitation:
    """What an agent must know to come."""

    place: Place
    hosts: tuple[str, ...]  # under which the launcher may be reached, the likeliest first
    port: int
    key: bytes = field(repr=False)
    run_folder: Path
    mark: str  # of a file in the run folder, which is there for those who share it


def come(invitation: Invitation) -> tuple[Connection, bool]:
    """Comes to the launcher, as one who knows the key; whoever comes stands for a rank on this host.

    Returns:
        The connection, and whether the run folder is shared.

    Raises:
        OSError, EOFError, AuthenticationError: at none of its addresses the launcher lets us in; what the last one did.
    """
    *others, last = invitation.hosts
    for host in others:
        with suppress(OSError, EOFError, AuthenticationError):
            return come_to(host, invitation)
    return come_to(last, invitation)


def come_to(host: str, invitation: Invitation) -> tuple[Connection, bool]:
    """Comes to the launcher under one of its addresses; nothing of what is there is unpickled before it knows the key.

    See :func:`come`.
    """
    connected = socket.create_connection((host, invitation.port), timeout=CONNECT_SECONDS)
    connected.settimeout(None)
    keep_alive(connected)
    pipe = Connection(os.dup(connected.fileno()))
    shares = (invitation.run_folder / invitation.mark).exists()
    about = {
        "rank": invitation.place.rank,
        "host": connected.getsockname()[0],
        "shares": shares,
        "code": library_digest(),
    }
    try:
        with connected, cut_off_after(connected, HELLO_SECONDS):
            answer_challenge(pipe, invitation.key)
            deliver_challenge(pipe, invitation.key)
            pipe.send_bytes(json.dumps(about).encode())
    except BaseException as error:
        pipe.close()
        if isinstance(error, AssertionError):  # Python's, before 3.12, where the other side does not ask as a launcher
            raise AuthenticationError("no launcher") from None
        raise
    return pipe, shares


class RemoteMember(Member):
    """A rank that an agent stands for.

    Args:
        rank: which one.
        pipe: to the agent.
        host: of the agent, as others reach it.
        receiver: takes the files of a rank that does not share the launcher's run folder.
    """

    def __init__(self, rank: int, pipe: Connection, host: str, receiver: Receiver | None) -> None:
        super().__init__(rank, pipe, host)
        self.receiver = receiver
        self.early: list[dict[str, Any]] = []

    @property
    def lost(self) -> bool:
        """The agent is gone without a word about its rank."""
        return not self.listening and self.exitcode is None

    def waitables(self) -> list[Any]:
        """Its agent's connection."""
        return [self.pipe] if self.listening else []

    def messages(self) -> Iterator[dict[str, Any]]:
        """What the rank has sent since the last call; the agent's own messages are taken in here."""
        early, self.early = self.early, []
        for message in (*early, *super().messages()):
            if message["kind"] == "exit":
                self.exitcode = message["code"]
            elif message["kind"] == "file":
                if self.receiver is not None:
                    self.receiver.take(message)
            else:
                yield message

    def hand_over(self, job: Job) -> None:
        """Sends the job, and before it what else the agent must have: its address, and files of a folder not shared."""
        self.send("network", host=self.host)
        if self.receiver is not None:
            with suppress(OSError):  # one that is lost is noticed by whoever listens to it
                send_file(self.pipe, job.run_folder / APPENDED, APPENDED)
                for path in (job.checkpoint.path if job.checkpoint else None, job.initial_weights):
                    if path is not None:
                        send_file(self.pipe, path, path.name)
        super().hand_over(job)

    def stack(self) -> str:
        """See :class:`Member`."""
        self.send("stack")
        deadline = time.monotonic() + STACK_SECONDS
        with suppress(EOFError, OSError):
            while self.pipe.poll(max(0.0, deadline - time.monotonic())):
                message = self.pipe.recv()
                if message["kind"] == "stack":
                    return str(message["text"])
                self.early.append(message)
        return ""

    def kill(self) -> None:
        """See :class:`Member`; an agent also kills its rank when its connection to here ends."""
        self.send("kill")

    def close(self) -> None:
        """See :class:`Member`."""
        deadline = time.monotonic() + JOIN_SECONDS
        with suppress(EOFError, OSError):
            while self.exitcode is None and self.pipe.poll(max(0.0, deadline - time.monotonic())):
                message = self.pipe.recv()
                self.exitcode = message["code"] if message["kind"] == "exit" else None
        self.pipe.close()
        if self.receiver is not None:
            self.receiver.close()


@contextmanager
def meeting_place(
    job: Job, *hosts: str, listen: str | None = None, key: bytes | None = None, only_once: bool = False
) -> Iterator[Meeting]:
    """Where agents come to, open until the end of the block; see :class:`Meeting`.

    Args:
        listen: the address to listen at, empty for all; None: the first of ``hosts``.
    """
    mark = f".shared-{secrets.token_hex(8)}.tmp"  # which the next run removes if this one cannot
    (job.run_folder / mark).touch()
    try:
        with socket.create_server((hosts[0] if listen is None else listen, 0), backlog=128) as server:
            yield Meeting(job, server, hosts, mark, key=key or secrets.token_bytes(32), only_once=only_once)
    finally:
        (job.run_folder / mark).unlink(missing_ok=True)


class Meeting:
    """Has agents come, and watches over their ranks.

    Args:
        job: of the run.
        server: listens.
        hosts: under which agents reach it.
        mark: name of a file in the run folder.
        key: which agents must know.
        only_once: the engine does not send agents once more.
    """

    def __init__(
        self, job: Job, server: socket.socket, hosts: tuple[str, ...], mark: str, *, key: bytes, only_once: bool
    ) -> None:
        self.job, self.server, self.hosts, self.mark = job, server, hosts, mark
        self.key, self.only_once = key, only_once
        self.code = library_digest()

    def invitation(self, place: Place) -> Invitation:
        """For the agent of this rank."""
        port = self.server.getsockname()[1]
        return Invitation(place, self.hosts, port, self.key, self.job.run_folder, self.mark)

    def close(self) -> None:
        """Has agents that have not been let in yet find nobody."""
        self.server.close()

    def run(self, num_ranks: int, check: Callable[[], None]) -> None:
        """Waits for all agents, hands them the job, and returns when all ranks have completed.

        Where a failure may be mended by another try, it is the engine's to send the agents once more, by its own
        rules; the run then goes on from its newest checkpoint.

        Args:
            num_ranks: how many have been invited.
            check: raises if the engine knows that one will not come.

        Raises:
            UserError: the user's mistake, as the rank that failed first reported it.
            UnreachableError: an agent did not come.
            RankError: any other failure of a rank, named by the rank that failed first.
            StoppedError: the process got SIGTERM; for Ctrl-C it is a KeyboardInterrupt.
        """
        failure: RankError | None = None
        with StopRequest() as stop:
            while (failure := self.attempt(num_ranks, stop, check, failure)) is not None:
                pass

    def attempt(
        self, num_ranks: int, stop: StopRequest, check: Callable[[], None], before: RankError | None
    ) -> RankError | None:
        """Runs the job once.

        Args:
            before: what failed in the attempt before this one.

        Returns:
            What has failed, if another attempt may mend it.
        """
        gang: list[Member] = []
        try:
            self.gather(gang, num_ranks, stop, check)
            if before is not None:
                self.job = from_newest_checkpoint(self.job, str(before).splitlines()[0])
            self.supervise(gang, stop)
        except BaseException as error:
            if isinstance(error, RankError) and error.recoverable and not self.only_once:
                return error
            not_sent = isinstance(error, UnreachableError) and len(gang) < num_ranks
            final = before if before is not None and not_sent else error
            over(gang, final)
            raise final from None
        else:
            over(gang)
            return None
        finally:
            end(gang)

    def supervise(self, gang: Sequence[Member], stop: StopRequest) -> None:
        """Hands the job over, and returns when all ranks have completed."""
        job = adapted(self.job, {member.host for member in gang})
        for member in gang:
            member.hand_over(job)
        watch(gang, stop, job)

    def gather(self, gang: list[Member], num_ranks: int, stop: StopRequest, check: Callable[[], None]) -> None:
        """Adds the ranks whose agents come, in their order.

        Of two that come for one rank the later one counts: the engine has sent it because the other is gone.
        """
        deadline = time.monotonic() + COME_SECONDS
        found: dict[int, Arrival] = {}
        with Door(self.server, self.key) as door:
            while len(found) < num_ranks:
                if stop.signal is not None:
                    raise stop.error(self.job.checkpoint.step if self.job.checkpoint else 0)
                check()
                if time.monotonic() > deadline:
                    missing = sorted(set(range(num_ranks)) - found.keys())
                    raise UnreachableError(
                        f"ranks {missing} of {num_ranks} did not come to {' or '.join(self.hosts)} within "
                        f"{COME_SECONDS:g} s: their hosts cannot reach this one, or the cluster has no room for them; "
                        "mend that and run again"
                    )
                for arrival in door.arrivals():
                    self.refuse_other_code(arrival)
                    if not 0 <= arrival.rank < num_ranks:
                        arrival.pipe.close()
                        continue
                    if arrival.rank in found:
                        found[arrival.rank].pipe.close()
                    found[arrival.rank] = arrival
                    gang[:] = self.members(found)

    def refuse_other_code(self, arrival: Arrival) -> None:
        """Raises UserError if another copy of the library runs there."""
        if arrival.code != self.code:
            arrival.pipe.close()
            raise UserError(
                f"host {arrival.host} runs library sources {arrival.code}, and this one {self.code}; "
                "have the same flyte-ddp on all hosts of the cluster"
            )

    def members(self, found: Mapping[int, Arrival]) -> list[Member]:
        """Those who have come, by rank."""
        here = launchers_host(found.values())
        return [
            RemoteMember(
                rank,
                arrival.pipe,
                here if arrival.is_here else arrival.host,
                None if arrival.shares else Receiver(self.job.run_folder),
            )
            for rank, arrival in sorted(found.items())
        ]


def from_newest_checkpoint(job: Job, why: str) -> Job:
    """The job as it goes on from its newest checkpoint, which is said with the reason."""
    found = go_on_from(job.run_folder, job.identity)
    if job.settings.progress != "off":
        what = f"going on after step {found.step:,}" if found else "restarting from scratch"
        print(f"{why}; {what}", file=sys.stderr, flush=True)
    return replace(job, checkpoint=found)


def adapted(job: Job, hosts: set[str]) -> Job:
    """The job as it is on these hosts: only ranks of one of them have memory that they share.

    Raises:
        UserError: shared memory was asked for.
    """
    job = replace(job, num_nodes=len(hosts))
    if len(hosts) == 1 or job.hardware.strategy != "shared_memory":
        return job
    if job.hp.strategy == "shared_memory":
        raise UserError(
            f"strategy='shared_memory': needs all ranks on one host, and these are on {', '.join(sorted(hosts))}; "
            "use strategy='ddp' or 'auto'"
        )
    return replace(job, hardware=replace(job.hardware, strategy="ddp"))


def over(gang: Sequence[Member], error: BaseException | None = None) -> None:
    """Tells what became of the run, and that no other try will follow."""
    for member in gang:
        member.send("over", error=error)
