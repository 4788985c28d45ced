"""Stands for a rank at its launcher, which is on another host: passes on what they have to tell each other."""

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

from flyte_ddp.job import Job
from flyte_ddp.launch.files import Mirror, Receiver
from flyte_ddp.launch.gang import Member
from flyte_ddp.launch.host_data import prepared_here
from flyte_ddp.launch.link import described
from flyte_ddp.launch.remote import Invitation, come
from flyte_ddp.launch.stopping import StopRequest

MIRROR_SECONDS = 0.5


def stand_for(member: Member, invitation: Invitation) -> bool:
    """Comes to the launcher, and has the rank do its job.

    Args:
        member: the rank, which has been started; it is the caller's to end it.
        invitation: of it.

    Returns:
        Whether that is all; if not, another try may be of use.
    """
    try:
        pipe, shares = come(invitation)
        with folder_of(invitation.run_folder, shares) as folder, StopRequest() as stop:
            job, host = received(pipe, folder, shares=shares)
            member.send("network", host=host)
            mirror = None if shares or member.rank else Mirror(folder, pipe.send)
            try:
                member.hand_over(replace(job, data=prepared_here(job)))
            except Exception as error:
                pipe.send(described(error))
                pipe.send({"kind": "exit", "code": 1})
                return last_word(pipe)
            return relay(member, pipe, stop, mirror) or last_word(pipe)
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
    """The run has come to its end without this rank.

    Args:
        verdict: what became of it; None where it is completed.
    """

    def __init__(self, verdict: BaseException | None) -> None:
        super().__init__(verdict)
        self.verdict = verdict


def last_word(pipe: Connection) -> bool:
    """Waits until the launcher says that all is over, or is gone, which is an EOFError or a ConnectionError."""
    while pipe.recv()["kind"] != "over":
        pass
    return True


def received(pipe: Connection, folder: Path, *, shares: bool) -> tuple[Job, str]:
    """The job, with the files that come with it where the run folder is not shared, and this host's address.

    Raises:
        RunOverError: there is no job any more.
        EOFError, OSError: the launcher is gone.
    """
    come: dict[str, Receiver] = {}
    host = ""
    while (message := pipe.recv())["kind"] != "job":
        if message["kind"] == "over":
            raise RunOverError(message["error"])
        if message["kind"] == "network":
            host = message["host"]
        elif message["kind"] == "file":
            name = Path(message["name"]).name
            come.setdefault(name, Receiver(folder, (name,))).take({**message, "name": name})
    job: Job = pickle.loads(message["job"])
    if shares:
        return job, host
    found, weights = job.checkpoint, job.initial_weights
    own = replace(
        job,
        run_folder=folder,
        checkpoint=replace(found, path=folder / found.path.name) if found else None,
        initial_weights=folder / weights.name if weights else None,
    )
    return own, host


def relay(member: Member, pipe: Connection, stop: StopRequest, mirror: Mirror | None) -> bool:
    """Passes messages on until the rank has ended; its files go before what it says of them.

    Returns:
        Whether the launcher has said that all is over.
    """
    over = False

    def tell(message: dict[str, Any]) -> None:
        if mirror is not None:
            mirror.send_new()
        pipe.send(message)

    waited = [pipe, stop.reader]
    while True:
        ready = connection.wait([*waited, *member.waitables()], MIRROR_SECONDS if mirror else None)
        if stop.reader in ready:
            waited.remove(stop.reader)
            pipe.send({"kind": "stop"})
        ended = member.has_ended()
        for message in member.messages():
            tell(message)
        if ended:
            tell({"kind": "exit", "code": member.exitcode})
            return over
        if mirror is not None:
            mirror.send_new()
        if pipe in ready:
            message = pipe.recv()
            over = over or message["kind"] == "over"
            do(message, member, pipe)


def do(message: dict[str, Any], member: Member, pipe: Connection) -> None:
    """What the launcher has asked for: of this process, or of the rank."""
    if message["kind"] == "kill":
        member.kill()
    elif message["kind"] == "stack":
        pipe.send({"kind": "stack", "text": member.stack()})
    else:
        member.send(**message)
