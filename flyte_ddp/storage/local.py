"""Files of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from flyte_ddp.storage.addresses import local_path
from flyte_ddp.storage.content import CHUNK_BYTES, Content, Entry, Span
from flyte_ddp.storage.failures import MissingError, UnavailableError


@contextmanager
def open_file(address: str, span: Span | None) -> Iterator[Content]:
    """:func:`flyte_ddp.storage.open_file` for a path."""
    path = local_path(address)
    assert path is not None
    try:
        file = path.open("rb")
    except (FileNotFoundError, NotADirectoryError):
        raise MissingError("no such file") from None
    except OSError as error:
        raise UnavailableError(error.strerror or str(error)) from None
    with file:
        size = os.fstat(file.fileno()).st_size
        if span is None:
            yield size, iter(lambda: file.read(CHUNK_BYTES), b"")
        else:
            file.seek(span[0])
            yield max(0, min(span[1], size) - span[0]), pieces(file, span[1] - span[0])


def pieces(file: BinaryIO, length: int) -> Iterator[bytes]:
    """So many bytes from where the file is, or as many as there are."""
    while length > 0 and (piece := file.read(min(length, CHUNK_BYTES))):
        length -= len(piece)
        yield piece


def stat(address: str) -> Entry:
    """:func:`flyte_ddp.storage.stat` for a path."""
    path = local_path(address)
    assert path is not None
    if not path.is_file():
        raise MissingError("no such file")
    status = path.stat()
    return Entry("", status.st_size, f"{status.st_mtime_ns}")


def list_files(address: str) -> Iterator[Entry]:
    """:func:`flyte_ddp.storage.list_files` for a directory; hidden files and folders are left out."""
    root = local_path(address)
    assert root is not None
    if not root.is_dir():
        raise MissingError("no such directory")
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        relative = os.path.relpath(folder, root)
        prefix = "" if relative == "." else f"{relative}/"
        for name in names:
            if not name.startswith("."):
                status = os.stat(os.path.join(folder, name))  # noqa: PTH116, PTH118 (of millions of files)
                found.append(Entry(f"{prefix}{name}", status.st_size, f"{status.st_mtime_ns}"))
    yield from sorted(found, key=lambda entry: entry.name)
