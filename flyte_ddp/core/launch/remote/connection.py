"""Both ends of authenticated connections between a launcher and its agents on other hosts or Elastic's workers."""

import hmac
import os
import pickle
import queue
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path

from flyte_ddp.core.checks.parsing import JsonObject
from flyte_ddp.core.files import FilePiece
from flyte_ddp.core.launch.remote.file_sync import write_piece
from flyte_ddp.core.launch.supervise.link import RankInfo
from flyte_ddp.core.launch.supervise.messages import Assignment, Notice, RunOver
from flyte_ddp.core.launch.supervise.network import is_loopback
from flyte_ddp.core.runs.work import Work
from flyte_ddp.core.user_code.digest import package_digest

CONNECT_SECONDS = 10.0  # for a TCP connection to one of the launcher's addresses, and again for the proofs
HELLO_SECONDS = 10.0  # in all, for an agent to prove that it knows the key and to send its first message
# Connections without a proof at the same time, each with a thread, and their time limit when so many are open.
MOST_UNPROVED, CROWD_SECONDS = 64, 1.0
WAIT_SECONDS, POLL_SECONDS = 0.1, 0.01
LAUNCHER, AGENT = b"launcher", b"agent"  # roles in the proof
# A lost host is detected in 30 s, also if it does not confirm sent data (TCP_USER_TIMEOUT, milliseconds).
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}


@dataclass(frozen=True)
class JoinTicket:
    """The facts that an agent needs to join a run."""

    info: RankInfo
    hosts: tuple[str, ...]  # addresses at which the launcher may be reached, the likeliest first
    port: int
    key: bytes = field(repr=False)  # the run's secret, which both sides of a connection prove to know
    output_folder: Path  # the launcher's
    visibility_file: str  # name of a file in the output folder; an agent that finds the file sees the folder

    def to_stdin(self) -> bytes:
        """Return the bytes for an agent's stdin: the pickled RankInfo, and then the pickled ticket.

        With the RankInfo, an agent can start its rank before reading the ticket.
        """
        return pickle.dumps(self.info) + pickle.dumps(self)


class RunOverError(Exception):
    """The run has ended before this rank got work.

    ``outcome`` is the run's error, or None if the run has completed.
    """

    def __init__(self, outcome: BaseException | None) -> None:
        super().__init__(outcome)
        self.outcome = outcome


@contextmanager
def open_local_folder(ticket: JoinTicket) -> Iterator[Path]:
    """Yield the launcher's output folder if this host sees it, else a new temporary folder.

    The temporary folder is deleted at the end of the block.
    """
    if (ticket.output_folder / ticket.visibility_file).exists():
        yield ticket.output_folder
        return
    with tempfile.TemporaryDirectory(prefix="flyte-ddp-run-", ignore_cleanup_errors=True) as own:
        yield Path(own)


def connect_to_launcher(ticket: JoinTicket, folder: Path) -> Connection:
    """Connect to the launcher, introduce this rank, and return the open pipe.

    Tries each address of the ticket for up to 20 s. ``folder`` is this host's folder for the files of the run, as
    yielded by :func:`open_local_folder`.

    Raises:
        OSError, EOFError, AuthenticationError: All addresses have failed. This is the error of the last address.
    """
    failure: Exception = OSError("the launcher has no address")
    code = package_digest()  # first, because it takes long on a slow disk, and a busy launcher waits a second only
    for host in ticket.hosts:
        try:
            with socket.create_connection((host, ticket.port), timeout=CONNECT_SECONDS) as connected:
                connected.settimeout(None)
                own_folder = None if folder == ticket.output_folder else folder
                hello = {"rank": ticket.info.rank, "host": connected.getsockname()[0], "folder": own_folder}
                with (
                    shut_after(connected, CONNECT_SECONDS),
                    authenticated_pipe(connected, ticket.key, AGENT) as pipe,
                ):
                    pipe.send({**hello, "code": code})
                    return pipe  # which stays open after the block
        except (OSError, EOFError, AuthenticationError) as error:
            failure = error
    raise failure


def receive_work(pipe: Connection, folder: Path) -> tuple[Work, str]:
    """Wait for the work without a limit, and return the work and this host's address for other ranks.

    Files that come before the work are written into ``folder``. Imports the modules of the work's classes.

    Raises:
        RunOverError: The run is over.
        EOFError, OSError: The launcher is lost.
    """
    while True:
        match pipe.recv():
            case Assignment() as assignment:
                return pickle.loads(assignment.work), assignment.network
            case RunOver(error):
                raise RunOverError(error)
            case FilePiece() as piece:
                write_piece(folder, piece)
                if piece.is_last:
                    pipe.send(Notice.FILE_STORED)  # from now on other agents of this host may read the file


