"""How an agent, or a worker of Elastic's, joins a run: it connects to the launcher and receives the job."""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path

from flyte_ddp.code_digest import package_digest
from flyte_ddp.launch.remote.file_sync import take_piece
from flyte_ddp.launch.remote.listener import HELLO_SECONDS, ROLES
from flyte_ddp.launch.supervise.network import cut_off_after, keep_alive, prove_key
from flyte_ddp.launch.supervise.rank_info import RankInfo
from flyte_ddp.runs.job import Job

CONNECT_SECONDS = 10.0  # to an address that may be none of the launcher's


@dataclass(frozen=True)
class JoinTicket:
    """What an agent must know to join."""

    info: RankInfo
    hosts: tuple[str, ...]  # at which the launcher may be reached, the likeliest first
    port: int
    key: bytes = field(repr=False)
    run_folder: Path
    mark: str  # name of a file in the run folder, by which an agent finds out whether it sees that folder


class RunOverError(Exception):
    """The run has ended without this rank; with ``outcome`` None it has completed."""

    def __init__(self, outcome: BaseException | None) -> None:
        super().__init__(outcome)
        self.outcome = outcome


@contextmanager
def local_run_folder(ticket: JoinTicket) -> Iterator[Path]:
    """Yield the run folder if this host sees it, else a temporary folder, which is removed at the end."""
    if (ticket.run_folder / ticket.mark).exists():
        yield ticket.run_folder
        return
    with tempfile.TemporaryDirectory(prefix="flyte-ddp-run-", ignore_cleanup_errors=True) as own:
        yield Path(own)


def connect(ticket: JoinTicket, folder: Path) -> Connection:
    """Connect to the launcher for a rank of this host, trying its addresses in turn.

    Args:
        folder: of :func:`local_run_folder`.

    Raises:
        OSError, EOFError, AuthenticationError: the launcher is at none of its addresses; what the last one raised.
    """
    *others, last = ticket.hosts
    for host in others:
        with suppress(OSError, EOFError, AuthenticationError):
            return connect_to(host, ticket, folder)
    return connect_to(last, ticket, folder)


def connect_to(host: str, ticket: JoinTicket, folder: Path) -> Connection:
    """Connect to the launcher at one of its addresses; nothing is unpickled of a peer that does not know the key."""
    connected = socket.create_connection((host, ticket.port), timeout=CONNECT_SECONDS)
    connected.settimeout(None)
    keep_alive(connected)
    pipe = Connection(os.dup(connected.fileno()))
    try:
        with connected, cut_off_after(connected, HELLO_SECONDS):
            prove_key(pipe, ticket.key, *reversed(ROLES))
            own_host = connected.getsockname()[0]
            own_folder = None if folder == ticket.run_folder else folder
            hello = {"rank": ticket.info.rank, "host": own_host, "folder": own_folder, "code": package_digest()}
            pipe.send({**hello, "clock": time.monotonic()})
    except BaseException:
        pipe.close()
        raise
    return pipe


def receive_job(pipe: Connection, folder: Path) -> tuple[Job, str]:
    """Receive the files that the launcher sends first, into the folder, and then the job.

    Returns:
        The job, and the address of this host by which other ranks reach it.

    Raises:
        RunOverError: there is no job any more.
        EOFError, OSError: the launcher is gone.
    """
    while (message := pipe.recv())["kind"] != "job":
        if message["kind"] == "over":
            raise RunOverError(message["error"])
        if message["kind"] == "file":
            take_piece(folder, message)
            if message["last"]:
                pipe.send({"kind": "stored"})  # from now on other agents of this host may read it
    return pickle.loads(message["job"]), message["network"]
