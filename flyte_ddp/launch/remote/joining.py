"""How an agent, or a worker of Elastic's, joins a run: it connects to the launcher and receives the job."""

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
from flyte_ddp.launch.remote.file_sync import take_piece
from flyte_ddp.launch.remote.listener import AGENT, HELLO_SECONDS, LAUNCHER
from flyte_ddp.launch.supervise.network import authenticated_pipe
from flyte_ddp.launch.supervise.rank_process import RankInfo
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

    Nothing is unpickled of a peer that does not know the key.

    Args:
        folder: of :func:`local_run_folder`.

    Raises:
        OSError, EOFError, AuthenticationError: the launcher is at none of its addresses; what the last one raised.
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
