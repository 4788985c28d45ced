"""Read, list, write and delete files by address: a path, file://, http(s)://, s3://, gs:// or az://.

Requests wait up to 10 s for a connection, and 30 s for each piece or response; only :func:`retry` retries. A failure is
an :class:`UnavailableError`, which says whether a retry may succeed. An address of no known kind, and writing to a web
server, raise UserErrors. The first use of a bucket may ask servers for credentials and region; from then on forks of
this process cannot use object storage.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

from flyte_ddp.progress import Progress
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

MOST_BYTES = 2**30  # of a file that is read into memory


def select_storage(address: str) -> Any:
    """Import and return the module for an address, which has the functions below; may import requests, obstore."""
    kind = scheme(address)
    if kind == "file":
        return local
    if kind in ("http", "https"):
        from flyte_ddp.storage import http

        return http
    from flyte_ddp.storage import objects

    return objects


def open_file(address: str, span: Span | None = None) -> AbstractContextManager[Content]:
    """Return a context manager that opens a file, or a span of it, for one pass over its bytes as stored.

    UnavailableErrors come on entering the block, and while chunks are read.
    """
    opened: AbstractContextManager[Content] = select_storage(address).open_file(address, span)
    return opened


def read_file(address: str, span: Span | None = None, *, tag: str = "") -> bytes:
    """Read a file, or a span, into memory; AlteredError for another tag (:class:`Entry`) than ``tag``; "" fits all.

    Raises UnavailableError for more than MOST_BYTES: a server's answer may have no end.
    """
    with open_file(address, span) as opened:
        if tag and opened.tag and opened.tag != tag:
            raise AlteredError(f"was changed after it was listed: its tag is {opened.tag}, and was {tag}")
        chunks, size = list[bytes](), 0
        for chunk in opened.chunks:
            chunks.append(chunk)
            if (size := size + len(chunk)) > MOST_BYTES:
                raise UnavailableError(f"has more than {MOST_BYTES:,} bytes, which is too much to be read at once")
        content = b"".join(chunks)
    expected = span[1] - span[0] if span is not None else opened.size
    check_length(len(content), expected, remote=local_path(address) is None)
    return content


def hash_file(address: str) -> str:
    """Return the SHA-256 (hex) of the file at an address, which is read in chunks."""
    digest = hashlib.sha256()
    with open_file(address) as opened:
        for chunk in opened.chunks:
            digest.update(chunk)
    return digest.hexdigest()


def download_file(
    address: str, file: BinaryIO, *, digests: Sequence[str] = (), kind: str = "sha256", progress: Progress | None = None
) -> None:
    """Empty an open file, and copy the file at an address into it; raise OSError if ``file`` cannot be written.

    Raises AlteredError unless the copy's digest of this ``kind`` (hex) begins as one of ``digests``, if there are any.
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
    """Return size (-1 if a web server sends none) and tag of a file, with name ""; MissingError if there is none."""
    entry: Entry = select_storage(address).stat_file(address)
    return entry


def list_files(address: str) -> Iterator[Entry]:
    """Yield all files below a folder or prefix, ordered by name, without the empty objects that mark folders.

    Keeps the whole list in memory. On this machine follows symlinks, and skips hidden files and folders. For a web
    server raises UnavailableError, for a missing folder of this machine MissingError; a prefix without objects has no
    files. Errors come at the call for a bucket, at the first ``next()`` for others.
    """
    entries: Iterator[Entry] = select_storage(address).list_files(address)
    return entries


def list_folders(address: str) -> list[str]:
    """Return the sorted names of the folders directly in a folder or below a prefix, without hidden local ones.

    Raises UnavailableError for a web server, and MissingError for a missing folder of this machine.
    """
    names: list[str] = select_storage(address).list_folders(address)
    return names


def write_file(address: str, content: bytes | Path) -> None:
    """Write bytes, or a copy of the file at a path, to an address; replace the file there; make missing folders.

    Readers see the old file or the whole new one; on this machine a power cut may lose both.
    """
    select_storage(address).write_file(address, content, create=False)


def create_file(address: str, content: bytes | Path) -> None:
    """Write bytes, or a copy of the file at a path, to an address where no file is yet; make missing folders.

    Readers see no file or the whole file; on this machine it is on the disk before this returns. Raises ExistsError if
    there is a file; an earlier try whose response was lost may have written it.
    """
    select_storage(address).write_file(address, content, create=True)


def delete_files(addresses: Sequence[str]) -> None:
    """Delete files that are all in one bucket or all on this machine, many with each request.

    Raises MissingError if a file is missing, which S3 does not report. After an error, other files may be gone.
    """
    if addresses:
        select_storage(addresses[0]).delete_files(addresses)
