"""Files between a rank and its launcher where they share no folder: over their connection, in pieces."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flyte_ddp import results
from flyte_ddp.errors import UserError
from flyte_ddp.runs.checkpoint import FOLDER, SLOTS

PIECE_BYTES = 1 << 22
MIRROR_SECONDS = 0.5
APPENDED = "metrics.jsonl"
EVENTS = f"{results.FOLDER}/{results.EVENTS}"
WHOLE = ("model.pt", "model.json", "predictions.npz", *(f"{FOLDER}/{name}" for name in SLOTS))


def pieces(path: Path, name: str, start: int = 0) -> Iterator[dict[str, Any]]:
    """Yield a file from byte ``start`` on, as messages of up to PIECE_BYTES; the last one says so."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size  # a file that grows meanwhile is read up to here
        file.seek(start)
        last = False
        while not last:
            offset = file.tell()
            data = file.read(min(PIECE_BYTES, size - offset))
            last = file.tell() >= size or not data
            yield {"kind": "file", "name": name, "offset": offset, "data": data, "last": last}


def take_piece(folder: Path, message: dict[str, Any]) -> None:
    """Write a piece of a file into a folder. APPENDED grows as pieces come; any other file appears when it is whole.

    Raises:
        UserError: the file cannot be written.
    """
    path = folder / message["name"]
    if message["name"] == EVENTS:
        append_events(path, message["data"])
        return
    partial = path if message["name"] == APPENDED else path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("r+b" if partial.exists() else "wb") as file:
            file.seek(message["offset"])
            file.truncate()
            file.write(message["data"])
        if message["last"]:
            partial.replace(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; make room, or correct its permissions") from None


def append_events(path: Path, lines: bytes) -> None:
    """Append lines to a file of events, to which other ranks may be appending."""
    path.parent.mkdir(exist_ok=True)
    with results.locked_events(path) as file:
        file.write(lines)


class Mirror:
    """Sends the files that have changed in a host's run folder since the last time, or since this was made.

    Args:
        folder: where the ranks of the host write.
        send: takes a message.
    """

    def __init__(self, folder: Path, send: Callable[[dict[str, Any]], None]) -> None:
        self.folder, self.send = folder, send
        self.sent: dict[str, tuple[int, int, int]] = {}
        self.appended, self.events = size_of(folder / APPENDED), size_of(folder / EVENTS)  # bytes that were sent

    def send_new(self) -> None:
        """Send new lines of APPENDED and EVENTS, and those of WHOLE and of the user's results that were replaced."""
        if (size := size_of(self.folder / APPENDED)) != self.appended:
            for piece in pieces(self.folder / APPENDED, APPENDED, min(self.appended, size)):
                self.send(piece)
                self.appended = piece["offset"] + len(piece["data"])
        if size_of(self.folder / EVENTS) > self.events:
            # In one message, and while no rank is writing: other hosts' lines must not come between parts of a line.
            with results.locked_events(self.folder / EVENTS), (self.folder / EVENTS).open("rb") as file:
                file.seek(self.events)
                lines = file.read()
            self.send({"kind": "file", "name": EVENTS, "data": lines, "last": True})
            self.events += len(lines)
        files = [path for path in (self.folder / results.FOLDER).rglob("*") if path.is_file() and path.name[0] != "."]
        for name in (*WHOLE, *(str(path.relative_to(self.folder)) for path in files)):
            try:
                found = (self.folder / name).stat()
            except FileNotFoundError:
                continue
            version = (found.st_ino, found.st_mtime_ns, found.st_size)
            if name != EVENTS and self.sent.get(name) != version:
                for piece in pieces(self.folder / name, name):
                    self.send(piece)
                self.sent[name] = version

    @contextmanager
    def following(self) -> Iterator[None]:
        """Have a thread send what is new during the block, every MIRROR_SECONDS, and send the rest at its end."""
        over = threading.Event()

        def follow() -> None:
            while not over.wait(MIRROR_SECONDS):
                self.send_new()

        thread = threading.Thread(target=follow, name="mirror", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.send_new()


def size_of(path: Path) -> int:
    """Return a file's size in bytes, 0 if it does not exist."""
    return path.stat().st_size if path.exists() else 0
