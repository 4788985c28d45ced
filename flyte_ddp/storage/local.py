"""Files of this machine."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import BinaryIO

from flyte_ddp.files import sync
from flyte_ddp.storage.addresses import local_path
from flyte_ddp.storage.content import CHUNK_BYTES, Content, Entry, Span
from flyte_ddp.storage.failures import ExistsError, MissingError, UnavailableError


@contextmanager
def open_file(address: str, span: Span | None) -> Iterator[Content]:
    """:func:`flyte_ddp.storage.open_file` for a path."""
    try:
        file = path_of(address).open("rb")
    except (FileNotFoundError, NotADirectoryError):
        raise MissingError("no such file") from None
    except OSError as error:
        raise UnavailableError(error.strerror or str(error)) from None
    with file:
        size = os.fstat(file.fileno()).st_size
        start, end = span or (0, size)
        file.seek(start)
        yield Content(max(0, min(end, size) - start), pieces(file, end - start))


def path_of(address: str) -> Path:
    """The path that a local address means."""
    path = local_path(address)
    assert path is not None
    return path


def pieces(file: BinaryIO, length: int) -> Iterator[bytes]:
    """The next ``length`` bytes of the file, or fewer at its end."""
    try:
        while length > 0 and (piece := file.read(min(length, CHUNK_BYTES))):
            length -= len(piece)
            yield piece
    except OSError as error:
        raise UnavailableError(error.strerror or str(error)) from None


def stat(address: str) -> Entry:
    """:func:`flyte_ddp.storage.stat` for a path."""
    status = status_of(path_of(address))
    if status is None or not S_ISREG(status.st_mode):
        raise MissingError("no such file")
    return Entry("", status.st_size, f"{status.st_mtime_ns}")


def status_of(path: Path) -> os.stat_result | None:
    """What the system says of a path; None if nothing is there."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UnavailableError(error.strerror or str(error)) from None


def put(address: str, content: bytes) -> None:
    """:func:`flyte_ddp.storage.put` for a path."""
    path = path_of(address)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def create(address: str, content: bytes | Path) -> None:
    """:func:`flyte_ddp.storage.create` for a path: under a second name, which only one process can give."""
    path = path_of(address)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        make_folder(path.parent)
        with partial.open("wb") as file:
            if isinstance(content, Path):
                with content.open("rb") as source:
                    shutil.copyfileobj(source, file, CHUNK_BYTES)
            else:
                file.write(content)
            sync(file)
        os.link(partial, path)
        sync_folder(path.parent)
    except FileExistsError:
        raise ExistsError("there is a file of that name") from None
    except OSError as error:
        raise UnavailableError(error.strerror or str(error)) from None
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it, if they are not there, and puts their names on the disk."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(*error.args) from None
    for each in missing:
        sync_folder(each.parent)


def sync_folder(folder: Path) -> None:
    """Puts a folder's names on the disk, so that a power cut takes none that was there before a later one."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def list_files(address: str) -> Iterator[Entry]:
    """:func:`flyte_ddp.storage.list_files` for a directory; links are followed, hidden files and folders left out."""
    root = path_of(address)
    status = status_of(root)
    if status is None or not S_ISDIR(status.st_mode):
        raise MissingError("no such directory")
    found: list[Entry] = []
    walk(str(root), "", (), found)
    yield from sorted(found, key=lambda entry: entry.name)


def walk(folder: str, prefix: str, above: tuple[tuple[int, int], ...], found: list[Entry]) -> None:
    """Adds the files below a folder; ``above``: the folders that it is in, to which a link may lead back."""
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
                    walk(entry.path, f"{prefix}{entry.name}/", (*above, identity), found)
                elif S_ISREG((status := entry.stat()).st_mode):
                    found.append(Entry(f"{prefix}{entry.name}", status.st_size, f"{status.st_mtime_ns}"))
    except OSError as error:
        raise UnavailableError(f"{error.filename or folder}: {error.strerror or error}") from None
