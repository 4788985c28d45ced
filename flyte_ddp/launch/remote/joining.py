"""Joins a run as an agent or a worker of Elastic's: connects to the launcher and receives the job."""

import pickle
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path

from flyte_ddp.code_digest import package_digest
from flyte_ddp.launch.remote.file_sync import write_piece
from flyte_ddp.launch.remote.listener import AGENT, HELLO_SECONDS, LAUNCHER
from flyte_ddp.launch.supervise.network import authenticated_pipe
from flyte_ddp.launch.supervise.rank_process import RankInfo
from flyte_ddp.runs.job import Job

CONNECT_SECONDS = 10.0  # for a TCP connection to one of the launcher's addresses


@dataclass(frozen=True)
class JoinTicket:
    """What an agent must know to join a run."""

    info: RankInfo
    hosts: tuple[str, ...]  # addresses at which the launcher may be reached, the likeliest first
    port: int
    key: bytes = field(repr=False)  # the run's: both sides of a connection prove that they know it
    run_folder: Path  # the launcher's
    mark: str  # name of a file in the run folder: an agent that finds it sees that folder


class RunOverError(Exception):
    """The run has ended before this rank got a job. ``outcome`` is the run's error, None if it has completed."""

    def __init__(self, outcome: BaseException | None) -> None:
        super().__init__(outcome)
        self.outcome = outcome


@contextmanager
def open_local_run_folder(ticket: JoinTicket) -> Iterator[Path]:
    """Yield the run folder if this host sees it, else a new temporary folder, which is deleted at the end."""
    if (ticket.run_folder / ticket.mark).exists():
        yield ticket.run_folder
        return
    with tempfile.TemporaryDirectory(prefix="flyte-ddp-run-", ignore_cleanup_errors=True) as own:
        yield Path(own)


def connect_to_launcher(ticket: JoinTicket, folder: Path) -> Connection:
    """Connect to the launcher for a rank of this host, and return the pipe after both sides have proved the key.

    Tries the ticket's addresses in turn, each for up to CONNECT_SECONDS and HELLO_SECONDS. Unpickles nothing from a
    peer that does not know the key.

    Args:
        folder: of :func:`open_local_run_folder`.

    Raises:
        OSError, EOFError, AuthenticationError: no address leads to the launcher; the error of the last one.
    """
    failure: Exception = OSError("the launcher has no address")
    for host in ticket.hosts:
        try:
            with socket.create_connection((host, ticket.port), timeout=CONNECT_SECONDS) as connected:
                connected.settimeout(None)
                own_folder = None if folder == ticket.run_folder else folder
                hello = {"rank": ticket.info.rank, "host": connected.getsockname()[0], "folder": own_folder}
                with authenticated_pipe(connected, ticket.key, AGENT, LAUNCHER, HELLO_SECONDS) as pipe:
                    pipe.send({**hello, "code": package_digest(), "clock": time.monotonic()})
                    return pipe
        except (OSError, EOFError, AuthenticationError) as error:
            failure = error
    raise failure


def receive_job(pipe: Connection, folder: Path) -> tuple[Job, str]:
    """Write the files that the launcher sends first into the folder, then receive the job; wait without a limit.

    Returns:
        The job, and the address by which other ranks reach this host.

    Raises:
        RunOverError: the run has ended.
        EOFError, OSError: the launcher is gone.
        UserError: a file cannot be written.
    """
    while (message := pipe.recv())["kind"] != "job":
        if message["kind"] == "over":
            raise RunOverError(message["error"])
        if message["kind"] == "file":
            write_piece(folder, message)
            if message["last"]:
                pipe.send({"kind": "stored"})  # from now on other agents of this host may read it
    return pickle.loads(message["job"]), message["network"]
