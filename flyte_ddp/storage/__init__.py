"""Read, list, write and delete files by address: a path, file://, http(s)://, s3://, gs:// or az://.

Every wait is bounded. Failures are an :class:`UnavailableError`, which says whether another try may help; an address of
no known kind is a UserError.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from flyte_ddp.storage import local
from flyte_ddp.storage.addresses import as_in, join, local_path, parent, resolve, scheme
from flyte_ddp.storage.content import Content, Entry, Span, check_length
from flyte_ddp.storage.failures import AlteredError, ExistsError, ForbiddenError, MissingError, UnavailableError
from flyte_ddp.storage.origins import may_be_named, origin_of
from flyte_ddp.storage.retries import retried

__all__ = ["AlteredError", "ExistsError", "ForbiddenError", "MissingError", "UnavailableError"]
__all__ += ["as_in", "join", "local_path", "may_be_named", "origin_of", "parent", "resolve", "scheme"]
__all__ += ["Entry", "check_length", "create", "delete", "list_files", "open_file", "put", "read", "retried", "stat"]


class Storage(Protocol):
    """The functions that the module of each kind of storage has; those below say what each does."""

    def open_file(self, address: str, span: Span | None) -> AbstractContextManager[Content]:
        """Open a file or a span of it."""

    def stat(self, address: str) -> Entry:
        """Return a file's size and tag."""

    def list_files(self, address: str) -> Iterator[Entry]:
        """Yield the files below a folder or prefix."""

    def put(self, address: str, content: bytes | Path) -> None:
        """Write a file."""

    def create(self, address: str, content: bytes | Path) -> None:
        """Write a file that is not there yet."""

    def delete(self, addresses: Sequence[str]) -> None:
        """Delete files."""


def storage_of(address: str) -> Storage:
    """Return the module for an address, imported when it is needed first."""
    kind = scheme(address)
    if kind == "file":
        return local
    if kind in ("http", "https"):
        from flyte_ddp.storage import http

        return http
    from flyte_ddp.storage import objects

    return objects


def open_file(address: str, span: Span | None = None) -> AbstractContextManager[Content]:
    """Open a file, or a span of it, for one pass over its bytes as they are stored, without decompression.

    Raises:
        UnavailableError: also while the bytes are read.
    """
    return storage_of(address).open_file(address, span)


def read(address: str, span: Span | None = None, *, tag: str = "") -> bytes:
    """Return the content of a file, or of a span of it, whole in memory, checked to be as long as announced.

    Args:
        address: of the file.
        span: the first byte and the one after the last; None for the whole file.
        tag: of the file when it was listed; compared only where storage gives the tag with the content.

    Raises:
        UnavailableError: the file could not be had, or was cut short.
        AlteredError: the file has another tag.
    """
    with open_file(address, span) as found:
        if tag and found.tag and found.tag != tag:
            raise AlteredError(f"has ETag {found.tag}, and {tag} when it was listed")
        content = b"".join(found.chunks)
    expected = span[1] - span[0] if span is not None else found.size
    check_length(len(content), expected, remote=local_path(address) is None)
    return content


def stat(address: str) -> Entry:
    """Return a file's size and tag, under the name ""; an HTTP server may give no tag, and -1 is an unknown size."""
    return storage_of(address).stat(address)


def list_files(address: str) -> Iterator[Entry]:
    """Yield all files below a folder or prefix, ordered by name, without the objects that stand for folders.

    On an HTTP server the list is a file ``SHA256SUMS`` in the folder. A missing prefix has no files; a missing folder
    of this machine is a MissingError.
    """
    return storage_of(address).list_files(address)


def put(address: str, content: bytes | Path) -> None:
    """Write a file, which appears whole and replaces one of that name.

    Args:
        address: of the file; a web server's is a UserError.
        content: the bytes, or the path of a file that has them, which is not read into memory.
    """
    storage_of(address).put(address, content)


def create(address: str, content: bytes | Path) -> None:
    """Write a file, which appears whole, as :func:`put` does, and only if there is none of that name.

    Raises:
        ExistsError: there is a file, perhaps this one: the answer to an earlier try may have been lost.
    """
    storage_of(address).create(address, content)


def delete(addresses: Sequence[str]) -> None:
    """Delete files, of one bucket or of this machine, many by each request; a missing one may be a MissingError."""
    if addresses:
        storage_of(addresses[0]).delete(addresses)
