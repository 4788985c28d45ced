"""A proxy on loopback before a real server. The proxy fails on request, and otherwise forwards requests."""

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote, urlsplit

from loopback import QuietHandler, serving
from s3_server import S3Server

LATENCY = 0.02  # seconds


@dataclass
class Proxy:
    """The state of a proxy, which tests read and change.

    Each request for a path consumes the next of ``faults[path]``: an HTTP status, ``truncate`` (the connection ends
    halfway), ``reset`` (the connection is reset halfway) or ``slow`` (the answer comes after ``LATENCY``). ``requests``
    are the requested paths. Paths that begin with an entry of ``denied`` are rejected. Without ``lists``, lists and
    missing objects are rejected, as S3 does. For a path in ``lost``, the next PUT is done but the answer is lost. For a
    path in ``conflicts``, the next PUT is answered by 409.
    """

    url: str = ""
    faults: dict[str, list[int | str]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    denied: tuple[str, ...] = ()
    lists: bool = True
    lost: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)


def forwarded(host: str, request: BaseHTTPRequestHandler, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
    """Send a request to the real server. Return status, headers and body of the answer."""
    with closing(HTTPConnection(host)) as connection:
        connection.putrequest(request.command, request.path, skip_host=True, skip_accept_encoding=True)
        for header, value in request.headers.items():  # includes the host, which is signed
            connection.putheader(header, value)
        connection.endheaders(body or None)
        found = connection.getresponse()
        content = found.read()
    left_out = ("connection", "date", "transfer-encoding")
    headers = {key: value for key, value in found.getheaders() if key.lower() not in left_out}
    if request.command != "HEAD":
        headers["Content-Length"] = str(len(content))
    return found.status, headers, content


class Answer(QuietHandler):
    """Answers requests by the state, the target and the target's folder."""

    state: Proxy
    host: str
    folder: Path | None
    lock: threading.Lock

    @property
    def name(self) -> str:
        """The requested path."""
        return unquote(urlsplit(self.path).path).lstrip("/")

    def do_GET(self) -> None:
        state, name = self.state, self.name
        state.requests.append(name)
        fault = state.faults[name].pop(0) if state.faults.get(name) else None
        if fault == "slow":
            time.sleep(LATENCY)
        if isinstance(fault, int):
            self.answer(fault, {"Content-Length": "0"}, b"")
            return
        status, headers, content = forwarded(self.host, self)
        listed = "list-type" in urlsplit(self.path).query
        if (name.startswith(state.denied) and not listed) or (not state.lists and (listed or status == 404)):
            self.refuse(403, "AccessDenied")
            return
        cut = fault in ("truncate", "reset")
        self.answer(status, headers, content[: len(content) // 2] if cut else content)
        if cut:
            self.close_connection = True
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        state, name, body = self.state, self.name, self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if name in state.conflicts:
            state.conflicts.remove(name)
            self.refuse(409, "ConditionalRequestConflict")
            return
        with self.lock:
            if self.folder is not None and self.headers.get("If-None-Match") == "*" and (self.folder / name).exists():
                self.refuse(412, "PreconditionFailed")
                return
            answer = forwarded(self.host, self, body)
        if name in state.lost:
            state.lost.remove(name)
            self.close_connection = True
        else:
            self.answer(*answer)

    def refuse(self, status: int, code: str) -> None:
        """Send an error in the form of S3."""
        content = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
        self.answer(status, {"Content-Length": str(len(content))}, b"" if self.command == "HEAD" else content)


@contextmanager
def faulty_proxy(target: str, folder: Path | None = None) -> Iterator[Proxy]:
    """Run a proxy before ``target`` in a thread until the end of the block.

    With ``folder``, the folder of the target's files, the proxy supports ``If-None-Match: *``.
    """
    state = Proxy()
    about = {"state": state, "host": urlsplit(target).netloc, "folder": folder, "lock": threading.Lock()}
    with serving(type("Handler", (Answer,), about)) as state.url:
        yield state


def locking_proxy(server: S3Server) -> AbstractContextManager[Proxy]:
    """Run a proxy that supports ``If-None-Match: *``, as S3 does and rclone does not."""
    return faulty_proxy(server.endpoint, server.folder)
