"""HTTP servers on loopback, in a thread of the test's process."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class QuietHandler(BaseHTTPRequestHandler):
    """Keeps connections open, and prints nothing."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        del format, args

    def answer(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
        """Send status, headers and content."""
        self.send_response(status)
        for header, value in headers.items():
            self.send_header(header, value)
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()


class Server(ThreadingHTTPServer):
    """Does not wait for requests when the server ends."""

    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing about clients that were killed or have disconnected."""


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Run a server in a thread until the end of the block, on a port chosen by the system. Yield the address."""
    with Server(("127.0.0.1", 0), handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_address[1]}"
        finally:
            listening.shutdown()
            thread.join()
