"""A server on loopback that serves files, ranges and lists like HTTP, S3, Google and Azure, and fails on request."""

import hashlib
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from loopback import QuietHandler, serving

DEADLINE = 30.0  # seconds
CHANGED = {"Last-Modified": "Mon, 23 Nov 2026 12:00:00 GMT"}


@dataclass
class FileServer:
    """The state of a server, which tests read and change.

    ``files`` are served by name. In object storage, a name begins with the bucket. Each request for a file consumes the
    next of ``faults[name]``: an HTTP status, ``truncate`` (the connection ends halfway), ``alter`` (the last byte
    differs), ``reset`` (the connection is reset halfway), ``stall`` (half of the content, then nothing until ``over``),
    ``hang`` (no answer until ``over``), ``longer`` (a byte too many), ``unannounced`` (no length) or ``gzip`` (a header
    declares compression in transit). If ``tagged`` is False, files have no ETag. ``stalled`` is set while a request
    stalls. ``headers`` are the headers of the requests, and ``answers`` are headers for all answers. Lists come in
    pages of ``page`` entries. ``redirects`` are the new addresses of moved files.
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, list[int | str]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    queries: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)
    connections: list[int] = field(default_factory=list)
    redirects: dict[str, str] = field(default_factory=dict)
    page: int = 1000
    gives_parts: bool = True
    tagged: bool = True
    before_answer: threading.Barrier | None = None
    stalled: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def counts(self) -> Counter[str]:
        """The number of requests for each file."""
        return Counter(self.requests)


class Answer(QuietHandler):
    """Answers requests by the state."""

    state: FileServer

    def setup(self) -> None:
        super().setup()
        self.state.connections.append(self.client_address[1])

    def do_GET(self) -> None:
        """Send a file, a range of a file or a list, or fail."""
        address = urlsplit(self.path)
        name, query = unquote(address.path).lstrip("/"), parse_qs(address.query)
        self.state.requests.append(name)
        self.state.queries.append(address.query)
        self.state.headers.append(dict(self.headers))
        if self.state.before_answer is not None:
            self.state.before_answer.wait(DEADLINE)
        fault = self.state.faults[name].pop(0) if self.state.faults.get(name) else None
        listing = "list-type" in query or "comp" in query
        content = self.listed(name, query) if listing else self.state.files.get(name)
        if name in self.state.redirects:
            self.start(302, b"", Location=self.state.redirects[name])
        elif fault == "hang":
            self.state.over.wait(DEADLINE)
            self.close_connection = True
        elif isinstance(fault, int) or content is None:
            self.refuse(fault if isinstance(fault, int) else 404)
        else:
            self.serve(content, fault)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        """Store the request's file."""
        name = unquote(urlsplit(self.path).path).lstrip("/")
        self.state.requests.append(name)
        self.state.headers.append(dict(self.headers))
        self.state.files[name] = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.start(200, b"", ETag='"0"', **CHANGED)

    def refuse(self, status: int) -> None:
        """Send an error in the form of S3 and Azure."""
        code = {404: "NoSuchKey", 403: "AccessDenied"}.get(status, "Other")
        self.start(status, f"<Error><Code>{code}</Code></Error>".encode())

    def serve(self, content: bytes, fault: str | None) -> None:
        """Send the content, or the requested range of it, with a fault."""
        tag = {"ETag": f'"{hashlib.md5(content).hexdigest()}"', **CHANGED} if self.state.tagged else {}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked and self.state.gives_parts:
            start, end = int(asked[1]), int(asked[2]) + 1
            part = content[start:end]
            tag["Content-Range"] = f"bytes {start}-{start + len(part) - 1}/{len(content)}"
            if start < len(content):
                self.start(206, part, **tag)
            else:
                self.start(416, b"<Error><Code>InvalidRange</Code></Error>")
            return
        if fault == "alter":
            content = content[:-1] + bytes([content[-1] ^ 1])
        elif fault == "longer":
            content += b"\0"
        if fault in ("truncate", "reset", "stall"):
            self.start(200, content, given=len(content) // 2, **tag)
            self.close_connection = True
            if fault == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if fault == "stall":
                self.state.stalled.set()
                self.state.over.wait(DEADLINE)
            return
        if fault == "gzip":
            tag["Content-Encoding"] = "gzip"
        self.start(200, content, announced=fault != "unannounced", **tag)

    def start(
        self, status: int, content: bytes, *, given: int | None = None, announced: bool = True, **headers: str
    ) -> None:
        """Send status, headers and body, or the first ``given`` bytes of the body."""
        self.send_response(status)
        if announced:
            self.send_header("Content-Length", str(len(content)))
        else:
            self.send_header("Connection", "close")
            self.close_connection = True
        for name, value in {**headers, **self.state.answers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:given])
            self.wfile.flush()

    def listed(self, bucket: str, query: dict[str, list[str]]) -> bytes:
        """Return a page of the list of a bucket, in the form of S3, or of Azure."""
        bucket = bucket.rstrip("/")
        [prefix] = query.get("prefix", [""])
        keys = sorted(name[len(bucket) + 1 :] for name in self.state.files if name.startswith(f"{bucket}/{prefix}"))
        if "comp" in query:
            return self.listed_by_azure(bucket, keys, int(query.get("marker", ["0"])[0]))
        start = int(query.get("continuation-token", ["0"])[0])
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-11-23T12:00:00.000Z</LastModified>"
            f"<Size>{len(content)}</Size><ETag>&quot;{hashlib.md5(content).hexdigest()}&quot;</ETag></Contents>"
            for key, content in self.page(bucket, keys, start)
        )
        more = start + self.state.page < len(keys)
        following = f"<NextContinuationToken>{start + self.state.page}</NextContinuationToken>" if more else ""
        return (
            f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><IsTruncated>{str(more).lower()}'
            f"</IsTruncated>{following}{entries}</ListBucketResult>"
        ).encode()

    def listed_by_azure(self, container: str, keys: list[str], start: int) -> bytes:
        """Return a page of the list of a container, in the form of Azure's "List Blobs"."""
        entries = "".join(
            f"<Blob><Name>{escape(key)}</Name><Properties><Last-Modified>{CHANGED['Last-Modified']}</Last-Modified>"
            f"<Etag>{hashlib.md5(content).hexdigest()}</Etag><Content-Length>{len(content)}</Content-Length>"
            "<Content-Type>application/octet-stream</Content-Type><BlobType>BlockBlob</BlobType></Properties></Blob>"
            for key, content in self.page(container, keys, start)
        )
        following = str(start + self.state.page) if start + self.state.page < len(keys) else ""
        return (
            f"<EnumerationResults><Blobs>{entries}</Blobs><NextMarker>{following}</NextMarker></EnumerationResults>"
        ).encode()

    def page(self, bucket: str, keys: list[str], start: int) -> list[tuple[str, bytes]]:
        """Return names and contents of the objects of a page."""
        return [(key, self.state.files[f"{bucket}/{key}"]) for key in keys[start : start + self.state.page]]


@contextmanager
def file_server() -> Iterator[FileServer]:
    """Run a server in a thread until the end of the block."""
    state = FileServer()
    with serving(type("Handler", (Answer,), {"state": state})) as state.url:
        try:
            yield state
        finally:
            state.over.set()
