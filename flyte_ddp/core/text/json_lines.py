"""Append records to files with a JSON object on each line, and read the records."""

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from flyte_ddp.core.checks.parsing import JsonObject
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.files import explain_write_errors

OTHER = "choose another run folder"


class JsonLines(AbstractContextManager["JsonLines"]):
    """Appends records to a file of JSON lines, which is created if missing. A file must have only one writer at a time.

    If a killed writer has left an incomplete last line, the line is ended first.

    Raises:
        UserError: The file cannot be opened or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with explain_write_errors(path, OTHER):
            self._file = path.open("a+b", buffering=0)  # unbuffered, so that other processes see each record at once
            # A writer that was killed may have left half a line: the next record must not become part of that line.
            if self.size():
                self._file.seek(-1, os.SEEK_END)
                if self._file.read(1) != b"\n":
                    self._file.write(b"\n")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a mapping of JSON values as one line, at once visible to other processes.

        If the record has no ``time``, the present time (Unix seconds) is added. NaN and infinite numbers become null.

        Raises:
            UserError: The file cannot be written. A part of the line may have been written.
        """
        line = format_record({"time": time.time(), **record}) + b"\n"
        with explain_write_errors(self._path, OTHER):
            while line:  # a nearly full disk accepts a part of the line before it raises
                line = line[self._file.write(line) :]

    def size(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def read_records(path: Path) -> list[JsonObject]:
    """Read the JSON objects in a file of JSON lines. Other lines are skipped.

    Raises:
        UserError: The file cannot be read.
    """
    try:
        return [*parse_records(path.read_bytes().splitlines())]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give the folder of a run") from error


def format_record(record: Mapping[str, Any]) -> bytes:
    """Return a mapping of JSON values as a line without line end. NaN and infinite numbers become null."""
    return json.dumps(replace_non_finite(record), allow_nan=False).encode()


def parse_records(lines: Iterable[bytes]) -> Iterator[JsonObject]:
    """Yield the JSON objects in the lines. Skips other lines, for example an incomplete line of a killed writer."""
    for line in lines:
        with suppress(ValueError, RecursionError):
            if isinstance(record := json.loads(line), dict):  # half a line may be a number
                yield record


def replace_non_finite(value: Any) -> Any:
    """Return a copy of a value with None for NaN and infinite floats, also in mappings, lists and tuples."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_non_finite(item) for item in value]
    return value
