"""Who connects to a launcher's port: agents, who know the run's key, and strangers, who must not hold anything up."""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe, connection
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from types import TracebackType
from typing import Any, Self

from flyte_ddp.launch.supervise.network import cut_off_after, is_loopback, keep_alive, shut

HELLO_SECONDS = 10.0  # in all, for one that has connected to prove that it knows the key and to say who it is
HELLO_BYTES = 4096
HELLO = {"rank": int, "host": str, "shares": bool, "code": str, "clock": float}
MOST_AT_ONCE = 64  # others wait until one of those has been accepted or refused
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Arrival:
    """An agent that knows the key."""

    rank: int
    host: str  # its address by its own account
    shares: bool  # the launcher's run folder
    code: str  # digest of its library
    clock: float  # of its host, as ``time.monotonic()``, when it said this
    pipe: Connection
    seen_at: str  # its address as the launcher sees it
    reached_at: str  # the launcher's address that it connected to
    heard_at: float  # by the launcher's own clock, likewise

    @property
    def is_here(self) -> bool:
        """Whether it is on the launcher's host."""
        return is_loopback(self.seen_at) or self.seen_at == self.reached_at


def fields_of(text: bytes, kinds: Mapping[str, type]) -> dict[str, Any]:
    """The values of these names and types in a JSON object; raises anything for what a stranger may have sent."""
    found = json.loads(text)
    if not isinstance(found, dict) or any(type(found.get(name)) is not kind for name, kind in kinds.items()):
        raise ValueError("not from an agent")
    return {name: found[name] for name in kinds}


class Door:
    """Accepts agents as they connect, each by a thread of its own; a context manager.

    Args:
        server: listens.
        key: what agents must know.
    """

    def __init__(self, server: socket.socket, key: bytes) -> None:
        self.server, self.key = server, key
        self.accepted: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self.unproven: set[socket.socket] = set()
        self.capacity = threading.Semaphore(MOST_AT_ONCE)
        self.lock = threading.Lock()  # for those who have proven nothing yet, and for being closed
        self.closed = threading.Event()
        self.waker, self.wake = Pipe(duplex=False)
        self.thread = threading.Thread(target=self.accept, name="door", daemon=True)

    def __enter__(self) -> Self:
        self.server.settimeout(POLL_SECONDS)
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self.lock:
            self.closed.set()
            self.wake.close()
            for connected in self.unproven:
                shut(connected)
        self.thread.join()
        self.waker.close()
        for arrival in self.arrivals(0.0):
            arrival.pipe.close()

    def arrivals(self, seconds: float = POLL_SECONDS) -> list[Arrival]:
        """Those accepted since the last call; waits so long for one."""
        found: list[Arrival] = []
        try:
            while True:
                found.append(self.accepted.get(timeout=0.0 if found else seconds))
        except queue.Empty:
            return found

    def accept(self) -> None:
        """The thread's function."""
        while self.waker not in connection.wait([self.server, self.waker]):
            if not self.capacity.acquire(timeout=POLL_SECONDS):
                continue
            try:
                connected, _ = self.server.accept()
            except OSError as error:  # who had connected is gone, or too many files are open
                self.capacity.release()
                if not isinstance(error, TimeoutError):
                    self.closed.wait(POLL_SECONDS)
                continue
            with self.lock:
                self.unproven.add(connected)
            threading.Thread(target=self.receive, args=(connected,), name="arrival", daemon=True).start()

    def receive(self, connected: socket.socket) -> None:
        """Accepts one who is an agent, and ends any other connection."""
        pipe = None
        try:
            pipe = Connection(os.dup(connected.fileno()))
            arrival = self.greeted(connected, pipe)
        except Exception:  # whatever a stranger may bring about, too many open files among it
            if pipe is not None:
                pipe.close()
        else:
            with self.lock:
                if self.closed.is_set():
                    pipe.close()
                else:
                    self.accepted.put(arrival)
        finally:
            with self.lock:
                self.unproven.discard(connected)
            connected.close()
            self.capacity.release()

    def greeted(self, connected: socket.socket, pipe: Connection) -> Arrival:
        """Who it is; unpickles nothing, and raises anything for a stranger."""
        if self.closed.is_set():
            raise EOFError
        keep_alive(connected)
        with cut_off_after(connected, HELLO_SECONDS):
            deliver_challenge(pipe, self.key)
            answer_challenge(pipe, self.key)
            said = fields_of(pipe.recv_bytes(HELLO_BYTES), HELLO)
        heard_at = time.monotonic()
        seen_at, reached_at = connected.getpeername()[0], connected.getsockname()[0]
        return Arrival(**said, pipe=pipe, seen_at=seen_at, reached_at=reached_at, heard_at=heard_at)


def launchers_host(arrivals: Iterable[Arrival]) -> str:
    """Under which address ranks on the launcher's host can be reached by all who have connected.

    That is not always what they say themselves: they may have come over the loopback.
    """
    by_rank = sorted(arrivals, key=lambda arrival: arrival.rank)
    from_elsewhere = [arrival.reached_at for arrival in by_rank if not arrival.is_here]
    return (from_elsewhere or [arrival.host for arrival in by_rank])[0]
