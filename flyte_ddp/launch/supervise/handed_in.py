"""How what users' code hands in gets from a rank into the run folder: in pieces, confirmed, and written by a thread.

So a large file holds up neither the launcher's supervision, nor what else the rank and its launcher tell each other.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flyte_ddp.results import ResultWriter

PIECE_BYTES = 1 << 20
MOST_UNCONFIRMED = 16  # messages of a rank that its launcher has not written yet
CLOSE_SECONDS = 10.0  # for those of a rank that has ended


def messages(kind: str, **values: Any) -> Iterator[dict[str, Any]]:
    """Yield the messages by which a rank hands in an event, or a file in pieces of PIECE_BYTES."""
    if kind == "event":
        yield {"kind": kind, **values}
        return
    content: bytes = values["content"]
    for start in range(0, max(len(content), 1), PIECE_BYTES):
        end = start + PIECE_BYTES
        yield {"kind": kind, "name": values["name"], "content": content[start:end], "last": end >= len(content)}


class Inbox:
    """Takes what one rank hands in, and has a thread write it into the run folder.

    Args:
        run_folder: of the launcher.
        confirm: tells the rank that one of its messages has been dealt with; called by the thread.
    """

    def __init__(self, run_folder: Path, confirm: Callable[[], None]) -> None:
        self.writer, self.confirm = ResultWriter(run_folder), confirm
        self.queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None  # from the first message on

    def put(self, message: dict[str, Any]) -> None:
        """Take a message, in the order in which the rank sent it; returns at once."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._write_all, name="handed in", daemon=True)
            self.thread.start()
        self.queue.put(message)

    def close(self) -> None:
        """Wait up to CLOSE_SECONDS until what was put is written; print it if that does not suffice.

        A file whose last piece has not come is left out.
        """
        if self.thread is not None:
            self.queue.put(None)
            self.thread.join(CLOSE_SECONDS)
            if self.thread.is_alive():
                print(f"not all that was handed in is in {self.writer.folder}", file=sys.stderr, flush=True)

    def _write_all(self) -> None:
        while (message := self.queue.get()) is not None:
            if message["kind"] == "event":
                self.writer.write("event", record=message["record"])
            else:
                pieces = self._pieces(message)
                try:
                    self.writer.write("result", name=message["name"], content=pieces)
                    for _ in pieces:  # the rest of a file that could not be written
                        pass
                except EOFError:
                    return
            self.confirm()

    def _pieces(self, message: dict[str, Any]) -> Iterator[bytes]:
        """Yield a file's pieces as they come, of which this message is the first; EOFError if the rank has ended."""
        while not message["last"]:
            yield message["content"]
            self.confirm()
            following = self.queue.get()
            if following is None:
                raise EOFError
            message = following
        yield message["content"]
