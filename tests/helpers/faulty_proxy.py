"""A proxy on loopback before a real server, that fails on request and else hands on what comes."""

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote, urlsplit

from loopback import QuietHandler, serving

LATENCY = 0.02  # seconds


@dataclass
class Proxy:
    """``faults[path]`` are done one a request, in order.

    One is an HTTP status, ``truncate`` (the connection ends halfway), ``reset`` (it is reset halfway) or ``slow`` (the
    answer comes after ``LATENCY``). ``requests`` are the paths that were asked for. Paths that begin as one of
    ``denied`` are refused. Without ``lists``, lists are refused, and so is an object that is not there, as S3 does.
    """

    url: str = ""
    faults: dict[str, list[int | str]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    denied: tuple[str, ...] = ()
    lists: bool = True


def forwarded(host: str, request: BaseHTTPRequestHandler, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
    """Send a request to the real server; return status, headers and body of its answer."""
    with closing(HTTPConnection(host)) as connection:
        connection.putrequest(request.command, request.path, skip_host=True, skip_accept_encoding=True)
        for header, value in request.headers.items():  # the host, too, as it is signed
            connection.putheader(header, value)
        connection.endheaders(body or None)
        found = connection.getresponse()
        content = found.read()
    left_out = ("connection", "date", "transfer-encoding")
    headers = {key: value for key, value in found.getheaders() if key.lower() not in left_out}
    if request.command != "HEAD":
        headers["Content-Length"] = str(len(content))
    return found.status, headers, content


@contextmanager
def faulty_proxy(target: str) -> Iterator[Proxy]:
    """Run a proxy before ``target`` in a thread until the end of the block."""
    state, host = Proxy(), urlsplit(target).netloc

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            name = unquote(urlsplit(self.path).path).lstrip("/")
            state.requests.append(name)
            fault = state.faults[name].pop(0) if state.faults.get(name) else None
            if fault == "slow":
                time.sleep(LATENCY)
            if isinstance(fault, int):
                self.answer(fault, {"Content-Length": "0"}, b"")
                return
            status, headers, content = forwarded(host, self)
            listed = "list-type" in urlsplit(self.path).query
            if (name.startswith(state.denied) and not listed) or (not state.lists and (listed or status == 404)):
                self.deny()
                return
            cut = fault in ("truncate", "reset")
            self.answer(status, headers, content[: len(content) // 2] if cut else content)
            if cut:
                self.close_connection = True
            if fault == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        do_HEAD = do_GET

        def deny(self) -> None:
            content = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            self.answer(403, {"Content-Length": str(len(content))}, b"" if self.command == "HEAD" else content)

    with serving(Handler) as state.url:
        yield state
