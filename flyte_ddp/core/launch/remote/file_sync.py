"""Transfer of files in pieces between a rank's host and the launcher, over their connection.

The transfer replaces a shared folder.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from flyte_ddp.core.files import FilePiece, explain_write_errors, get_file_version, list_files
from flyte_ddp.core.launch.supervise.messages import Message
from flyte_ddp.core.runs.checkpoint import FOLDER, SLOTS
from flyte_ddp.core.runs.run_folder import METRICS

PIECE_BYTES = 1 << 22
SEND_SECONDS = 0.5  # between two checks for changed files
Send = Callable[[Message], None]


def read_pieces(path: Path, name: str, start: int = 0) -> Iterator[FilePiece]:
    """Yield a file's bytes from ``start`` on in pieces of up to 4 MiB, at least one.

    ``name`` is the path that the receiver gives the file, below its folder. Bytes that are appended meanwhile are not
    read. An OSError is raised by the iterator.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(start)
        last = False
        while not last:
            offset = file.tell()
            content = file.read(min(PIECE_BYTES, size - offset))
            last = file.tell() >= size or not content
            yield FilePiece(name, content, offset, last)


def write_piece(folder: Path, piece: FilePiece) -> None:
    """Write a piece of a file into ``folder``. ``piece`` comes from :func:`read_pieces`.

    Until the last piece, the file is named ``.NAME.tmp``. metrics.jsonl is written directly.

    Raises:
        UserError: The file cannot be written.
    """
    path = folder / piece.name
    partial = path if piece.name == METRICS else path.with_name(f".{path.name}.tmp")
    with explain_write_errors(path):
        piece.write(path, partial)


class FileSender:
    """Sends the launcher the files that rank 0 writes into ``folder`` of its host from now on.

    Not thread-safe. Methods raise OSError if the launcher is gone or a file cannot be read.
    """

    def __init__(self, folder: Path, send: Send) -> None:
        self.folder, self.send = folder, send
        self.versions = {path: get_file_version(path) for path in list_files(folder)}  # of files that the launcher has
        self.metrics_sent = size_or_zero(folder / METRICS)  # bytes

    def send_changes(self, *, all_files: bool = False) -> None:
        """Send new lines of metrics.jsonl, and changed checkpoints.

        With ``all_files`` sends every changed file, except temporary files. Skips files that vanish meanwhile.
        """
        metrics = self.folder / METRICS
        if (size := size_or_zero(metrics)) != self.metrics_sent:
            for piece in read_pieces(metrics, METRICS, min(self.metrics_sent, size)):
                self.send(piece)
                self.metrics_sent = piece.offset + len(piece.content)
        for path in list_files(self.folder) if all_files else [self.folder / FOLDER / name for name in SLOTS]:
            name = path.relative_to(self.folder).as_posix()
            with suppress(FileNotFoundError):
                version = get_file_version(path)
                if path != metrics and not path.match(".*.tmp") and self.versions.get(path) != version:
                    for piece in read_pieces(path, name):
                        self.send(piece)
                    self.versions[path] = version


def size_or_zero(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
