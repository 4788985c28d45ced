"""Ranks on other hosts: an agent there starts each, as a process of its own, and is its proxy (agent.py, proxy.py).

An engine such as Ray or Dask starts the agents where it has capacity, and hands each its :class:`JoinTicket`. They
connect to the launcher over TCP, and from then on their ranks are a worker group like any other.
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

from flyte_ddp.code_digest import package_digest
from flyte_ddp.errors import RankError, UnreachableError, UserError
from flyte_ddp.launch.remote.arrivals import HELLO_SECONDS, Arrival, Door, launchers_host
from flyte_ddp.launch.remote.file_sync import APPENDED, send_file, take_piece
from flyte_ddp.launch.supervise.network import cut_off_after, keep_alive
from flyte_ddp.launch.supervise.rank_handle import RankHandle
from flyte_ddp.launch.supervise.rank_info import RankInfo
from flyte_ddp.launch.supervise.stopping import StopRequest, stop_requests
from flyte_ddp.launch.supervise.supervisor import end, watch
from flyte_ddp.runs.checkpoint import load_latest, newest_step
from flyte_ddp.runs.job import Job

GATHER_SECONDS = 300.0  # for all agents: images may have to be pulled, and nodes added
CONNECT_SECONDS = 10.0  # to an address that may be none of the launcher's
JOIN_SECONDS = 10.0  # for a killed rank to end
STACK_SECONDS = 3.0  # more than the agent's own


@dataclass(frozen=True)
class JoinTicket:
    """What an agent must know to join."""

    info: RankInfo
    hosts: tuple[str, ...]  # under which the launcher may be reached, the likeliest first
    port: int
    key: bytes = field(repr=False)
    run_folder: Path
    mark: str  # of a file in the run folder, which is there for those who share it


def join(ticket: JoinTicket) -> tuple[Connection, bool]:
    """Connects to the launcher, for a rank of this host.

    Returns:
        The connection, and whether the run folder is shared.

    Raises:
        OSError, EOFError, AuthenticationError: the launcher is at none of its addresses; what the last one did.
    """
    *others, last = ticket.hosts
    for host in others:
        with suppress(OSError, EOFError, AuthenticationError):
            return join_at(host, ticket)
    return join_at(last, ticket)


def join_at(host: str, ticket: JoinTicket) -> tuple[Connection, bool]:
    """The same under one of its addresses; nothing is unpickled of a side that has not proved that it knows the key."""
    connected = socket.create_connection((host, ticket.port), timeout=CONNECT_SECONDS)
    connected.settimeout(None)
    keep_alive(connected)
    pipe = Connection(os.dup(connected.fileno()))
    shares = (ticket.run_folder / ticket.mark).exists()
    own_host = connected.getsockname()[0]
    about = {"rank": ticket.info.rank, "host": own_host, "shares": shares, "code": package_digest()}
    try:
        with connected, cut_off_after(connected, HELLO_SECONDS):
            answer_challenge(pipe, ticket.key)
            deliver_challenge(pipe, ticket.key)
            pipe.send_bytes(json.dumps({**about, "clock": time.monotonic()}).encode())
    except BaseException as error:
        pipe.close()
        if isinstance(error, AssertionError):  # Python's, before 3.12, where the other side does not ask as a launcher
            raise AuthenticationError("no launcher") from None
        raise
    return pipe, shares


class RemoteHandle(RankHandle):
    """A rank whose proxy is an agent.

    Args:
        arrival: of the agent.
        host: under which address the other ranks reach the rank.
        folder: where files of a rank go that does not share the run folder; None for one that does.
    """

    def __init__(self, arrival: Arrival, host: str, folder: Path | None) -> None:
        super().__init__(arrival.rank, arrival.pipe, host)
        self.network, self.folder = host, folder
        self.clock_behind = arrival.heard_at - arrival.clock
        self.early: list[dict[str, Any]] = []
        self.is_here = arrival.is_here
        self.out_of_memory = False

    @property
    def lost(self) -> bool:
        """The agent is gone without having said how its rank ended."""
        return not self.listening and self.exitcode is None

    def ran_out_of_memory(self) -> bool:
        """Return what the agent has found on its host when the rank's process had ended.

        Of a rank that was lost on the launcher's host, as Elastic's are, it is what the launcher finds.
        """
        return self.out_of_memory or (self.lost and self.is_here and super().ran_out_of_memory())

    def waitables(self) -> list[Any]:
        """Its agent's connection."""
        return [self.pipe] if self.listening else []

    def messages(self) -> Iterator[dict[str, Any]]:
        """What the rank has sent since the last call; the agent's own messages are taken in here."""
        early, self.early = self.early, []
        for message in (*early, *super().messages()):
            if message["kind"] == "exit":
                self.exitcode, self.out_of_memory = message["code"], message.get("out_of_memory", False)
            elif message["kind"] == "file":
                if self.folder is not None:
                    take_piece(self.folder, message)
            else:
                yield message

    def hand_over(self, job: Job) -> None:
        """Sends the job, and before it the files that the agent must have of a folder not shared."""
        if self.folder is not None:
            with suppress(OSError):  # one that is lost is noticed by whoever listens to it
                send_file(self.pipe, job.run_folder / APPENDED, APPENDED)
                for path in (job.checkpoint.path if job.checkpoint else None, job.initial_weights):
                    if path is not None:
                        send_file(self.pipe, path, path.name)
        super().hand_over(job)

    def stack(self) -> str:
        """See :class:`RankHandle`."""
        self.send("stack")
        for message in self.heard_within(STACK_SECONDS):
            if message["kind"] == "stack":
                return str(message["text"])
            self.early.append(message)
        return ""

    def kill(self) -> None:
        """See :class:`RankHandle`; an agent also kills its rank when its connection to here ends."""
        self.send("kill")

    def close(self) -> None:
        """See :class:`RankHandle`."""
        if self.exitcode is None:
            for message in self.heard_within(JOIN_SECONDS):
                if message["kind"] == "exit":
                    break
        self.pipe.close()

    def heard_within(self, seconds: float) -> Iterator[dict[str, Any]]:
        """What the agent sends in this time, as it comes."""
        deadline = time.monotonic() + seconds
        with suppress(EOFError, OSError):
            while self.pipe.poll(max(0.0, deadline - time.monotonic())):
                yield self.pipe.recv()


