"""An HTTP server on loopback that serves bytes from memory and fails on request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class FaultyServer:
    """``faults[name]`` are done one a request, in order, before the file is served as it should be.

    A fault is an HTTP status, ``truncate`` (the connection ends halfway), ``alter`` (one byte differs), ``hang`` (no
    answer), ``stall`` (no more after half of it), or ``gzip`` (a header says the content is compressed for the way).
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, list[int | str]] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    before_answer: threading.Barrier | None = None
    over: threading.Event = field(default_factory=threading.Event)


@contextmanager
def faulty_server() -> Iterator[FaultyServer]:
    """Runs a server in a thread until the context ends."""
    state = FaultyServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self, state)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            del format, args

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", 0), Handler) as listening:
        state.url = f"http://127.0.0.1:{listening.server_address[1]}"
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield state
        finally:
            state.over.set()
            listening.shutdown()
            thread.join()


def answer(handler: BaseHTTPRequestHandler, state: FaultyServer) -> None:
    """Serves one request, or fails it."""
    name = handler.path.lstrip("/")
    state.requests.append(name)
    fault = state.faults[name].pop(0) if state.faults.get(name) else None
    content = state.files.get(name)
    if state.before_answer is not None:
        state.before_answer.wait(20)
    if fault == "hang":
        state.over.wait(20)
        return
    if isinstance(fault, int) or content is None:
        handler.send_error(fault if isinstance(fault, int) else 404)
        return
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(content)))
    for key, value in state.headers.items():
        handler.send_header(key, value)
    if fault == "gzip":
        handler.send_header("Content-Encoding", "gzip")
    handler.end_headers()
    if fault == "alter":
        content = content[:-1] + bytes([content[-1] ^ 1])
    if handler.command == "GET":
        handler.wfile.write(content[: len(content) // 2] if fault in ("truncate", "stall") else content)
    if fault == "stall":
        state.over.wait(20)
