"""Files of this machine."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

from flyte_ddp.files import atomic_write
from flyte_ddp.storage.addresses import local_path
from flyte_ddp.storage.content import CHUNK_BYTES, Content, Entry, Span
from flyte_ddp.storage.failures import ExistsError, MissingError, UnavailableError


def path_of(address: str) -> Path:
    """Return the path that a local address means."""
    path = local_path(address)
    assert path is not None
    return path


@contextmanager
def translate_errors() -> Iterator[None]:
    """Turn the block's OSErrors into an UnavailableError, or a MissingError."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise MissingError("no such file") from None
    except OSError as error:
        raise UnavailableError(error.strerror or str(error)) from None


@contextmanager
def open_file(address: str, span: Span | None) -> Iterator[Content]:
    """:func:`flyte_ddp.storage.open_file` for a path."""
    with translate_errors():
        file = path_of(address).open("rb")
    with file:
        size = os.fstat(file.fileno()).st_size
        start, end = span or (0, size)
        file.seek(start)
        yield Content(max(0, min(end, size) - start), pieces(file, end - start))


def pieces(file: BinaryIO, length: int) -> Iterator[bytes]:
    """Yield the next ``length`` bytes of the file, or fewer at its end."""
    with translate_errors():
        while length > 0 and (piece := file.read(min(length, CHUNK_BYTES))):
            length -= len(piece)
            yield piece


def stat(address: str) -> Entry:
    """:func:`flyte_ddp.storage.stat` for a path."""
    with translate_errors():
        status = path_of(address).stat()
    if not S_ISREG(status.st_mode):
        raise MissingError("no such file")
    return Entry("", status.st_size, f"{status.st_mtime_ns}")


def put(address: str, content: bytes | Path, *, create: bool = False) -> None:
    """:func:`flyte_ddp.storage.put` for a path."""
    path = path_of(address)
    try:
        with atomic_write(path, durable=create, create=create) as file:
            if isinstance(content, Path):
                with content.open("rb") as source:
                    shutil.copyfileobj(source, file, CHUNK_BYTES)
            else:
                file.write(content)
    except OSError as error:
        if create and isinstance(error, FileExistsError) and path.exists():  # and not that its folder is a file
            raise ExistsError("there is a file of that name") from None
        raise UnavailableError(error.strerror or str(error)) from None


def create(address: str, content: bytes | Path) -> None:
    """:func:`flyte_ddp.storage.create` for a path; the file is on the disk when this returns."""
    put(address, content, create=True)


def delete(addresses: Sequence[str]) -> None:
    """:func:`flyte_ddp.storage.delete` for paths."""
    with translate_errors():
        for address in addresses:
            path_of(address).unlink()


def list_files(address: str) -> Iterator[Entry]:
    """:func:`flyte_ddp.storage.list_files` for a folder; links are followed, hidden files and folders left out."""
    root = path_of(address)
    with translate_errors():
        if not root.is_dir():
            raise MissingError("no such directory")
    yield from sorted(walk(str(root), "", ()), key=lambda entry: entry.name)


def walk(folder: str, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[Entry]:
    """Yield the files below a folder, with ``prefix`` before their names.

    Raises:
        UnavailableError: a folder or the target of a link cannot be read; or the folder is one of those ``above`` it,
            by device and inode, to which a link has led back.
    """
    try:
        itself = os.stat(folder)  # noqa: PTH116
        identity = (itself.st_dev, itself.st_ino)
        if identity in above:
            raise UnavailableError(f"{folder} is a link to a folder that it is in")
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    yield from walk(entry.path, f"{prefix}{entry.name}/", (*above, identity))
                elif S_ISREG((status := entry.stat()).st_mode):
                    yield Entry(f"{prefix}{entry.name}", status.st_size, f"{status.st_mtime_ns}")
    except OSError as error:
        raise UnavailableError(f"{error.filename or folder}: {error.strerror or error}") from None
