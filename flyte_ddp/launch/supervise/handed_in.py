"""How what users' code hands in gets from a rank into the run folder: in pieces, confirmed, and written by a thread.

So a large file holds up neither the launcher's supervision, nor what else the rank and its launcher tell each other.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from flyte_ddp.results import ResultWriter

PIECE_BYTES = 1 << 20
MOST_UNCONFIRMED = 16  # messages of a rank that its launcher has not written yet
CLOSE_SECONDS = 10.0  # for those of all ranks of a run that has failed, or was told to stop


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
        self.given_up = False  # what is not written yet is left out

    def put(self, message: dict[str, Any]) -> None:
        """Take a message, in the order in which the rank sent it; returns at once."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._write_all, name="handed in", daemon=True)
            self.thread.start()
        self.queue.put(message)

    def _write_all(self) -> None:
        while (message := self.queue.get()) is not None and not self.given_up:
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
        """Yield a file's pieces as they come, of which this message is the first.

        Raises:
            EOFError: the rank has ended before the last piece, or the file is given up.
        """
        following: dict[str, Any] | None = message
        while following is not None:
            yield following["content"]
            if self.given_up:
                break
            if following["last"]:
                return
            self.confirm()
            following = self.queue.get()
        raise EOFError


def close(inboxes: Iterable[Inbox]) -> None:
    """Wait until what these were given is written, for CLOSE_SECONDS in all; print it if that does not suffice.

    Files whose last piece has not come, or which take longer, are left out, and nothing of them stays.
    """
    started = [(inbox, inbox.thread) for inbox in inboxes if inbox.thread is not None]
    for inbox, _ in started:
        inbox.queue.put(None)
    deadline = time.monotonic() + CLOSE_SECONDS
    for inbox, thread in started:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            inbox.given_up = True
            print(f"not all that was handed in is in {inbox.writer.folder}", file=sys.stderr, flush=True)
