"""Files between a rank and its launcher where they share no folder: over their connection, in pieces."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flyte_ddp.errors import UserError
from flyte_ddp.runs.checkpoint import FOLDER, SLOTS

PIECE_BYTES = 1 << 22
APPENDED = "metrics.jsonl"
WHOLE = ("model.pt", "model.json", "predictions.npz", *(f"{FOLDER}/{name}" for name in SLOTS))


def pieces(path: Path, name: str, start: int = 0) -> Iterator[dict[str, Any]]:
    """A file, from some byte on, as messages; the last one says so."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(start)
        while True:
            offset = file.tell()
            data = file.read(min(PIECE_BYTES, size - offset))
            last = file.tell() >= size or not data
            yield {"kind": "file", "name": name, "offset": offset, "data": data, "last": last}
            if last:
                return


def send_file(pipe: Connection, path: Path, name: str) -> None:
    """Sends a file."""
    for piece in pieces(path, name):
        pipe.send(piece)


def take_piece(folder: Path, message: dict[str, Any], names: tuple[str, ...] = (APPENDED, *WHOLE)) -> None:
    """Puts a piece of a file into a folder: one that grows as it comes, any other when it is whole.

    Raises:
        UserError: a name that is none of those that are taken, or the file cannot be written.
    """
    name = message["name"]
    if name not in names:
        raise UserError(f"file {name!r} is none of those that a rank may send: {', '.join(names)}")
    path = folder / name
    written = path if name == APPENDED else path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written.open("r+b" if written.exists() else "wb") as file:
            file.seek(message["offset"])
            file.truncate()
            file.write(message["data"])
        if message["last"]:
            written.replace(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; make room, or correct its permissions") from None


class Mirror:
    """Sends what has changed in the folder where a rank writes since the last time, or since this was made."""

    def __init__(self, folder: Path, send: Callable[[dict[str, Any]], None]) -> None:
        self.folder, self.send = folder, send
        self.sent: dict[str, tuple[int, int, int]] = {}
        growing = folder / APPENDED
        self.appended = growing.stat().st_size if growing.exists() else 0

    def send_new(self) -> None:
        """Sends new lines of what grows, and files that were replaced, by messages."""
        growing = self.folder / APPENDED
        if growing.exists() and growing.stat().st_size != self.appended:
            start = min(self.appended, growing.stat().st_size)
            for piece in pieces(growing, APPENDED, start):
                self.send(piece)
                self.appended = piece["offset"] + len(piece["data"])
        for name in WHOLE:
            try:
                found = (self.folder / name).stat()
            except FileNotFoundError:
                continue
            mark = (found.st_ino, found.st_mtime_ns, found.st_size)
            if self.sent.get(name) != mark:
                for piece in pieces(self.folder / name, name):
                    self.send(piece)
                self.sent[name] = mark
