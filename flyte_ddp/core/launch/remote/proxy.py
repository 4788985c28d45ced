"""The agent's relay between a rank and its launcher on another host."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, wait
from pathlib import Path

from flyte_ddp.core.launch.remote import connection
from flyte_ddp.core.launch.remote.file_sync import SEND_SECONDS, FileSender, Send
from flyte_ddp.core.launch.supervise.failure_report import make_failure_report
from flyte_ddp.core.launch.supervise.messages import Exited, Message, Notice, RunOver, Save, Saved, Stack
from flyte_ddp.core.launch.supervise.rank_handle import RankHandle
from flyte_ddp.core.launch.supervise.stopping import call_on_signals
from flyte_ddp.core.machine.process import list_stop_signals
from flyte_ddp.core.runs.checkpoint import Handover

Outcome = BaseException | None  # of a run: its error, or None if the run has completed


class LauncherGoneError(ConnectionError):
    """The connection to the launcher has ended before the run was over."""


@contextmanager
def detect_lost_launcher() -> Iterator[None]:
    """Turn an OSError or EOFError of the block into LauncherGoneError.

    Use the pipe alone in the block, because any other OSError belongs to this host.
    """
    try:
        yield
    except (EOFError, OSError) as error:
        raise LauncherGoneError from error


def join_run(handle: RankHandle, ticket: connection.JoinTicket, start_rank: Callable[[], RankHandle]) -> bool:
    """Connect to the launcher, and relay messages as :func:`proxy_rank` does.

    Returns:
        True if the run is over, also if no process listens at the launcher's port any more. False if the launcher
            cannot be reached, or is lost.
    """
    with connection.open_local_folder(ticket) as folder:
        try:
            pipe = connection.connect_to_launcher(ticket, folder)
        except (EOFError, OSError, AuthenticationError) as error:  # another program may have the port by now
            return isinstance(error, ConnectionRefusedError)  # no process listens any more, so the run is over
        try:
            proxy_rank(handle, pipe, folder, start_rank)
        except LauncherGoneError:
            return False
        return True


def proxy_rank(handle: RankHandle, pipe: Connection, folder: Path, start_rank: Callable[[], RankHandle]) -> Outcome:
    """Relay messages between the launcher and the rank until the run is over, and return the run's error.

    When the launcher requests a restart, ``start_rank`` starts the rank again. Meanwhile SIGTERM and Ctrl-C request a
    stop from the launcher. At the end closes the pipe. Returns None if the run has completed.

    Args:
        handle: The rank, which already runs.
        pipe: The connection to the launcher, from :func:`connection.connect_to_launcher`.
        folder: This host's folder for the files of the run.
        start_rank: Kills the rank, and starts the rank again.

    Raises:
        LauncherGoneError: The launcher is lost.
    """
    sending = threading.Lock()

    def send(message: Message) -> None:
        with sending, detect_lost_launcher():
            pipe.send(message)

    def request_stop() -> None:
        with suppress(LauncherGoneError):
            send(Notice.STOP)

    with closing(pipe), call_on_signals(list_stop_signals(), request_stop):
        try:
            while True:
                relay_until_restart(handle, folder, pipe, send)
                handle = start_rank()
        except connection.RunOverError as over:
            return over.outcome


def relay_until_restart(handle: RankHandle, folder: Path, pipe: Connection, send: Send) -> None:
    """Pass the work on to the running rank, and relay messages until the launcher requests a restart.

    Files that come with the work are written into ``folder``. After the rank has ended, waits without a limit for the
    launcher's request. If this host fails, kills the rank and reports the error as the rank's error.

    Raises:
        RunOverError: The run is over, and the rank has ended or has not got its work.
        LauncherGoneError: The launcher is lost.
    """
    try:
        with detect_lost_launcher():
            work, handle.network = connection.receive_work(pipe, folder)
        folder_to_send = None if work.sees_run_folder else work.output_folder
        handle.queue_work(work)
        over = relay_until_exit(handle, pipe, send, folder_to_send)
    except (connection.RunOverError, LauncherGoneError):
        raise
    except Exception as error:  # of this host, such as a full disk, reported as the rank's error
        handle.kill()
        send(make_failure_report(error))
        send(Exited(1))
        over = None
    with detect_lost_launcher():
        while over is None:
            if (message := pipe.recv()) is Notice.RESTART:
                return
            over = message if isinstance(message, RunOver) else None
    raise connection.RunOverError(over.error)


def relay_until_exit(handle: RankHandle, pipe: Connection, send: Send, folder: Path | None) -> RunOver | None:
    """Relay messages until the rank exits, and send the launcher the exit code.

    If the launcher requests so, kills the rank or sends its stack. Sends changed files of ``folder`` if the rank is 0,
    or after the launcher has asked this rank to stand in for rank 0.

    Args:
        handle: The rank.
        pipe: The connection to the launcher.
        send: Sends the launcher a message.
        folder: This host's folder of the run, or None if the launcher sees the folder.

    Returns:
        The launcher's message that the run is over, or None if no such message has come.

    Raises:
        LauncherGoneError: The launcher is lost.
    """
    over: RunOver | None = None
    files = FileSender(folder, send) if folder is not None and handle.rank == 0 else None

    def send_from_rank(message: Message) -> None:
        if files is not None:  # first, because the message may be about the files
            files.send_changes(all_files=message is Notice.COMPLETED)
        send(message)

    while True:
        ready = wait([pipe, *handle.waitables()], SEND_SECONDS if files else None)
        ended = handle.poll_exit()  # before the messages are read, so that no message is missed
        for message in handle.read_messages():  # for a limited time, including the sending
            send_from_rank(message)
        if ended:
            send_from_rank(Exited(handle.exitcode, handle.ran_out_of_memory()))
            return over
        if files is not None:
            files.send_changes()
        if pipe in ready:
            with detect_lost_launcher():
                message = pipe.recv()
            over = message if isinstance(message, RunOver) else over
            if isinstance(message, Handover) and folder is not None:
                files = FileSender(folder, send)
            hand_to_rank(message, handle, send)


def hand_to_rank(message: Message, handle: RankHandle, send: Send) -> None:
    """Do what the launcher requests of the agent, or pass the message on to the rank."""
    match message:
        case Notice.KILL:
            handle.kill()
        case Notice.READ_STACK:
            send(Stack(handle.request_stack()))
        case Save() if not handle.has_started():
            send(Saved(handle.resumed_step))
        case _:
            handle.send(message)
