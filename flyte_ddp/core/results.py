"""Intermediate results (files and events) that user code submits from any rank during training.

A rank writes the results into ``results/`` of the run folder. If the rank's host does not see the folder, the launcher
receives the results and writes the files. ``storage/result_store.py`` copies ``results/`` to another place.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from flyte_ddp.core.checks.parsing import JsonObject
from flyte_ddp.core.errors import UserError, print_to_stderr
from flyte_ddp.core.files import FilePiece, hold_lock, replace_file
from flyte_ddp.core.text.json_lines import JsonLines, replace_non_finite

FOLDER = "results"  # in the run folder
EVENTS = "events.jsonl"  # in FOLDER
PIECE_BYTES = 1 << 22  # of a result sent to the launcher, so that other messages wait for one piece at most


@dataclass(frozen=True)
class ResultPiece(FilePiece):
    """A file that user code submits, or a piece of the file."""


@dataclass(frozen=True)
class Event:
    """A line of ``results/events.jsonl``."""

    record: JsonObject


Deliver = Callable[[ResultPiece | Event], None]
_delivery: tuple[int, int, Deliver] | None = None  # process id, rank, and the function that receives results


def submit(name: str, content: bytes) -> None:
    """Write a file into ``results/`` of the run folder, and return when it is written.

    Replaces a file of the same name. From a rank on another host, the file reaches the run folder later. Outside a
    rank's main process only checks the arguments. If writing fails, prints the first failure to stderr, and training
    continues.

    Args:
        name: The path below ``results/``, such as ``maps/epoch-3.png``.
        content: The bytes of the file.

    Raises:
        UserError: The name is not a path below ``results/``, or the content is not bytes.
    """
    check_result_name(name)
    if not isinstance(content, (bytes, bytearray, memoryview)):
        raise UserError(f"result {name!r}: content is of type {type(content).__name__}; must be bytes; encode it")
    if _delivery is not None and _delivery[0] == os.getpid():
        _delivery[2](ResultPiece(name, bytes(content)))


def event(**values: Any) -> None:
    """Append a line to ``results/events.jsonl`` of the run folder.

    The line has the values, the rank, and the time (Unix seconds). NaN and the infinities become null. Waits without a
    limit for the file's lock. If the rank's host does not see the run folder, the launcher gets the line and writes the
    line. Outside a rank's main process only checks the values. If writing fails, prints the first failure to stderr,
    and training continues. A resumed run repeats the steps after the checkpoint, and also their events.

    Raises:
        UserError: A value cannot be written as JSON, or is named ``rank`` or ``time``.
    """
    if taken := [name for name in ("rank", "time") if name in values]:
        raise UserError(f"event: {' and '.join(taken)} is reserved in each event; choose another name")
    record = replace_non_finite(values)
    try:
        json.dumps(record)
    except (TypeError, ValueError) as error:
        raise UserError(f"event {sorted(values)}: {error}; give numbers, text, or lists and dicts of them") from None
    if _delivery is not None and _delivery[0] == os.getpid():
        _delivery[2](Event({"rank": _delivery[1], "time": time.time(), **record}))


def check_result_name(name: str) -> None:
    """Raise UserError unless ``name`` is a path below ``results/``, without hidden parts, and not ``events.jsonl``.

    ``name`` is relative to ``results/``. Also rejects absolute paths, paths that are not normalised, backslashes and
    unprintable characters.
    """
    path = PurePosixPath(name)
    wrong = not path.parts or str(path) != name or path.is_absolute() or "\\" in name or not name.isprintable()
    if wrong or any(part.startswith(".") for part in path.parts) or path.parts[0] == EVENTS:
        raise UserError(
            f"result {name!r}: must be a path below {FOLDER}/ such as maps/epoch-3.png, without hidden parts or '..', "
            f"and not {EVENTS}"
        )


@contextmanager
def redirect_results(deliver: Deliver, rank: int) -> Iterator[None]:
    """Let :func:`submit` and :func:`event` of this process pass results to ``deliver`` during the block.

    Each event gets the entry ``rank``. In forked child processes, the two functions do nothing. Do not nest blocks,
    because the end of an inner block also ends the outer block's delivery.
    """
    global _delivery  # noqa: PLW0603 (a property of the process, as its rank is)
    _delivery = (os.getpid(), rank, deliver)
    try:
        yield
    finally:
        _delivery = None


def send_results_in_pieces(send: Deliver) -> Deliver:
    """Return a function that passes events to ``send`` unchanged, and files in pieces of up to 4 MiB.

    The returned function may be called in any thread.
    """
    sending = threading.Lock()  # pieces of two results must not mix

    def send_in_pieces(submitted: ResultPiece | Event) -> None:
        """Call ``send`` once with an event, or for each piece of a result."""
        if isinstance(submitted, Event):
            send(submitted)
            return
        content = submitted.content
        with sending:
            for offset in range(0, len(content) or 1, PIECE_BYTES):
                end = offset + PIECE_BYTES
                send(ResultPiece(submitted.name, content[offset:end], offset, is_last=end >= len(content)))

    return send_in_pieces


class ResultWriter:
    """Writes results and events into a run folder.

    The first failure is printed to stderr. Later failures are not.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / FOLDER
        self.failed = False

    def write(self, submitted: ResultPiece | Event) -> None:
        """Write a file or its next piece, or append an event, in any thread.

        Waits without a limit for the lock of the events. If writing fails, prints the first failure, and raises
        nothing.
        """
        try:
            if isinstance(submitted, ResultPiece):
                self.write_file(submitted)
            else:
                # The lock is needed because ranks and launcher append to this file from several hosts.
                with hold_lock(self.folder, EVENTS), JsonLines(self.folder / EVENTS) as events:
                    events.write(submitted.record)
        except (UserError, OSError) as error:
            if not self.failed:
                print_to_stderr(f"{error}; the run continues without it")
            self.failed = True

    def write_file(self, piece: ResultPiece) -> None:
        """Write a whole file, or the next piece of a file, into ``results/``.

        Until the last piece, the file has a temporary name. If a piece cannot be written, the whole file is dropped.

        Raises:
            UserError: The name is not allowed, leads out of ``results/``, or a whole file cannot be written.
            OSError: A piece cannot be written.
        """
        check_result_name(piece.name)
        path = self.folder / piece.name
        if not path.resolve().is_relative_to(self.folder.resolve()):
            raise UserError(f"result {piece.name!r}: leads out of {self.folder} through a link; remove the link")
        if piece.offset == 0 and piece.is_last:
            with replace_file(path, durable=False) as file:
                file.write(piece.content)
            return
        partial = path.with_name(f".{path.name}.{id(self)}.tmp")  # the next run deletes *.tmp
        try:
            piece.write(path, partial)
        except OSError:
            partial.unlink(missing_ok=True)  # a file without this piece must not appear
            raise
