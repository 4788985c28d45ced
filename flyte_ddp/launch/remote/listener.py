"""The launcher's port. It accepts agents that know the run's key; others cannot delay it, and nothing is unpickled."""

import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from flyte_ddp.launch.supervise.network import authenticated_pipe, is_loopback, shut_connection

HELLO_SECONDS = 10.0  # in all, for a peer to prove that it knows the key and to send its first message
MOST_AT_ONCE = 64  # connections; more wait in the socket's queue until one of those is accepted or refused
WAIT_SECONDS, POLL_SECONDS = 0.1, 0.01
LAUNCHER, AGENT = b"launcher", b"agent"  # roles in the proof


@dataclass(frozen=True)
class WorkerConnection:
    """A connection from an agent that has proved that it knows the run's key."""

    rank: int
    host: str  # the agent's address as the agent sees it
    folder: Path | None  # where it keeps the run's files; None: it sees the launcher's run folder
    code: str  # digest of the agent's library
    clock: float  # ``time.monotonic()`` of its host when it sent these values
    pipe: Connection
    seen_at: str  # its address as the launcher sees it
    reached_at: str  # the launcher's address that it connected to
    received_at: float  # ``time.monotonic()`` of the launcher when it received these values

    @property
    def is_on_launcher_host(self) -> bool:
        """Whether the agent is on the launcher's host, by the connection's two addresses."""
        return is_loopback(self.seen_at) or self.seen_at == self.reached_at


class AuthenticatedListener:
    """Accepts agents, each in a thread of its own, so that a slow peer delays no other. A context manager.

    Its end closes all connections that new_connections has not returned; the socket stays open.

    Args:
        server: a listening socket; it is made non-blocking.
        key: the run's key, which agents must prove to know.
    """

    def __init__(self, server: socket.socket, key: bytes) -> None:
        server.setblocking(False)
        self.server, self.key = server, key
        self.pool = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="agent")
        self.unproved: dict[Future[WorkerConnection], socket.socket] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connected in self.unproved.values():
            shut_connection(connected)  # so that its thread, which is reading from it, ends
        self.pool.shutdown()
        for connection in self._take_proved():
            connection.pipe.close()

    def new_connections(self) -> list[WorkerConnection]:
        """Return the agents that have proved the key since the last call; wait up to WAIT_SECONDS for the first.

        Accepts connections of the socket while fewer than MOST_AT_ONCE are unproved. Drops those that fail.
        """
        deadline = time.monotonic() + WAIT_SECONDS
        proved: list[WorkerConnection] = []
        while not proved and time.monotonic() < deadline:
            with suppress(OSError):  # nobody is waiting, or too many files are open
                while len(self.unproved) < MOST_AT_ONCE:
                    connected, _ = self.server.accept()
                    self.unproved[self.pool.submit(self._authenticate, connected)] = connected
            time.sleep(POLL_SECONDS)
            proved = self._take_proved()
        return proved

    def _take_proved(self) -> list[WorkerConnection]:
        """Forget the connections whose proof has ended, and return those that have proved the key."""
        done = [future for future in self.unproved if future.done()]
        for future in done:
            self.unproved.pop(future).close()
        return [future.result() for future in done if future.exception() is None]

    def _authenticate(self, connected: socket.socket) -> WorkerConnection:
        """Exchange proofs of the key, and return the connection with the agent's first message; in a thread."""
        connected.setblocking(True)
        with authenticated_pipe(connected, self.key, LAUNCHER, AGENT, HELLO_SECONDS) as pipe:
            hello: dict[str, Any] = pipe.recv()  # unpickled only after the peer's proof
            addresses = {"seen_at": connected.getpeername()[0], "reached_at": connected.getsockname()[0]}
            return WorkerConnection(**hello, **addresses, pipe=pipe, received_at=time.monotonic())
