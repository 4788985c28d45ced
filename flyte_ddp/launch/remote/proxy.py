"""An agent's half of the conversation between a rank and its launcher on another host."""

import threading
from collections.abc import Callable
from contextlib import closing
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, wait
from typing import Any

from flyte_ddp.launch.remote import connection
from flyte_ddp.launch.remote.file_sync import SEND_SECONDS, FileSender
from flyte_ddp.launch.supervise.processes import RankHandle
from flyte_ddp.launch.supervise.rank_process import describe_error
from flyte_ddp.launch.supervise.stopping import StopRequest, catch_stop_signals


def proxy_rank(handle: RankHandle, ticket: connection.JoinTicket) -> bool:
    """Connect to the launcher, send the rank its work, pass messages on until the run is over; return whether it is.

    Waits without a limit, and does not end the rank. On SIGTERM and Ctrl-C asks the launcher to stop all ranks.
    Prepares the host for the work; reports a failure of that as the rank's error. Returns False if the connection to
    the launcher ends before the run is over: the engine may start the agent again.
    """
    try:
        with (
            connection.open_local_run_folder(ticket) as folder,
            closing(connection.connect_to_launcher(ticket, folder)) as pipe,
            catch_stop_signals() as stop,
        ):
            work, handle.network = connection.receive_work(pipe, folder)
            sending = threading.Lock()

            def send(message: dict[str, Any]) -> None:
                with sending:
                    pipe.send(message)

            # If this host does not see the launcher's run folder, its ranks write into that of one agent.
            files = FileSender(folder, send, enabled=folder == work.run_folder != ticket.run_folder)
            try:
                handle.send_work(work.prepare_on_host())
            except Exception as error:
                send(describe_error(error))
                send({"kind": "exit", "code": 1})
            else:
                with files.send_results_during():
                    if relay_messages(handle, pipe, send, stop, files):
                        return True
            while pipe.recv()["kind"] != "over":
                pass
            return True
    except (ConnectionRefusedError, connection.RunOverError):
        return True
    except (EOFError, OSError, AuthenticationError):  # the launcher is gone, or the port is another program's by now
        return False


def relay_messages(
    handle: RankHandle,
    pipe: Connection,
    send: Callable[[dict[str, Any]], None],
    stop: StopRequest,
    files: FileSender,
) -> bool:
    """Pass messages between rank and launcher until the rank has ended; return whether the run was over before that.

    Kills the rank or sends its stack if the launcher asks for that. Before each message of the rank sends the host's
    metrics and new checkpoints; before "completed" and "exit" also the remaining results, and before rank 0's
    "completed" all other files that it has written. Raises EOFError or OSError if the launcher is gone.
    """
    over = False

    def send_from_rank(message: dict[str, Any]) -> None:
        if message["kind"] in ("completed", "exit"):
            files.send_results()
        files.send_outputs(all_files=(message["kind"], handle.rank) == ("completed", 0))
        send(message)

    waited = [pipe, stop.reader]
    while True:
        ready = wait([*waited, *handle.waitables()], SEND_SECONDS if files.enabled else None)
        if stop.reader in ready:
            waited.remove(stop.reader)
            send({"kind": "stop"})
        ended = handle.poll_exit()  # before its messages are read, so that none of them is missed
        for message in handle.read_messages():
            send_from_rank(message)
        if ended:
            send_from_rank({"kind": "exit", "code": handle.exitcode, "out_of_memory": handle.ran_out_of_memory()})
            return over
        files.send_outputs()
        if pipe in ready:
            message = pipe.recv()
            over = over or message["kind"] == "over"
            if message["kind"] == "kill":
                handle.kill()
            elif message["kind"] == "stack":
                send({"kind": "stack", "text": handle.read_stack()})
            else:
                handle.send(**message)
