"""A user's own intermediate results: files and events that code in any rank hands in while it trains.

Models, data sets and whatever else runs in a rank call :func:`submit` and :func:`event`. The launcher puts them into
``results/`` of the run folder, wherever the rank is; see result_store.py for a copy elsewhere.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from flyte_ddp.errors import UserError
from flyte_ddp.files import replacing

FOLDER = "results"  # in the run folder
EVENTS = "events.jsonl"  # in that
KINDS = ("result", "event")
Deliver = Callable[..., None]  # (kind, **values)

_delivery: tuple[int, int, Deliver] | None = None  # process, rank, and how


def submit(name: str, content: bytes) -> None:
    """Hands in a file; one of the same name is replaced. Outside a rank, as in prediction, nothing happens.

    Args:
        name: a path below ``results/``, such as ``maps/epoch-3.png``.
        content: all of it.

    Raises:
        UserError: a name that leads elsewhere.
    """
    check(name)
    if _delivery is not None and _delivery[0] == os.getpid():
        _delivery[2]("result", name=name, content=bytes(content))


def event(**values: Any) -> None:
    """Hands in a line of ``results/events.jsonl``: these values, the rank, and the time. Outside a rank as above.

    A run that goes on from a checkpoint does some steps again, and what they hand in comes again.

    Raises:
        UserError: values that JSON does not know.
    """
    if _delivery is not None and _delivery[0] == os.getpid():
        record = {"rank": _delivery[1], "time": time.time(), **values}
        try:
            line = json.dumps(record)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"event {sorted(values)}: {error}; give numbers, text, or lists and dicts of them"
            ) from None
        _delivery[2]("event", line=line)


def check(name: str) -> None:
    """Refuses names that are none of a file below the folder of results."""
    parts = PurePosixPath(name).parts
    wrong = not parts or name.endswith("/") or name.startswith("/") or "\\" in name or not name.isprintable()
    if wrong or any(part.startswith(".") for part in parts) or name == EVENTS:
        raise UserError(
            f"result {name!r}: must be a path below {FOLDER}/ such as maps/epoch-3.png, without hidden parts or '..', "
            f"and not {EVENTS}"
        )


@contextmanager
def delivered_by(deliver: Deliver, rank: int) -> Iterator[None]:
    """What is handed in by this process goes this way."""
    global _delivery  # noqa: PLW0603 (a property of the process, as its rank is)
    _delivery = (os.getpid(), rank, deliver)
    try:
        yield
    finally:
        _delivery = None


def keep(run_folder: Path, kind: str, **values: Any) -> None:
    """Puts what was handed in into the run folder.

    Raises:
        UserError: a name that leads elsewhere, or the file cannot be written.
    """
    folder = run_folder / FOLDER
    if kind == "event":
        folder.mkdir(exist_ok=True)
        with (folder / EVENTS).open("a") as file:
            file.write(values["line"] + "\n")
        return
    check(values["name"])
    path = folder / values["name"]
    if not path.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"result {values['name']!r}: leads out of {folder} by a link; remove the link")
    with replacing(path) as file:
        file.write(values["content"])
