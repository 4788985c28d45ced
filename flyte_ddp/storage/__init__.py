"""Read, list, write and delete files by address: a path, file://, http(s)://, s3://, gs:// or az://.

Requests wait up to 10 s for a connection, and 30 s for each piece or response. Only :func:`retry` retries. A failure
raises :class:`UnavailableError`, whose ``transient`` is true if a retry may succeed. An address of unknown kind, and
writing to a web server, raise UserError. The first use of a bucket may ask servers for credentials and region. From
then on, forks of this process cannot use object storage.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

from flyte_ddp.core.progress import Progress
from flyte_ddp.storage import local
from flyte_ddp.storage.addresses import encode_name, join, local_path, parent, resolve, scheme
from flyte_ddp.storage.origins import may_be_named, origin_of
from flyte_ddp.storage.transfer import (
    AlteredError,
    Content,
    Entry,
    ExistsError,
    ForbiddenError,
    MissingError,
    Span,
    UnavailableError,
    check_length,
    retry,
)

__all__ = ["AlteredError", "ExistsError", "ForbiddenError", "MissingError", "UnavailableError"]
__all__ += ["encode_name", "join", "local_path", "may_be_named", "origin_of", "parent", "resolve", "scheme"]
__all__ += ["Entry", "check_length", "create_file", "delete_files", "download_file", "hash_file", "list_files"]
__all__ += ["list_folders", "open_file", "read_file", "retry", "stat_file", "write_file"]

MOST_BYTES = 2**30  # maximum of a file that is read into memory


def select_storage(address: str) -> Any:
    """Import and return the module for an address, which has the functions below. May import requests or obstore."""
    kind = scheme(address)
    if kind == "file":
        return local
    if kind in ("http", "https"):
        from flyte_ddp.storage import http

        return http
    from flyte_ddp.storage import objects

    return objects


def open_file(address: str, span: Span | None = None) -> AbstractContextManager[Content]:
    """Return a context manager that opens a file, or a span of bytes, for one pass over the stored bytes.

    ``span`` is the number of the first byte, and the number of the byte after the last.

    Raises:
        UnavailableError: The file cannot be read. Raised on entering the block, and while chunks are read.
    """
    opened: AbstractContextManager[Content] = select_storage(address).open_file(address, span)
    return opened


def read_file(address: str, span: Span | None = None, *, tag: str = "") -> bytes:
    """Read a file, or a span of bytes, into memory.

    Args:
        address: The address of the file.
        span: Number of the first byte, and number of the byte after the last.
        tag: The expected tag (:class:`Entry`) of the file. If empty, or if the storage sends no tag, any tag is
            accepted.

    Raises:
        AlteredError: The file has another tag.
        UnavailableError: The file cannot be read, has fewer bytes than announced or asked for, or has more than
            MOST_BYTES (a server's answer may have no end).
    """
    with open_file(address, span) as opened:
        if tag and opened.tag and opened.tag != tag:
            raise AlteredError(f"changed after it was listed: its tag is {opened.tag}, but was {tag}")
        chunks, size = list[bytes](), 0
        for chunk in opened.chunks:
            chunks.append(chunk)
            if (size := size + len(chunk)) > MOST_BYTES:
                raise UnavailableError(f"has more than {MOST_BYTES:,} bytes, the limit for reading a file at once")
        content = b"".join(chunks)
    expected = span[1] - span[0] if span is not None else opened.size
    check_length(len(content), expected, remote=local_path(address) is None)
    return content


def hash_file(address: str) -> str:
    """Return the SHA-256 (hex) of the file at an address. Reads the file in chunks.

    Raises:
        UnavailableError: The file cannot be read.
    """
    digest = hashlib.sha256()
    with open_file(address) as opened:
        for chunk in opened.chunks:
            digest.update(chunk)
    return digest.hexdigest()


def download_file(
    address: str, file: BinaryIO, *, digests: Sequence[str] = (), kind: str = "sha256", progress: Progress | None = None
) -> None:
    """Empty an open file and copy the file at an address into the open file.

    If ``digests`` are given, the copy's digest of this ``kind`` (hex) must begin with an element of ``digests``. After
    an error, the open file may hold a part of the copy.

    Raises:
        AlteredError: The copy has another digest.
        UnavailableError: The address cannot be read, or the copy is incomplete.
        OSError: ``file`` cannot be written.
    """
    file.seek(0)  # an earlier try may have written a part
    file.truncate()
    digest = hashlib.new(kind, usedforsecurity=False)
    remote = local_path(address) is None
    name = address.rpartition("/")[2]
    label = f"{name} from {address.removesuffix(name)}"
    with open_file(address) as opened:
        with (progress or Progress("off")).track(label, opened.size, "B") as advance:
            for chunk in opened.chunks:
                file.write(chunk)
                if digests:
                    digest.update(chunk)
                advance(len(chunk))
        received = file.tell()
    check_length(received, opened.size, remote=remote)
    if digests and not digest.hexdigest().startswith(tuple(digests)):
        what = f"{kind} {digest.hexdigest()} ({received:,} bytes) instead of {digests[0]}"
        raise AlteredError(what, transient=remote)


def stat_file(address: str) -> Entry:
    """Return size and tag of a file, with the name "". If a web server does not send the size, the size is -1.

    Raises:
        MissingError: The file does not exist.
        UnavailableError: The storage cannot be asked.
    """
    entry: Entry = select_storage(address).stat_file(address)
    return entry


def list_files(address: str) -> Iterator[Entry]:
    """Yield all files below a folder or prefix, ordered by name.

    The whole list is kept in memory. On this machine, symlinks are followed, and hidden files and folders are skipped.
    In a bucket, empty objects that mark folders are skipped, and a prefix without objects gives no files. Errors of a
    bucket are raised by the call, other errors by the first ``next()``.

    Raises:
        MissingError: The folder of this machine does not exist.
        UnavailableError: The files cannot be listed, or the address is on a web server.
    """
    entries: Iterator[Entry] = select_storage(address).list_files(address)
    return entries


def list_folders(address: str) -> list[str]:
    """Return the sorted names of the folders directly in a folder or below a prefix. Hidden local folders are skipped.

    Raises:
        MissingError: The folder of this machine does not exist.
        UnavailableError: The folders cannot be listed, or the address is on a web server.
    """
    names: list[str] = select_storage(address).list_folders(address)
    return names


def write_file(address: str, content: bytes | Path) -> None:
    """Write bytes, or a copy of the file at a path, to an address.

    Replaces an existing file and creates missing folders. Readers see the old file or the whole new file. On this
    machine, a power cut may lose both.

    Raises:
        UnavailableError: The file cannot be written.
        UserError: The address is on a web server.
    """
    select_storage(address).write_file(address, content, create=False)


def create_file(address: str, content: bytes | Path) -> None:
    """Write bytes, or a copy of the file at a path, to an address where no file exists.

    Creates missing folders. Readers see no file or the whole file. On this machine, the file is on the disk when this
    function returns. S3 accepts at most 5 GB. A server that ignores the header If-None-Match replaces an existing
    object without an error.

    Raises:
        ExistsError: The file exists. An earlier try whose response was lost may have written the file.
        UnavailableError: The file cannot be written.
        UserError: The address is on a web server.
    """
    select_storage(address).write_file(address, content, create=True)


def delete_files(addresses: Sequence[str]) -> None:
    """Delete files of a single bucket, or files of this machine, with few requests. An empty list does nothing.

    After an error, some of the files may be deleted, and the rest still exist.

    Raises:
        MissingError: A file does not exist. S3 does not report missing files.
        UnavailableError: A file cannot be deleted.
        UserError: The addresses are on a web server.
    """
    if addresses:
        select_storage(addresses[0]).delete_files(addresses)
