"""Read, list, write and delete files of this machine."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

from flyte_ddp.core.files import atomic_write
from flyte_ddp.storage.addresses import find_local_path
from flyte_ddp.storage.transfer import CHUNK_BYTES, Content, Entry, ExistsError, MissingError, Span, UnavailableError


def parse_local_path(address: str) -> Path:
    """Return the absolute path of an address that is known to be on this machine."""
    path = find_local_path(address)
    assert path is not None
    return path


@contextmanager
def translate_os_errors() -> Iterator[None]:
    """Turn OSErrors of the block into UnavailableErrors, which are not transient.

    For a missing file, the error is a MissingError.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise MissingError("no such file") from None
    except OSError as error:
        raise UnavailableError(error.strerror or str(error)) from None


@contextmanager
def open_file(address: str, span: Span | None) -> Iterator[Content]:
    """Open a file, or a span of its bytes, for the block. Yields the content, which can be read once.

    The content's tag is the time of the last change (ns). If the file ends before the span, fewer bytes are read.

    Raises:
        MissingError: The file does not exist.
        UnavailableError: The file cannot be read.
    """
    with translate_os_errors():
        file = parse_local_path(address).open("rb")
    with file:
        status = os.fstat(file.fileno())
        start, end = span or (0, status.st_size)
        file.seek(start)
        size = max(0, min(end, status.st_size) - start)
        yield Content(size, read_chunks(file, end - start), f"{status.st_mtime_ns}")


def read_chunks(file: BinaryIO, length: int) -> Iterator[bytes]:
    """Yield the next ``length`` bytes of a file in chunks, or fewer at the end of the file.

    Raises:
        UnavailableError: The file cannot be read.
    """
    with translate_os_errors():
        while length > 0 and (chunk := file.read(min(length, CHUNK_BYTES))):
            length -= len(chunk)
            yield chunk


def stat_file(address: str) -> Entry:
    """Return size and tag of a file as an Entry with an empty name. The tag is the time of the last change (ns).

    Raises:
        MissingError: The file does not exist or is not a regular file.
        UnavailableError: The properties of the file cannot be read.
    """
    with translate_os_errors():
        status = parse_local_path(address).stat()
    if not S_ISREG(status.st_mode):
        raise MissingError("no such file")
    return Entry("", status.st_size, f"{status.st_mtime_ns}")


def write_file(address: str, content: bytes | Path, *, create: bool) -> None:
    """Write bytes, or a copy of the file at the path ``content``, to a file. Creates missing folders.

    The file appears or is replaced when complete. With ``create``, the file must not exist, and is on the disk when
    this function returns.

    Raises:
        ExistsError: With ``create``, the file exists.
        UnavailableError: The file cannot be written, or ``content`` cannot be read.
    """
    path = parse_local_path(address)
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
    """Delete files of this machine.

    Raises:
        MissingError: A file does not exist. Later files are not deleted.
        UnavailableError: A file cannot be deleted. Later files are not deleted.
    """
    with translate_os_errors():
        for address in addresses:
            parse_local_path(address).unlink()


def list_files(address: str) -> Iterator[Entry]:
    """Yield name, size and tag of the files below a folder, sorted by name.

    Hidden files and folders are skipped, and links are followed. Errors are raised by the first ``next()``.

    Raises:
        MissingError: The folder does not exist.
        UnavailableError: A folder cannot be read, or a link is broken or circular.
    """
    root = parse_local_path(address)
    with translate_os_errors():
        if not root.is_dir():
            raise MissingError("no such directory")
    try:
        yield from sorted(iterate_folder_files(root), key=lambda entry: entry.name)
    except OSError as error:
        raise UnavailableError(f"{error.filename or root}: {error.strerror or error}") from None


def list_folders(address: str) -> list[str]:
    with translate_os_errors(), os.scandir(parse_local_path(address)) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def iterate_folder_files(root: Path) -> Iterator[Entry]:
    """Yield name, size and tag of the files below a folder, in the file system's order.

    Hidden files and folders are skipped, and links are followed.

    Raises:
        OSError: A folder is unreadable, or a link is broken or circular.
    """

    def fail(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(root, onerror=fail, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (f"{folder}/{name}" for name in names if not name.startswith(".")):
            status = os.stat(path)  # noqa: PTH116
            if S_ISREG(status.st_mode):
                yield Entry(path[len(f"{root}/") :], status.st_size, f"{status.st_mtime_ns}")
