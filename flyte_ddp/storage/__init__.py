"""Read, list, write and delete files by address: a path, file://, http(s)://, s3://, gs:// or az://.

Every wait is bounded. A failure is an :class:`UnavailableError`, which says whether a retry may succeed; an address of
no known kind is a UserError. The first use of a bucket may ask servers for credentials and region; from then on forks
of this process cannot use object storage.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

from flyte_ddp.storage import local
from flyte_ddp.storage.addresses import encode_name, join, local_path, parent, resolve, scheme
from flyte_ddp.storage.content import Content, Entry, Span, check_length
from flyte_ddp.storage.failures import AlteredError, ExistsError, ForbiddenError, MissingError, UnavailableError
from flyte_ddp.storage.origins import may_be_named, origin_of
from flyte_ddp.storage.retries import retry

__all__ = ["AlteredError", "ExistsError", "ForbiddenError", "MissingError", "UnavailableError"]
__all__ += ["encode_name", "join", "local_path", "may_be_named", "origin_of", "parent", "resolve", "scheme"]
__all__ += ["Entry", "check_length", "create_file", "delete_files", "download_file", "list_files", "open_file"]
__all__ += ["read_file", "retry", "stat_file", "write_file"]


class Storage(Protocol):
    """The functions of each module that handles one kind of storage: ``local``, ``http`` and ``objects``."""

    def open_file(self, address: str, span: Span | None) -> AbstractContextManager[Content]: ...
    def stat_file(self, address: str) -> Entry: ...
    def list_files(self, address: str) -> Iterator[Entry]: ...
    def write_file(self, address: str, content: bytes | Path, *, create: bool) -> None: ...
    def delete_files(self, addresses: Sequence[str]) -> None: ...


def select_storage(address: str) -> Storage:
    """Return the module that reads and writes files at such an address; imports it, and with it requests or obstore.

    Raises UserError for an address of no known kind, without server or bucket, or with a user name or a password.
    """
    kind = scheme(address)
    if kind == "file":
        return local
    if kind in ("http", "https"):
        from flyte_ddp.storage import http

        return http
    from flyte_ddp.storage import objects

    return objects


def open_file(address: str, span: Span | None = None) -> AbstractContextManager[Content]:
    """Return a context manager that opens a file for one pass over its bytes as stored, without decompression.

    ``span`` is the number of the first byte and of the byte after the last; None opens the whole file. Waits up to 10 s
    for a connection and 30 s for each piece of the content; does not retry. Raises UserError when called for an address
    of no known kind; UnavailableError, on entering the block or while chunks are read, if the file cannot be read.
    """
    return select_storage(address).open_file(address, span)


def read_file(address: str, span: Span | None = None, *, tag: str = "") -> bytes:
    """Read a file, or a span of bytes of it (first, after the last), into memory and return the bytes. Does not retry.

    Waits up to 10 s to connect, 30 s for each piece. Raises UserError for an address of no known kind; UnavailableError
    if the file cannot be read, or has fewer or more bytes than announced; AlteredError if the storage sends a tag other
    than ``tag`` (of an earlier listing).
    """
    with open_file(address, span) as opened:
        if tag and opened.tag and opened.tag != tag:
            raise AlteredError(f"was changed after it was listed: its tag is {opened.tag}, and was {tag}")
        content = b"".join(opened.chunks)
    expected = span[1] - span[0] if span is not None else opened.size
    check_length(len(content), expected, remote=local_path(address) is None)
    return content


def download_file(address: str, file: BinaryIO) -> None:
    """Empty an open file, and then copy the file at an address into it. Does not retry.

    Waits up to 10 s to connect, 30 s for each piece. Raises UserError for an address of no known kind; UnavailableError
    if the file at the address cannot be read, or has fewer or more bytes than announced; OSError if ``file`` cannot be
    written.
    """
    file.seek(0)  # an earlier try may have written a part
    file.truncate()
    with open_file(address) as opened:
        received = sum(map(file.write, opened.chunks))
    check_length(received, opened.size, remote=local_path(address) is None)


def stat_file(address: str) -> Entry:
    """Return the size and tag of a file without reading its content; the returned entry's name is "". Does not retry.

    The size is -1 if a web server sends none. The tag is the ETag, or else the time of the last change, or "". Waits up
    to 10 s to connect, 30 s for the response. Raises UserError for an address of no known kind, MissingError, or
    UnavailableError for other failures.
    """
    return select_storage(address).stat_file(address)


def list_files(address: str) -> Iterator[Entry]:
    """Yield all files below a folder or prefix, ordered by name, without the empty objects that mark folders.

    Keeps the whole list in memory. On this machine follows symlinks, and skips hidden files and folders; on a web
    server reads the list in the folder's file ``SHA256SUMS``. Yields nothing for a prefix without objects. Waits up to
    10 s to connect and 30 s for each response; does not retry. Raises UserError at once for an address of no known
    kind. Raises MissingError if a folder of this machine is missing, UnavailableError if the files cannot be listed: at
    the call for a bucket, at the first ``next()`` for others.
    """
    return select_storage(address).list_files(address)


def write_file(address: str, content: bytes | Path) -> None:
    """Write bytes, or a copy of the file at a path, to an address, and replace the file there. Does not retry.

    Makes missing folders. Readers see the old file or the whole new one; on this machine a power cut may lose both.
    Raises UnavailableError if the file cannot be written, UserError if the address is of a web server or no known kind.
    """
    select_storage(address).write_file(address, content, create=False)


def create_file(address: str, content: bytes | Path) -> None:
    """Write bytes, or a copy of the file at a path, to an address where no file is yet. Does not retry.

    Makes missing folders. Readers see no file or the whole file; on this machine it is on the disk before this returns.
    Raises ExistsError if there is a file; an earlier try whose response was lost may have written it. Raises
    UnavailableError if the file cannot be written; UserError if the address is of a web server or no known kind.
    """
    select_storage(address).write_file(address, content, create=True)


def delete_files(addresses: Sequence[str]) -> None:
    """Delete files that are all in one bucket or all on this machine, many with each request. Does not retry.

    Waits up to 10 s to connect, 30 s for each response. Raises MissingError if a file is missing, which S3 does not
    report; UnavailableError if a file cannot be deleted (others may be gone by then); UserError for a web server.
    """
    if addresses:
        select_storage(addresses[0]).delete_files(addresses)
