"""A proxy that delays what clients send: ``python -m benchmarks.delay PORT SECONDS``; prints its own port.

Delays each request that arrives in one piece by that time, on any number of connections. Answers are not delayed.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable


class PassedOn(asyncio.Protocol):
    """One end of a connection: what comes in goes to the other end, once that is there, by ``send``."""

    def __init__(self, connected: Callable[[PassedOn], object] = lambda _: None) -> None:
        self.connected = connected
        self.early: list[bytes] = []  # that came before the other end was there
        self.send: Callable[[bytes], object] = self.early.append
        self.other: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the way to this end."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.connected(self)

    def data_received(self, data: bytes) -> None:
        """Passes it on."""
        self.send(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the other end, too."""
        if self.other is not None:
            self.other.close()

    def join(self, other: asyncio.Transport, send: Callable[[bytes], object]) -> None:
        """Begins to pass on."""
        self.other, self.send = other, send
        for data in self.early:
            send(data)


async def main(port: int, seconds: float) -> None:
    """Serves until it is ended."""
    loop = asyncio.get_running_loop()
    tasks = set()

    async def connect(client: PassedOn) -> None:
        _, server = await loop.create_connection(PassedOn, "127.0.0.1", port)
        server.join(client.transport, client.transport.write)
        client.join(server.transport, lambda data: loop.call_later(seconds, server.transport.write, data))

    def connected(client: PassedOn) -> None:
        task = loop.create_task(connect(client))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    proxy = await loop.create_server(lambda: PassedOn(connected), "127.0.0.1", 0)
    print(proxy.sockets[0].getsockname()[1], flush=True)
    await proxy.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
