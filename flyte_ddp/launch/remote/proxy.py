"""A rank's proxy at its launcher, which is on another host: passes on what they have to tell each other."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import AuthenticationError, connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flyte_ddp.launch.remote.file_sync import Mirror, take_piece
from flyte_ddp.launch.remote.host_data import prepared_here
from flyte_ddp.launch.remote.rendezvous import JoinTicket, join
from flyte_ddp.launch.supervise.link import described
from flyte_ddp.launch.supervise.rank_handle import RankHandle
from flyte_ddp.launch.supervise.stopping import StopRequest, stop_requests
from flyte_ddp.runs.job import Job

MIRROR_SECONDS = 0.5


def proxy_rank(handle: RankHandle, ticket: JoinTicket) -> bool:
    """Connects to the launcher, and has a rank that was started do its job.

    Returns whether that is all; else another try may help. To end the rank is the caller's.
    """
    try:
        pipe, shares = join(ticket)
        with folder_of(ticket.run_folder, shares) as folder, stop_requests() as stop:
            job, host = received(pipe, folder, shares=shares)
            handle.network = host
            mirror = None if shares or handle.rank else Mirror(folder, pipe.send)
            try:
                handle.hand_over(replace(job, data=prepared_here(job)))
            except Exception as error:
                pipe.send(described(error))
                pipe.send({"kind": "exit", "code": 1})
            else:
                if relay(handle, pipe, stop, mirror):
                    return True
            while pipe.recv()["kind"] != "over":
                pass
            return True
    except (ConnectionRefusedError, RunOverError):
        return True
    except (EOFError, OSError, AuthenticationError):  # the launcher is gone, or it is another's by now
        return False


@contextmanager
def folder_of(shared: Path, shares: bool) -> Iterator[Path]:
    """The run folder where this host shares it, else one for this rank only."""
    if shares:
        yield shared
        return
    with tempfile.TemporaryDirectory(prefix="flyte-ddp-run-", ignore_cleanup_errors=True) as own:
        yield Path(own)


class RunOverError(Exception):
    """The run has ended without this rank; with ``outcome`` None it is completed."""

    def __init__(self, outcome: BaseException | None) -> None:
        super().__init__(outcome)
        self.outcome = outcome


def received(pipe: Connection, folder: Path, *, shares: bool) -> tuple[Job, str]:
    """The job, with the files that come with it where the run folder is not shared, and this host's address.

    Raises RunOverError if there is no job any more, EOFError or OSError if the launcher is gone.
    """
    while (message := pipe.recv())["kind"] != "job":
        if message["kind"] == "over":
            raise RunOverError(message["error"])
        if message["kind"] == "file":
            name = Path(message["name"]).name
            take_piece(folder, {**message, "name": name}, (name,))
    job: Job = pickle.loads(message["job"])
    if shares:
        return job, message["network"]
    found, weights = job.checkpoint, job.initial_weights
    own = replace(
        job,
        run_folder=folder,
        checkpoint=replace(found, path=folder / found.path.name) if found else None,
        initial_weights=folder / weights.name if weights else None,
    )
    return own, message["network"]


def relay(handle: RankHandle, pipe: Connection, stop: StopRequest, mirror: Mirror | None) -> bool:
    """Passes messages on until the rank has ended; returns whether the launcher has said by then that all is over.

    The rank's files go before what it says of them.
    """
    over = False

    def tell(message: dict[str, Any]) -> None:
        if mirror is not None:
            mirror.send_new()
        pipe.send(message)

    waited = [pipe, stop.reader]
    while True:
        ready = connection.wait([*waited, *handle.waitables()], MIRROR_SECONDS if mirror else None)
        if stop.reader in ready:
            waited.remove(stop.reader)
            pipe.send({"kind": "stop"})
        ended = handle.has_ended()
        for message in handle.messages():
            tell(message)
        if ended:
            tell({"kind": "exit", "code": handle.exitcode, "out_of_memory": handle.ran_out_of_memory()})
            return over
        if mirror is not None:
            mirror.send_new()
        if pipe in ready:
            message = pipe.recv()
            over = over or message["kind"] == "over"
            do(message, handle, pipe)


def do(message: dict[str, Any], handle: RankHandle, pipe: Connection) -> None:
    """What the launcher has asked for: of this process, or of the rank."""
    if message["kind"] == "kill":
        handle.kill()
    elif message["kind"] == "stack":
        pipe.send({"kind": "stack", "text": handle.stack()})
    else:
        handle.send(**message)
