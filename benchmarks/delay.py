"""A proxy that keeps what a client sends for a while: ``python -m benchmarks.delay PORT SECONDS``; prints its own port.

A request that comes in one piece is so late by that time, on any number of connections; answers pass at once.
"""

from __future__ import annotations

import asyncio
import sys

PIECE = 1 << 18  # bytes


async def main(port: int, seconds: float) -> None:
    """Serves until it is ended."""

    async def passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wait: float) -> None:
        try:
            while piece := await reader.read(PIECE):
                await asyncio.sleep(wait)
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(passed_on(reader, back, seconds), passed_on(there, writer, 0.0))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
