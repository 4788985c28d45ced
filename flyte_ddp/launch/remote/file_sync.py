"""Files between a rank's host and the launcher where they share no folder: over their connection, in pieces."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flyte_ddp import results
from flyte_ddp.errors import UserError
from flyte_ddp.files import file_version, hold_lock, list_files
from flyte_ddp.runs.checkpoint import FOLDER, SLOTS
from flyte_ddp.runs.run_folder import METRICS

PIECE_BYTES = 1 << 22
SEND_SECONDS = 0.5  # between two looks for changed files
EVENTS = f"{results.FOLDER}/{results.EVENTS}"
CHECKPOINTS = [f"{FOLDER}/{name}" for name in SLOTS]


def read_file_as_messages(path: Path, name: str, start: int = 0) -> Iterator[dict[str, Any]]:
    """Yield a file's bytes from ``start`` on as messages of up to 4 MiB, at least one; the last has ``last`` True."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(start)
        last = False
        while not last:
            offset = file.tell()
            data = file.read(min(PIECE_BYTES, size - offset))
            last = file.tell() >= size or not data
            yield {"kind": "file", "name": name, "offset": offset, "data": data, "last": last}


def write_piece(folder: Path, message: dict[str, Any]) -> None:
    """Write a message of :func:`read_file_as_messages` into a folder; until its last piece a file is ``.NAME.tmp``."""
    path = folder / message["name"]
    if message["name"] == EVENTS:
        with hold_lock(path.parent, path.name) as file:
            file.write(message["data"])
        return
    partial = path if message["name"] == METRICS else path.with_name(f".{path.name}.tmp")
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


class FileSender:
    """Sends the launcher the files of a host's output folder that change from now on, if ``enabled``.

    ``send`` must be thread-safe. Methods raise OSError if the launcher is gone or a file cannot be read.
    """

    def __init__(self, folder: Path, send: Callable[[dict[str, Any]], None], enabled: bool = True) -> None:
        self.folder, self.send, self.enabled = folder, send, enabled
        # Of the files that were sent whole, by name. A host that sees the launcher's folder need not look.
        self.versions = {name: file_version(folder / name) for name in self._list_names()} if enabled else {}
        self.metrics_sent, self.events_sent = size_or_zero(folder / METRICS), size_or_zero(folder / EVENTS)  # bytes
        self.sending_results = threading.Lock()

    def send_outputs(self, *, all_files: bool = False) -> None:
        """Send new lines of metrics.jsonl and changed checkpoints, or ``all_files`` but results; not thread-safe."""
        if not self.enabled:
            return
        if (size := size_or_zero(self.folder / METRICS)) != self.metrics_sent:
            for piece in read_file_as_messages(self.folder / METRICS, METRICS, min(self.metrics_sent, size)):
                self.send(piece)
                self.metrics_sent = piece["offset"] + len(piece["data"])
        for name in self._list_names() if all_files else CHECKPOINTS:
            if name != METRICS and not name.startswith((".", f"{results.FOLDER}/")):
                self._send_if_changed(name)

    def send_results(self) -> None:
        """Send new lines of results/events.jsonl and changed files of results/; thread-safe."""
        if not self.enabled:
            return
        events = self.folder / EVENTS
        with self.sending_results:
            if size_or_zero(events) > self.events_sent:
                # In one message, and while no rank is writing, so that no other host's lines come inside a line.
                with hold_lock(events.parent, events.name), events.open("rb") as file:
                    file.seek(self.events_sent)
                    lines = file.read()
                self.send({"kind": "file", "name": EVENTS, "data": lines, "last": True})
                self.events_sent += len(lines)
            for path in list_files(self.folder / results.FOLDER):
                if path.name[0] != "." and path != events:
                    self._send_if_changed(str(path.relative_to(self.folder)))

    def _list_names(self) -> list[str]:
        return [path.relative_to(self.folder).as_posix() for path in list_files(self.folder)]

    def _send_if_changed(self, name: str) -> None:
        with suppress(FileNotFoundError):
            version = file_version(self.folder / name)
            if self.versions.get(name) != version:
                for piece in read_file_as_messages(self.folder / name, name):
                    self.send(piece)
                self.versions[name] = version

    @contextmanager
    def send_results_during(self) -> Iterator[None]:
        """Send new results every 0.5 s in a thread during the block; call :meth:`send_results` for those after it."""
        if not self.enabled:
            yield
            return
        over = threading.Event()

        def send_until_over() -> None:
            with suppress(OSError):  # the launcher is gone, as others notice
                while not over.wait(SEND_SECONDS):
                    self.send_results()

        thread = threading.Thread(target=send_until_over, name="results", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def size_or_zero(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
