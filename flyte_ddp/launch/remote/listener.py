"""The launcher's port: it takes agents that know the run's key; strangers cost it neither time nor trust."""

import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from flyte_ddp.launch.supervise.network import authenticated_pipe, is_loopback, shut

HELLO_SECONDS = 10.0  # in all, for a peer to prove that it knows the key and to say who it is
MOST_AT_ONCE = 64  # connections; more wait in the socket's queue until one of those is accepted or refused
WAIT_SECONDS, POLL_SECONDS = 0.1, 0.01
LAUNCHER, AGENT = b"launcher", b"agent"  # roles in the proof


@dataclass(frozen=True)
class WorkerConnection:
    """A connection from an agent that has proved that it knows the run's key."""

    rank: int
    host: str  # the agent's address by its own account
    folder: Path | None  # where it keeps the run's files; None: it sees the launcher's run folder
    code: str  # digest of its library
    clock: float  # ``time.monotonic()`` of its host when it sent these values
    pipe: Connection
    seen_at: str  # its address as the launcher sees it
    reached_at: str  # the launcher's address that it connected to
    received_at: float  # ``time.monotonic()`` of the launcher when it received these values

    @property
    def is_here(self) -> bool:
        """Whether the agent is on the launcher's host."""
        return is_loopback(self.seen_at) or self.seen_at == self.reached_at


class AuthenticatedListener:
    """Accepts agents, each in a thread of its own, so that a slow stranger delays nobody; a context manager.

    Args:
        server: a listening socket; it becomes non-blocking.
        key: what agents must know.
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
            shut(connected)  # its thread is reading, and ends by that
        self.pool.shutdown()
        for connection in self._take_proved():
            connection.pipe.close()

    def new_connections(self) -> list[WorkerConnection]:
        """Return the agents that have proved themselves since the last call; wait WAIT_SECONDS for one."""
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
        done = [future for future in self.unproved if future.done()]
        for future in done:
            self.unproved.pop(future).close()
        return [future.result() for future in done if future.exception() is None]

    def _authenticate(self, connected: socket.socket) -> WorkerConnection:
        connected.setblocking(True)
        with authenticated_pipe(connected, self.key, LAUNCHER, AGENT, HELLO_SECONDS) as pipe:
            hello: dict[str, Any] = pipe.recv()  # unpickled only after the peer's proof
            addresses = {"seen_at": connected.getpeername()[0], "reached_at": connected.getsockname()[0]}
            return WorkerConnection(**hello, **addresses, pipe=pipe, received_at=time.monotonic())
