"""Read, list, write and delete files by address: a path, file://, http(s)://, s3://, gs:// or az://.

Every wait is bounded. Failures are an :class:`UnavailableError`, which says whether another try may help; an address of
no known kind is a UserError.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from flyte_ddp.storage import local
from flyte_ddp.storage.addresses import encode_name, join, local_path, parent, resolve, scheme
from flyte_ddp.storage.content import Content, Entry, Span, check_length
from flyte_ddp.storage.failures import AlteredError, ExistsError, ForbiddenError, MissingError, UnavailableError
from flyte_ddp.storage.origins import may_be_named, origin_of
from flyte_ddp.storage.retries import retry

__all__ = ["AlteredError", "ExistsError", "ForbiddenError", "MissingError", "UnavailableError"]
__all__ += ["encode_name", "join", "local_path", "may_be_named", "origin_of", "parent", "resolve", "scheme"]
__all__ += ["Entry", "check_length", "create_file", "delete_files", "list_files", "open_file", "read_file", "retry"]
__all__ += ["stat_file", "write_file"]


class Storage(Protocol):
    """The functions that each module of a kind of storage has: ``local``, ``http`` and ``objects``."""

    def open_file(self, address: str, span: Span | None) -> AbstractContextManager[Content]:
        """Open a file, or a span of bytes of it, for one pass over its bytes."""

    def stat_file(self, address: str) -> Entry:
        """Return the size and tag of a file."""

    def list_files(self, address: str) -> Iterator[Entry]:
        """Yield the files below a folder or prefix, ordered by name."""

    def write_file(self, address: str, content: bytes | Path) -> None:
        """Write a whole file, and replace a file of that name."""

    def create_file(self, address: str, content: bytes | Path) -> None:
        """Write a whole file; raise ExistsError if there is a file of that name."""

    def delete_files(self, addresses: Sequence[str]) -> None:
        """Delete files."""


def select_storage(address: str) -> Storage:
    """Import and return the module that reads and writes addresses of this kind."""
    kind = scheme(address)
    if kind == "file":
        return local
    if kind in ("http", "https"):
        from flyte_ddp.storage import http

        return http
    from flyte_ddp.storage import objects

    return objects


def open_file(address: str, span: Span | None = None) -> AbstractContextManager[Content]:
    """Open a file, or a span of bytes of it, for one pass over its bytes as stored, without decompression.

    Args:
        address: address of the file.
        span: number of the first byte and number of the byte after the last; None for the whole file.

    Raises:
        UnavailableError: the file cannot be read; raised here or in the block.
    """
    return select_storage(address).open_file(address, span)


def read_file(address: str, span: Span | None = None, *, tag: str = "") -> bytes:
    """Read a file, or a span of bytes of it, into memory and return the bytes. Tries once.

    Args:
        address: address of the file.
        span: number of the first byte and number of the byte after the last; None for the whole file.
        tag: tag of the file in an earlier listing; it is compared only if the storage sends a tag with the content.

    Raises:
        UnavailableError: the file cannot be read, or has fewer or more bytes than announced.
        AlteredError: the file has another tag.
    """
    with open_file(address, span) as found:
        if tag and found.tag and found.tag != tag:
            raise AlteredError(f"has ETag {found.tag}, and {tag} when it was listed")
        content = b"".join(found.chunks)
    expected = span[1] - span[0] if span is not None else found.size
    check_length(len(content), expected, remote=local_path(address) is None)
    return content


def stat_file(address: str) -> Entry:
    """Return the size and tag of a file, without reading its content; the returned entry's name is "".

    An HTTP server may give no size (then -1) and no tag (then the time of the last change, or "").

    Raises:
        MissingError: there is no such file.
        UnavailableError: the storage cannot be asked.
    """
    return select_storage(address).stat_file(address)


def list_files(address: str) -> Iterator[Entry]:
    """Yield all files below a folder or prefix, ordered by name; objects that stand for folders are left out.

    A folder of an HTTP server is listed by its file ``SHA256SUMS``. A prefix of a bucket without objects yields
    nothing.

    Raises:
        MissingError: there is no such folder on this machine.
        UnavailableError: the files cannot be listed.
    """
    return select_storage(address).list_files(address)


def write_file(address: str, content: bytes | Path) -> None:
    """Write a file, and replace a file of that name; readers see the old file or the whole new one. Tries once.

    Args:
        address: address of the file.
        content: the bytes; or the path of a file, whose content is copied in pieces.

    Raises:
        UnavailableError: the file cannot be written.
        UserError: the address is of a web server.
    """
    select_storage(address).write_file(address, content)


def create_file(address: str, content: bytes | Path) -> None:
    """Write a file if there is none of that name; readers see no file or the whole file. Tries once.

    Args:
        address: address of the file.
        content: the bytes; or the path of a file, whose content is copied in pieces.

    Raises:
        ExistsError: there is a file of that name. An earlier try, whose response was lost, may have written it.
        UnavailableError: the file cannot be written.
        UserError: the address is of a web server.
    """
    select_storage(address).create_file(address, content)


def delete_files(addresses: Sequence[str]) -> None:
    """Delete files that are all in one bucket or all on this machine, many with each request. Tries once.

    Raises:
        MissingError: a file is missing; S3 reports no missing files.
        UnavailableError: a file cannot be deleted; others may be deleted by then.
        UserError: the addresses are of a web server.
    """
    if addresses:
        select_storage(addresses[0]).delete_files(addresses)
