"""Stands for a rank on its host: ``python -m flyte_ddp.launch.agent``, with an :class:`Invitation` on its input.

A process of its own, so that the rank that it starts has a parent whose signals and children are nobody else's: Dask's
workers must not have children, and run tasks off their main threads. It ends with whoever started it, and the rank
with it.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flyte_ddp.job import Job
from flyte_ddp.launch.files import Mirror, Receiver
from flyte_ddp.launch.gang import Member, end
from flyte_ddp.launch.host_data import prepared_here
from flyte_ddp.launch.link import described
from flyte_ddp.launch.remote import Invitation, come
from flyte_ddp.launch.spawn import start
from flyte_ddp.launch.stopping import StopRequest

MIRROR_SECONDS = 0.5
SIOCGIFADDR = 0x8915  # linux/sockios.h
NETWORK_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class RankEndedError(RuntimeError):
    """An agent's rank did not come to its end. The launcher knows why; the engine may try again."""


def run(invitation: Invitation) -> None:
    """Starts an agent and waits for its end. What an engine calls where a rank is to be.

    Raises:
        RankEndedError: it was not a good one.
    """
    paths = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "flyte_ddp.launch.agent"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}) as process:
        assert process.stdin is not None
        process.stdin.write(pickle.dumps(invitation))
        process.stdin.flush()  # and it stays open: its end is the end of this process
        if process.wait():
            raise RankEndedError(f"rank {invitation.place.rank} did not come to its end")


def main() -> None:
    """The process's first function."""
    invitation = pickle.load(sys.stdin.buffer)
    threading.Thread(target=end_with_parent, name="parent", daemon=True).start()
    sys.exit(0 if serve(invitation) else 1)


def end_with_parent() -> None:
    """Ends this process, and by that its rank, when the one that started it has ended."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


def serve(invitation: Invitation) -> bool:
    """Comes to the launcher, starts the rank, and passes on what they have to tell each other.

    Returns:
        Whether that is all; if not, another try may be of use.
    """
    try:
        pipe, host, shares = come(invitation)
    except ConnectionRefusedError:  # the run is over
        return True
    except (EOFError, ConnectionError):
        return False
    use_network(host)
    try:
        return stand_for_rank(invitation, pipe, shares=shares)
    except (EOFError, ConnectionError):  # the launcher is gone
        return False


def stand_for_rank(invitation: Invitation, pipe: Connection, *, shares: bool) -> bool:
    """Starts the rank, and passes on what it and the launcher have to tell each other; whether that is all."""
    folder = invitation.run_folder if shares else Path(tempfile.mkdtemp(prefix="flyte-ddp-run-"))
    gang: list[Member] = []
    try:
        job = received(pipe, folder, shares=shares)
        mirror = Mirror(folder, pipe.send) if invitation.place.rank == 0 and not shares else None
        with StopRequest() as stop:
            try:
                start(gang, replace(job, data=prepared_here(job)), [invitation.place])
            except Exception as error:
                pipe.send(described(error))
                pipe.send({"kind": "exit", "code": 1})
                return last_word(pipe)
            return relay(gang[0], pipe, stop, mirror) or last_word(pipe)
    finally:
        end(gang)
        if not shares:
            shutil.rmtree(folder, ignore_errors=True)


def last_word(pipe: Connection) -> bool:
    """Waits until the launcher says that all is over, or is gone, which is an EOFError or a ConnectionError."""
    while pipe.recv()["kind"] != "over":
        pass
    return True


def received(pipe: Connection, folder: Path, *, shares: bool) -> Job:
    """The job, with the files that come with it where the run folder is not shared."""
    come: dict[str, Receiver] = {}
    while (message := pipe.recv())["kind"] == "file":
        name = Path(message["name"]).name
        come.setdefault(name, Receiver(folder, (name,))).take({**message, "name": name})
    job: Job = message["job"]
    if shares:
        return job
    found, weights = job.checkpoint, job.initial_weights
    return replace(
        job,
        run_folder=folder,
        checkpoint=replace(found, path=folder / found.path.name) if found else None,
        initial_weights=folder / weights.name if weights else None,
    )


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


def use_network(host: str) -> None:
    """Has the ranks talk over the interface that has this address, unless the user has chosen one."""
    for _, name in socket.if_nameindex():
        if address_of(name) == host:
            for variable in NETWORK_VARIABLES:
                os.environ.setdefault(variable, name)


def address_of(interface: str) -> str:
    """The interface's IPv4 address, or nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


if __name__ == "__main__":
    main()
