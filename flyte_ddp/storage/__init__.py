"""Reading, listing and writing files, wherever they are: a path, file://, http(s)://, s3://, gs:// or az://.

Every wait is bounded, and every failure is an :class:`UnavailableError` that says whether it is worth another try.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from flyte_ddp.storage import local
from flyte_ddp.storage.addresses import as_in, join, local_path, parent, resolve, scheme
from flyte_ddp.storage.content import Content, Entry, Span, check_length
from flyte_ddp.storage.failures import AlteredError, ExistsError, ForbiddenError, MissingError, UnavailableError
from flyte_ddp.storage.origins import may_be_named, origin_of
from flyte_ddp.storage.retries import retried

__all__ = [
    "AlteredError",
    "Entry",
    "ExistsError",
    "ForbiddenError",
    "MissingError",
    "UnavailableError",
    "as_in",
    "check_length",
    "create",
    "join",
    "list_files",
    "local_path",
    "may_be_named",
    "open_file",
    "origin_of",
    "parent",
    "put",
    "read",
    "resolve",
    "retried",
    "scheme",
    "stat",
]


class Storage(Protocol):
    """What each kind of storage's own file provides."""

    def open_file(self, address: str, span: Span | None) -> AbstractContextManager[Content]:
        """Opens a file, or a span of it."""

    def stat(self, address: str) -> Entry:
        """Size and tag of a file."""

    def list_files(self, address: str) -> Iterator[Entry]:
        """All files below a folder or prefix."""

    def put(self, address: str, content: bytes) -> None:
        """Writes a file."""

    def create(self, address: str, content: bytes | Path) -> None:
        """Writes a file that is not there yet."""


def storage_of(address: str) -> Storage:
    """Where it is; what reads from there is imported when it is needed."""
    kind = scheme(address)
    if kind == "file":
        return local
    if kind in ("http", "https"):
        from flyte_ddp.storage import http

        return http
    from flyte_ddp.storage import objects

    return objects


def open_file(address: str, span: Span | None = None) -> AbstractContextManager[Content]:
    """Opens a file, or a span of it, for one pass over its bytes as they are stored, without decompression.

    Raises:
        UnavailableError: also while the bytes are read.
        UserError: an address of no known kind.
    """
    return storage_of(address).open_file(address, span)


def read(address: str, span: Span | None = None, *, tag: str = "") -> bytes:
    """The content of a small file, or of a span of a file, checked to be as long as was announced or asked for.

    Args:
        tag: the file's when it was listed; only where storage gives it with the content does it have to be the same.

    Raises:
        UnavailableError: it could not be had, or was cut short.
        AlteredError: it has another tag.
    """
    with open_file(address, span) as found:
        if tag and found.tag and found.tag != tag:
            raise AlteredError(f"has ETag {found.tag}, and {tag} when it was listed")
        content = b"".join(found.chunks)
    expected = span[1] - span[0] if span is not None else found.size
    check_length(len(content), expected, remote=local_path(address) is None)
    return content


def stat(address: str) -> Entry:
    """Size and tag of a file, under the name ""; an HTTP server may give no tag, and -1 stands for an unknown size.

    Raises:
        UnavailableError: it is not there, or cannot be asked for.
        UserError: an address of no known kind.
    """
    return storage_of(address).stat(address)


def list_files(address: str) -> Iterator[Entry]:
    """All files below a folder or prefix, in the order of their names; placeholders for folders are left out.

    Raises:
        UnavailableError: also while the list is read; on an HTTP server it is a file ``SHA256SUMS`` in the folder.
        UserError: an address of no known kind.
    """
    return storage_of(address).list_files(address)


def put(address: str, content: bytes) -> None:
    """Writes a file, which appears whole, in the place of one that was there before.

    Raises:
        UnavailableError, OSError: it cannot be written.
        UserError: an address of no known kind, or of a web server.
    """
    storage_of(address).put(address, content)


def create(address: str, content: bytes | Path) -> None:
    """Writes a file, which appears whole, and only if there is none of that name.

    Args:
        content: or the path of a file that has it.

    Raises:
        ExistsError: there is one, perhaps this one: the answer to an earlier try may have been lost.
        UnavailableError: it cannot be written.
        UserError: an address of no known kind, or of a web server.
    """
    storage_of(address).create(address, content)
