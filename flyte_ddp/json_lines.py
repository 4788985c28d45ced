"""Files of JSON objects, one a line, that grow."""

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from flyte_ddp.errors import UserError


class JsonLines:
    """Appends records to a file of JSON lines; a context manager. One writer a file.

    A record is a mapping of JSON values; ``time`` (Unix seconds) is added. Numbers that JSON cannot express, NaN and
    the infinities, become null.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            # Without a buffer every record is with the operating system, and so with readers, at once.
            self._file = path.open("a+b", buffering=0)
            # A writer that was killed may have left half a line, which must not swallow the next record.
            if self.size():
                self._file.seek(-1, os.SEEK_END)
                if self._file.read(1) != b"\n":
                    self._file.write(b"\n")
        except OSError as error:
            raise self._failure(error) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record."""
        line = json.dumps(finite({"time": time.time(), **record}), allow_nan=False).encode() + b"\n"
        try:
            while line:  # a disk that fills up takes a part of it first
                line = line[self._file.write(line) :]
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> UserError:
        return UserError(f"cannot write {self._path}: {error.strerror}; free some space or choose another run folder")

    def size(self) -> int:
        """Return the bytes in the file."""
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file, which is read whole, see :func:`parsed`; UserError if it cannot be read."""
    try:
        return [*parsed(path.read_bytes().splitlines())]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give the folder of a run") from error


def parsed(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the records in these lines; what is no JSON object, such as half a line of a killed writer, is left out."""
    for line in lines:
        with suppress(ValueError):
            if isinstance(record := json.loads(line), dict):  # half a line may be a number
                yield record


def finite(value: Any) -> Any:
    """Return the value with None for every float in it that is NaN or infinite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
