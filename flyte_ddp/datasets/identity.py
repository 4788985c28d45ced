"""What identifies the content behind a user's own address, so that the cache notices when it changes."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.files import file_digest
from flyte_ddp.progress import Progress
from flyte_ddp.storage.digest_list import SUMS


def content_identity(source: str, asked_as: str = "data_source") -> str:
    """Return a SHA-256 (hex) that changes with the content of ``source``; empty for an empty one.

    Reads a local file or directory whole. Of object storage it takes names, sizes and ETags of everything under the
    prefix; of an HTTP server the file's ETag or time of change with its size, or the ``SHA256SUMS`` of a directory.
    Raises a UserError if there is nothing, or it cannot be reached; ``asked_as`` is the hyperparameter for the error.
    """
    if not source:
        return ""
    path = storage.local_path(source)
    if path is not None:
        return local_identity(f"{asked_as}={source!r}", path)
    identify = http_identity if storage.scheme(source) in ("http", "https") else listed_identity
    try:
        return storage.retried(source, identify, Progress().note)
    except storage.UnavailableError as failure:
        fix = "check the address, and that the server is up"
        if asked_as == "data_source":
            fix += "; a directory on a web server needs a SHA256SUMS file in it"
        raise failure.explained(f"{asked_as}={source!r}: cannot be read: {failure}; {fix}") from None


def digest_of(lines: Iterable[str]) -> str:
    """Return the SHA-256 (hex) of lines of text."""
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def local_identity(source: str, path: Path) -> str:
    """Return a digest of a file's content, or of names and contents of all files in a directory.

    Raises a UserError that calls it ``source`` if there is no such file, or none in the directory.
    """
    if path.is_file():
        return digest_of([file_digest(path)])
    if not path.is_dir():
        raise UserError(f"{source}: there is no such file or directory; give one that exists")
    files = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file()}
    if not files:
        raise UserError(f"{source}: the directory is empty; give one that holds the data")
    return digest_of(f"{name} {file_digest(file)}" for name, file in sorted(files.items()))


def listed_identity(source: str) -> str:
    """Return a digest of names, sizes and tags of all files under a prefix, or of the one file that it is."""
    found = list(storage.list_files(source))
    if not found:
        try:
            found = [storage.stat(source)]
        except storage.MissingError:
            raise storage.MissingError("nothing there") from None
    return digest_of(f"{entry.name} {entry.size} {entry.tag}" for entry in found)


def http_identity(source: str) -> str:
    """Return a digest of what the server says about the content, or of the content where the server says nothing."""
    try:
        return hashlib.sha256(storage.read(storage.join(source, SUMS))).hexdigest()
    except (storage.MissingError, storage.ForbiddenError):  # web servers answer 403 for missing files, too
        pass
    found = storage.stat(source)
    if found.tag:
        return digest_of(f"{found.size} {found.tag}")
    digest = hashlib.sha256()
    with storage.open_file(source) as file:
        for chunk in file.chunks:
            digest.update(chunk)
    return digest.hexdigest()
