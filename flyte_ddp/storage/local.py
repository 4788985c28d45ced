"""Read, list, write and delete files of this machine."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

from flyte_ddp.core.files import atomic_write
from flyte_ddp.storage.addresses import local_path
from flyte_ddp.storage.transfer import CHUNK_BYTES, Content, Entry, ExistsError, MissingError, Span, UnavailableError


def require_local_path(address: str) -> Path:
    path = local_path(address)
    assert path is not None
    return path


@contextmanager
def translate_os_errors() -> Iterator[None]:
    """Turn OSErrors of the block into UnavailableErrors: MissingError for a missing file, else not transient."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise MissingError("no such file") from None
    except OSError as error:
        raise UnavailableError(error.strerror or str(error)) from None


@contextmanager
def open_file(address: str, span: Span | None) -> Iterator[Content]:
    """Yield the content of a file, or of a span of bytes, for one pass. The tag is the time of the last change (ns).

    If the file ends before the span, fewer bytes are read.

    Raises:
        MissingError: The file does not exist.
        UnavailableError: The file cannot be read.
    """
    with translate_os_errors():
        file = require_local_path(address).open("rb")
    with file:
        status = os.fstat(file.fileno())
        start, end = span or (0, status.st_size)
        file.seek(start)
        size = max(0, min(end, status.st_size) - start)
        yield Content(size, read_chunks(file, end - start), f"{status.st_mtime_ns}")


def read_chunks(file: BinaryIO, length: int) -> Iterator[bytes]:
    with translate_os_errors():
        while length > 0 and (chunk := file.read(min(length, CHUNK_BYTES))):
            length -= len(chunk)
            yield chunk


def stat_file(address: str) -> Entry:
    """Return an Entry with the size of a file.

    The Entry's name is empty, and its tag is the time of the last change (ns).

    Raises:
        MissingError: The file does not exist or is not a regular file.
        UnavailableError: The properties of the file cannot be read.
    """
    with translate_os_errors():
        status = require_local_path(address).stat()
    if not S_ISREG(status.st_mode):
        raise MissingError("no such file")
    return Entry("", status.st_size, f"{status.st_mtime_ns}")


def write_file(address: str, content: bytes | Path, *, create: bool) -> None:
    """Write a file atomically, and create missing folders. With ``create``, the content is on the disk afterwards.

    Raises:
        ExistsError: With ``create``, the file exists.
        UnavailableError: The file cannot be written, or the file at the path ``content`` cannot be read.
    """
    path = require_local_path(address)
    try:
        with atomic_write(path, durable=create, create=create) as file:
            if isinstance(content, Path):
                with content.open("rb") as source:
                    shutil.copyfileobj(source, file, CHUNK_BYTES)
            else:
                file.write(content)
    except OSError as error:
        # The path is examined because a FileExistsError is also raised if the file's folder is a file.
        if create and isinstance(error, FileExistsError) and path.exists():
            raise ExistsError("a file with this name already exists") from None
        raise UnavailableError(error.strerror or str(error)) from None


def delete_files(addresses: Sequence[str]) -> None:
    with translate_os_errors():
        for address in addresses:
            require_local_path(address).unlink()


def list_files(address: str) -> Iterator[Entry]:
    """Yield the files below a folder, sorted by name. Hidden files and folders are skipped, and links are followed.

    Errors are raised by the first ``next()``.

    Raises:
        MissingError: The folder does not exist.
        UnavailableError: A folder cannot be read, or a link is broken or circular.
    """
    root = require_local_path(address)
    with translate_os_errors():
        if not root.is_dir():
            raise MissingError("no such directory")
    try:
        yield from sorted(walk_folder(root), key=lambda entry: entry.name)
    except OSError as error:
        raise UnavailableError(f"{error.filename or root}: {error.strerror or error}") from None


def list_folders(address: str) -> list[str]:
    with translate_os_errors(), os.scandir(require_local_path(address)) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def walk_folder(root: Path) -> Iterator[Entry]:
    """Yield files in the file system's order. Hidden files and folders are skipped, and links are followed.

    Raises OSError for unreadable folders and for broken or circular links.
    """

    def fail(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(root, onerror=fail, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (f"{folder}/{name}" for name in names if not name.startswith(".")):
            status = os.stat(path)  # noqa: PTH116
            if S_ISREG(status.st_mode):
                yield Entry(path[len(f"{root}/") :], status.st_size, f"{status.st_mtime_ns}")
