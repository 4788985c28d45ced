"""An agent's half of the conversation between a rank and its launcher on another host."""

from contextlib import closing
from dataclasses import replace
from multiprocessing import AuthenticationError, connection
from multiprocessing.connection import Connection
from typing import Any

from flyte_ddp.launch.remote.file_sync import MIRROR_SECONDS, Mirror
from flyte_ddp.launch.remote.host_data import find_prepared_data
from flyte_ddp.launch.remote.joining import JoinTicket, RunOverError, connect, local_run_folder, receive_job
from flyte_ddp.launch.supervise.link import describe_error
from flyte_ddp.launch.supervise.rank_handle import RankHandle
from flyte_ddp.launch.supervise.stopping import StopRequest, stop_requests


def proxy_rank(handle: RankHandle, ticket: JoinTicket) -> bool:
    """Connect to the launcher, and have a rank that was started do its job; does not end the rank.

    Returns:
        False if another try by the engine may help.
    """
    try:
        with local_run_folder(ticket) as folder, closing(connect(ticket, folder)) as pipe, stop_requests() as stop:
            job, handle.network = receive_job(pipe, folder)
            # If this host does not see the launcher's run folder, its ranks write into that of one agent.
            mirror = Mirror(folder, pipe.send) if folder == job.run_folder != ticket.run_folder else None
            try:
                handle.hand_over(replace(job, data=find_prepared_data(job)))
            except Exception as error:
                pipe.send(describe_error(error))
                pipe.send({"kind": "exit", "code": 1})
            else:
                if relay(handle, pipe, stop, mirror):
                    return True
            while pipe.recv()["kind"] != "over":
                pass
            return True
    except (ConnectionRefusedError, RunOverError):
        return True
    except (EOFError, OSError, AuthenticationError):  # the launcher is gone, or the port is another program's by now
        return False


def relay(handle: RankHandle, pipe: Connection, stop: StopRequest, mirror: Mirror | None) -> bool:
    """Pass messages on until the rank has ended; return whether the launcher has said by then that the run is over.

    The rank's files are sent before each of its messages, so that what a message speaks of is there when it comes.
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
        ended = handle.has_ended()  # before its messages are read, so that none of them is missed
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
            obey(message, handle, pipe)


def obey(message: dict[str, Any], handle: RankHandle, pipe: Connection) -> None:
    """Do what the launcher asks of this process; pass on to the rank what is for the rank."""
    if message["kind"] == "kill":
        handle.kill()
    elif message["kind"] == "stack":
        pipe.send({"kind": "stack", "text": handle.stack()})
    else:
        handle.send(**message)