@contextmanager
def open_rendezvous(
    job: Job, *hosts: str, listen: str | None = None, key: bytes | None = None, only_once: bool = False
) -> Iterator[Rendezvous]:
    """Where agents connect, at the address ``listen``: empty for all, None for the first of ``hosts``."""
    mark = f".shared-{secrets.token_hex(8)}.tmp"  # which the next run removes if this one cannot
    (job.run_folder / mark).touch()
    try:
        with socket.create_server((hosts[0] if listen is None else listen, 0), backlog=128) as server:
            yield Rendezvous(job, server, hosts, mark, key or secrets.token_bytes(32), only_once)
    finally:
        (job.run_folder / mark).unlink(missing_ok=True)


@dataclass
class Rendezvous:
    """Has agents connect, and supervises their ranks."""

    job: Job
    server: socket.socket  # listens
    hosts: tuple[str, ...]  # under which agents reach it
    mark: str  # name of a file in the run folder
    key: bytes  # which agents must know
    only_once: bool  # the engine does not send agents once more
    code: str = field(default_factory=package_digest)

    def ticket(self, info: RankInfo) -> JoinTicket:
        """For the agent of this rank."""
        return JoinTicket(info, self.hosts, self.server.getsockname()[1], self.key, self.job.run_folder, self.mark)

    def close(self) -> None:
        """Has agents that have not been accepted yet find nobody."""
        self.server.close()

    def run(self, num_ranks: int, check: Callable[[], None]) -> None:
        """Waits for all agents, hands them the job, and returns when all ranks have completed.

        Where another try may help after a failure, it is the engine's to send the agents once more, by its own rules;
        the run then goes on from its newest checkpoint. ``check`` raises if the engine knows that one will not come.
        """
        failure: RankError | None = None
        with stop_requests() as stop:
            while (failure := self.attempt(num_ranks, stop, check, failure)) is not None:
                pass

    def attempt(
        self, num_ranks: int, stop: StopRequest, check: Callable[[], None], before: RankError | None
    ) -> RankError | None:
        """Runs the job once; returns what has failed, if another attempt may help, for which it is ``before``."""
        group: list[RankHandle] = []
        try:
            self.gather(group, num_ranks, stop, check)
            if before is not None:
                self.job = from_newest_checkpoint(self.job, str(before).splitlines()[0])
            job = adapted(self.job, {handle.host for handle in group})
            for handle in group:
                handle.hand_over(job)
            watch(group, stop, job)
        except BaseException as error:
            if isinstance(error, RankError) and error.recoverable and not self.only_once:
                return error
            not_sent = isinstance(error, UnreachableError) and len(group) < num_ranks
            final = before if before is not None and not_sent else error
            broadcast_outcome(group, final)
            raise final from None
        else:
            broadcast_outcome(group, None)
            return None
        finally:
            end(group)

    def gather(self, group: list[RankHandle], num_ranks: int, stop: StopRequest, check: Callable[[], None]) -> None:
        """Adds the ranks whose agents connect, in their order.

        Of two that connect for one rank the later one counts: the engine has sent it because the other is gone.
        """
        deadline = time.monotonic() + GATHER_SECONDS
        found: dict[int, Arrival] = {}
        with Door(self.server, self.key) as door:
            while len(found) < num_ranks:
                if stop.signal is not None:
                    raise stop.error(newest_step(self.job.run_folder))  # an attempt before may have saved one
                check()
                if time.monotonic() > deadline:
                    missing = sorted(set(range(num_ranks)) - found.keys())
                    raise UnreachableError(
                        f"ranks {missing} of {num_ranks} did not connect to {' or '.join(self.hosts)} within "
                        f"{GATHER_SECONDS:g} s: their hosts cannot reach this one, or the cluster has no capacity for "
                        "them; correct that and run again"
                    )
                for arrival in door.arrivals():
                    self.refuse_other_code(arrival)
                    if not 0 <= arrival.rank < num_ranks:
                        arrival.pipe.close()
                        continue
                    if arrival.rank in found:
                        found[arrival.rank].pipe.close()
                    found[arrival.rank] = arrival
                    group[:] = self.handles(found)

    def refuse_other_code(self, arrival: Arrival) -> None:
        """Raises UserError if another copy of the library runs there."""
        if arrival.code != self.code:
            arrival.pipe.close()
            raise UserError(
                f"host {arrival.host} runs library sources {arrival.code}, and this one {self.code}; "
                "have the same flyte-ddp on all hosts of the cluster"
            )

    def handles(self, found: Mapping[int, Arrival]) -> list[RankHandle]:
        """Of those who have connected, by rank."""
        here = launchers_host(found.values())
        handles: list[RankHandle] = []
        for _, arrival in sorted(found.items()):
            host, folder = here if arrival.is_here else arrival.host, None if arrival.shares else self.job.run_folder
            handles.append(RemoteHandle(arrival, host, folder))
        return handles


def from_newest_checkpoint(job: Job, why: str) -> Job:
    """The job as it goes on from its newest checkpoint, which is said with the reason."""
    found = load_latest(job.run_folder, job.identity)
    if job.settings.progress != "off":
        what = f"going on after step {found.step:,}" if found else "restarting from scratch"
        print(f"{why}; {what}", file=sys.stderr, flush=True)
    return replace(job, checkpoint=found)


def adapted(job: Job, hosts: set[str]) -> Job:
    """The job as it is on these hosts: only ranks of one of them have memory that they share."""
    job = replace(job, num_nodes=len(hosts))
    if len(hosts) == 1 or job.hardware.strategy != "shared_memory":
        return job
    if job.hp.strategy == "shared_memory":
        raise UserError(
            f"strategy='shared_memory': needs all ranks on one host, and these are on {', '.join(sorted(hosts))}; "
            "use strategy='ddp' or 'auto'"
        )
    return replace(job, hardware=replace(job.hardware, strategy="ddp"))


def broadcast_outcome(group: Sequence[RankHandle], error: BaseException | None) -> None:
    """Tells what became of the run, and that no other try will follow."""
    for handle in group:
        handle.send("over", error=error)
