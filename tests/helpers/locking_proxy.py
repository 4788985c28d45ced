"""A proxy on loopback before rclone's S3 server that keeps ``If-None-Match: *``, as S3 does and rclone does not."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from faulty_proxy import forwarded
from loopback import QuietHandler, serving
from s3_server import S3Server


@dataclass
class Locking:
    """``lost`` are paths of which the next answer to a PUT is lost, after it was done."""

    url: str = ""
    lost: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)  # paths of which the next PUT is answered by 409
    meetings: dict[str, threading.Barrier] = field(default_factory=dict)  # whom PUTs of a path wait for


@contextmanager
def locking_proxy(server: S3Server) -> Iterator[Locking]:
    """Run a proxy before the server in a thread until the end of the block."""
    state, lock = Locking(), threading.Lock()
    host = urlsplit(server.endpoint).netloc

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.answer(*forwarded(host, self))

        do_HEAD = do_GET

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            name = unquote(urlsplit(self.path).path).lstrip("/")
            if name in state.conflicts:
                state.conflicts.remove(name)
                self.refuse(409, "ConditionalRequestConflict")
                return
            if name in state.meetings:
                state.meetings[name].wait(timeout=60)
            with lock:
                if self.headers.get("If-None-Match") == "*" and (server.folder / name).exists():
                    self.refuse(412, "PreconditionFailed")
                    return
                answer = forwarded(host, self, body)
            if name in state.lost:
                state.lost.remove(name)
                self.close_connection = True
                return
            self.answer(*answer)

        def refuse(self, status: int, code: str) -> None:
            content = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
            self.answer(status, {"Content-Length": str(len(content))}, content)

    with serving(Handler) as state.url:
        yield state
