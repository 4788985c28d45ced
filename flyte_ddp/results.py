"""A user's own intermediate results: files and events that code in any rank hands in while it trains.

Models, and whatever else runs in a rank, call :func:`submit` and :func:`event`. The rank writes what they give into
``results/`` of the run folder; from a host that does not see that folder, files are sent to the launcher
(launch/remote/file_sync.py). See result_store.py for a copy elsewhere.
"""

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from flyte_ddp.errors import UserError
from flyte_ddp.files import replacing
from flyte_ddp.json_lines import JsonLines, finite

FOLDER = "results"  # in the run folder
EVENTS = "events.jsonl"  # in that
Deliver = Callable[..., None]  # (kind, **values)

_delivery: tuple[int, int, Deliver] | None = None  # process, rank, and how


def submit(name: str, content: bytes) -> None:
    """Hand in a file; one of the same name is replaced. Waits until it is written.

    Outside a rank's own process, as in prediction and in worker processes of streams, nothing happens.

    Args:
        name: a path below ``results/``, such as ``maps/epoch-3.png``.
        content: all of it.

    Raises:
        UserError: a name that leads elsewhere, or no bytes.
    """
    check_result_name(name)
    if not isinstance(content, (bytes, bytearray, memoryview)):
        raise UserError(f"result {name!r}: content is of type {type(content).__name__}, and must be bytes; encode it")
    if _delivery is not None and _delivery[0] == os.getpid():
        _delivery[2]("result", name=name, content=bytes(content))


def event(**values: Any) -> None:
    """Hand in a line of ``results/events.jsonl``: these values, the rank, and the time; as with :func:`submit`.

    NaN and the infinities, which JSON does not know, become null. A run that goes on from a checkpoint does some steps
    again, and what they hand in comes again.

    Raises:
        UserError: values that JSON does not know, or that are given.
    """
    if taken := [name for name in ("rank", "time") if name in values]:
        raise UserError(f"event: {' and '.join(taken)} is given to each event; choose another name")
    record = finite(values)
    try:
        json.dumps(record)
    except (TypeError, ValueError) as error:
        raise UserError(f"event {sorted(values)}: {error}; give numbers, text, or lists and dicts of them") from None
    if _delivery is not None and _delivery[0] == os.getpid():
        _delivery[2]("event", record={"rank": _delivery[1], "time": time.time(), **record})


def check_result_name(name: str) -> None:
    """Raise UserError for a name that is no path of a file below the folder of results."""
    path = PurePosixPath(name)
    wrong = not path.parts or str(path) != name or path.is_absolute() or "\\" in name or not name.isprintable()
    if wrong or any(part.startswith(".") for part in path.parts) or path.parts[0] == EVENTS:
        raise UserError(
            f"result {name!r}: must be a path below {FOLDER}/ such as maps/epoch-3.png, without hidden parts or '..', "
            f"and not {EVENTS}"
        )


@contextmanager
def delivered_by(deliver: Deliver, rank: int) -> Iterator[None]:
    """Pass what this process hands in to ``deliver`` until the end of the block."""
    global _delivery  # noqa: PLW0603 (a property of the process, as its rank is)
    _delivery = (os.getpid(), rank, deliver)
    try:
        yield
    finally:
        _delivery = None


@contextmanager
def locked_events(path: Path) -> Iterator[BinaryIO]:
    """Open the file of events to append to it, and lock it: ranks and launcher do that from processes of all hosts."""
    with path.open("ab", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


class ResultWriter:
    """Writes what was handed in into a run folder. A failure is printed to stderr once, and training continues."""

    def __init__(self, run_folder: Path) -> None:
        self.folder = run_folder / FOLDER
        self.failed = False

    def write(self, kind: str, **values: Any) -> None:
        """Write a file or an event; any thread may call it."""
        try:
            self.write_event(**values) if kind == "event" else self.write_file(**values)
        except (UserError, OSError) as error:
            if not self.failed:
                print(f"{error}; training continues without it", file=sys.stderr, flush=True)
            self.failed = True

    def write_event(self, record: dict[str, Any]) -> None:
        """Append a line to the events."""
        self.folder.mkdir(exist_ok=True)
        with locked_events(self.folder / EVENTS), JsonLines(self.folder / EVENTS) as events:
            events.write(record)

    def write_file(self, name: str, content: bytes) -> None:
        """Write a file, which appears when it is whole; raise UserError for a name that leads elsewhere."""
        check_result_name(name)
        path = self.folder / name
        if not path.resolve().is_relative_to(self.folder.resolve()):
            raise UserError(f"result {name!r}: leads out of {self.folder} by a link; remove the link")
        with replacing(path, durable=False) as file:
            file.write(content)
