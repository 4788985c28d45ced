"""Read, list, write and delete files by address: a path, file://, http(s)://, s3://, gs:// or az://.

Requests wait up to 10 s for a connection, and 30 s for each piece or response. Only :func:`call_with_retries` retries.
A failure raises :class:`UnavailableError`, whose ``transient`` is true if a retry may succeed. An address of unknown
kind, and writing to a web server, raise UserError. The first use of a bucket may ask servers for credentials and
region. From then on, forks of this process cannot use object storage.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

from flyte_ddp.core.progress import Progress
from flyte_ddp.storage import local
from flyte_ddp.storage.addresses import (
    encode_name,
    find_local_path,
    join_address,
    parent_address,
    parse_scheme,
    resolve_address,
)
from flyte_ddp.storage.origins import may_index_list_address, parse_origin
from flyte_ddp.storage.transfer import (
    AlteredError,
    Content,
    Entry,
    ExistsError,
    ForbiddenError,
    MissingError,
    Span,
    UnavailableError,
    call_with_retries,
    check_received_length,
)

__all__ = ["AlteredError", "ExistsError", "ForbiddenError", "MissingError", "UnavailableError"]
__all__ += [
    "encode_name",
    "find_local_path",
    "join_address",
    "may_index_list_address",
    "parent_address",
    "parse_origin",
    "parse_scheme",
    "resolve_address",
]
__all__ += ["Entry", "check_received_length", "create_file", "delete_files", "download_file", "hash_file", "list_files"]
__all__ += ["call_with_retries", "list_folders", "open_file", "read_file", "stat_file", "write_file"]

MOST_BYTES = 2**30  # maximum of a file that is read into memory


def import_storage_module(address: str) -> Any:
    """Return the module that reads and writes the kind of ``address``. Imports requests or obstore if needed.

    Each of these modules has the functions below.
    """
    kind = parse_scheme(address)
    if kind == "file":
        return local
    if kind in ("http", "https"):
        from flyte_ddp.storage import http

        return http
    from flyte_ddp.storage import objects

    return objects


def open_file(address: str, span: Span | None = None) -> AbstractContextManager[Content]:
    """Open a file, or a span of its bytes, for the block. Yields the content, which can be read once.

    ``span`` is the number of the first byte, and the number of the byte after the last.

    Raises:
        UnavailableError: The file cannot be read. Raised on entering the block, and while chunks are read.
    """
    opened: AbstractContextManager[Content] = import_storage_module(address).open_file(address, span)
    return opened


def read_file(address: str, span: Span | None = None, *, tag: str = "") -> bytes:
    """Return the bytes of a file, or of a span of the file.

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
    check_received_length(len(content), expected, remote=find_local_path(address) is None)
    return content


def hash_file(address: str) -> str:
    """Return the SHA-256 (hex) of the file at an address. Reads the whole file, in chunks.

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
    """Replace the content of an open file by a copy of the file at an address.

    After an error, the open file may hold a part of the copy.

    Args:
        address: The address of the file to copy.
        file: The open file.
        digests: Beginnings of allowed digests (hex) of the copy. If empty, the copy is not checked.
        kind: The name of the digest in hashlib.
        progress: Shows the progress of the download.

    Raises:
        AlteredError: The copy has another digest.
        UnavailableError: The address cannot be read, or the copy is incomplete.
        OSError: ``file`` cannot be written.
    """
    file.seek(0)  # an earlier try may have written a part
    file.truncate()
    digest = hashlib.new(kind, usedforsecurity=False)
    remote = find_local_path(address) is None
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
    check_received_length(received, opened.size, remote=remote)
    if digests and not digest.hexdigest().startswith(tuple(digests)):
        what = f"{kind} {digest.hexdigest()} ({received:,} bytes) instead of {digests[0]}"
        raise AlteredError(what, transient=remote)


def stat_file(address: str) -> Entry:
    """Return size and tag of a file as an Entry with an empty name. The size is -1 if a web server does not send it.

    Raises:
        MissingError: The file does not exist.
        UnavailableError: The storage does not answer.
    """
    entry: Entry = import_storage_module(address).stat_file(address)
    return entry


def list_files(address: str) -> Iterator[Entry]:
    """Yield name, size and tag of all files below a folder or prefix, ordered by name.

    The whole list is kept in memory. On this machine, symlinks are followed, and hidden files and folders are skipped.
    In a bucket, empty objects that mark folders are skipped, and a prefix without objects gives no files. Errors of a
    local folder are raised by the first ``next()``, other errors by the call.

    Raises:
        MissingError: The folder of this machine does not exist.
        UnavailableError: The files cannot be listed, or the address is on a web server.
    """
    entries: Iterator[Entry] = import_storage_module(address).list_files(address)
    return entries


def list_folders(address: str) -> list[str]:
    """Return the sorted names of the folders directly in a local folder, or one level below a bucket's prefix.

    Hidden local folders are skipped.

    Raises:
        MissingError: The folder of this machine does not exist.
        UnavailableError: The folders cannot be listed, or the address is on a web server.
    """
    names: list[str] = import_storage_module(address).list_folders(address)
    return names


def write_file(address: str, content: bytes | Path) -> None:
    """Write bytes, or a copy of the file at a path, to an address.

    An existing file is replaced, and missing folders are created. Readers see the old file or the whole new file. On
    this machine, a power cut may lose both.

    Raises:
        UnavailableError: The file cannot be written.
        UserError: The address is on a web server.
    """
    import_storage_module(address).write_file(address, content, create=False)


def create_file(address: str, content: bytes | Path) -> None:
    """Write bytes, or a copy of the file at a path, to an address where no file may exist.

    Missing folders are created. Readers see no file or the whole file. On this machine, the file is on the disk when
    this function returns. S3 accepts at most 5 GB. A server that ignores the header If-None-Match replaces an existing
    object without an error.

    Raises:
        ExistsError: The file exists. An earlier try whose response was lost may have written the file.
        UnavailableError: The file cannot be written.
        UserError: The address is on a web server.
    """
    import_storage_module(address).write_file(address, content, create=True)


def delete_files(addresses: Sequence[str]) -> None:
    """Delete files of a single bucket, or files of this machine, with few requests. An empty list does nothing.

    After an error, some of the files may be deleted, and the rest still exist.

    Raises:
        MissingError: A file does not exist. S3 does not report missing files.
        UnavailableError: A file cannot be deleted.
        UserError: The addresses are on a web server.
    """
    if addresses:
        import_storage_module(addresses[0]).delete_files(addresses)