@dataclass(frozen=True)
class WorkerConnection:
    """A connection from an agent that has proved to know the run's key."""

    rank: int
    host: str  # the agent's address as the agent sees it
    folder: Path | None  # where the agent keeps the run's files; None: the agent sees the launcher's output folder
    code: str  # digest of the agent's library
    pipe: Connection
    peer_address: str  # the agent's address as the launcher sees it
    launcher_address: str  # the launcher's address that the agent connected to

    @property
    def is_on_launcher_host(self) -> bool:
        return is_loopback(self.peer_address) or self.peer_address == self.launcher_address


@contextmanager
def accept_agents(server: socket.socket, key: bytes) -> Iterator[queue.SimpleQueue[WorkerConnection]]:
    """Accept agents in threads during the block, and yield the queue of accepted agents.

    An accepted agent has proved to know the key. While MOST_UNPROVED connections have no proof, other connections wait
    for up to CROWD_SECONDS. ``server`` is a listening socket. The end of the block shuts it down, and closes the
    connections without a proof and the connections left in the queue.
    """
    arrived, over = queue.SimpleQueue[WorkerConnection](), threading.Event()
    unproved: dict[socket.socket, float] = {}  # start time of each connection without a proof

    def queue_if_authenticated(connected: socket.socket) -> None:
        """Queue the agent behind a connection, or close the connection if the peer does not prove to know the key."""
        with ExitStack() as at_end:
            at_end.callback(unproved.pop, connected, None)
            at_end.enter_context(suppress(OSError, EOFError, AuthenticationError))
            at_end.enter_context(connected)
            pipe = at_end.enter_context(authenticated_pipe(connected, key, LAUNCHER))
            hello: JsonObject = pipe.recv()  # unpickled only after the peer's proof
            unproved.pop(connected, None)
            # Another build's hello may have more values, or fewer: gather_agents compares ``code``.
            facts: JsonObject = {name: hello.get(name) for name in ("rank", "host", "folder", "code")}
            peer_address, launcher_address = connected.getpeername()[0], connected.getsockname()[0]
            arrived.put(
                WorkerConnection(**facts, pipe=pipe, peer_address=peer_address, launcher_address=launcher_address)
            )

    def accept() -> None:
        """Start a thread for each new connection, until the block is over."""
        while not over.is_set():
            shut_late(unproved)
            if len(unproved) >= MOST_UNPROVED:
                time.sleep(POLL_SECONDS)
                continue
            try:
                connected, _ = server.accept()
                unproved[connected] = time.monotonic()
                # In a thread, so that a slow peer does not delay other peers.
                threading.Thread(target=queue_if_authenticated, args=[connected], name="agent", daemon=True).start()
            except OSError:  # the block is over, no peer came, the peer is gone, or too many files are open
                time.sleep(POLL_SECONDS)
            except RuntimeError:  # the limit of threads is reached
                unproved.pop(connected)
                connected.close()

    server.settimeout(WAIT_SECONDS)  # where shutting the server down does not end accept()
    accepting = threading.Thread(target=accept, name="agents", daemon=True)
    accepting.start()
    try:
        yield arrived
    finally:
        over.set()
        shut_connection(server)
        accepting.join()
        for known in [*unproved]:
            shut_connection(known)
        with suppress(queue.Empty):
            while True:
                arrived.get_nowait().pipe.close()


def shut_late(unproved: dict[socket.socket, float]) -> None:
    """End the connections that have not given a proof in time, which is 10 s.

    ``unproved`` has the start time of each connection. From MOST_UNPROVED connections on, the time is 1 s.
    """
    patience = CROWD_SECONDS if len(unproved) >= MOST_UNPROVED else HELLO_SECONDS
    for connected, begin in [*unproved.items()]:
        if time.monotonic() > begin + patience:
            shut_connection(connected)


@contextmanager
def authenticated_pipe(connected: socket.socket, key: bytes, role: bytes) -> Iterator[Connection]:
    """Yield a pipe to a peer after both sides have proved to know the key.

    The proof is an HMAC of random bytes. ``role`` is this side's role, LAUNCHER or AGENT. Waits for the proof without a
    limit. The pipe stays open after the block, unless the proof or the block raises.

    Raises:
        AuthenticationError: The peer does not know the key.
        OSError, EOFError: The connection has ended.
    """
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    pipe = Connection(os.dup(connected.fileno()))
    try:
        challenge = secrets.token_bytes(32)
        pipe.send_bytes(challenge)
        pipe.send_bytes(hmac.digest(key, role + pipe.recv_bytes(64), "sha256"))
        # The roles differ, so that a peer cannot send back the proof that it has received.
        expected = hmac.digest(key, (AGENT if role == LAUNCHER else LAUNCHER) + challenge, "sha256")
        if not hmac.compare_digest(pipe.recv_bytes(64), expected):
            raise AuthenticationError("the peer does not know the run's key")  # noqa: TRY301 (closes the pipe)
        yield pipe
    except BaseException:
        pipe.close()
        raise


@contextmanager
def shut_after(connected: socket.socket, seconds: float) -> Iterator[None]:
    """Shut the connection down if the block takes longer than ``seconds``, so that its reads and writes end."""
    timer = threading.Timer(seconds, shut_connection, [connected])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def shut_connection(connected: socket.socket) -> None:
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
