"""What identifies the content behind a user's own address, so that the cache notices when it changes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from flyte_ddp.errors import UserError
from flyte_ddp.files import file_digest
from flyte_ddp.progress import Progress
from flyte_ddp.storage import (
    ForbiddenError,
    MissingError,
    UnavailableError,
    join,
    list_files,
    local_path,
    open_file,
    read,
    retried,
    scheme,
    stat,
)
from flyte_ddp.storage.digest_list import SUMS


def content_identity(source: str, asked_as: str = "data_source") -> str:
    """SHA-256 (hex) that changes with the content of ``source``; empty for an empty one.

    A local file or directory is read whole. Of object storage it takes names, sizes and ETags of everything
    under the prefix; of an HTTP server the file's ETag or time of change with its size, or the ``SHA256SUMS`` of a
    directory that has one.

    Args:
        asked_as: the hyperparameter that names it, for errors.

    Raises:
        UserError: there is nothing, it cannot be reached, or the server does not say what identifies it.
    """
    if not source:
        return ""
    path = local_path(source)
    if path is not None:
        return local_identity(f"{asked_as}={source!r}", path)
    identify = http_identity if scheme(source) in ("http", "https") else listed_identity
    try:
        return retried(source, identify, Progress().note)
    except UnavailableError as failure:
        fix = "check the address, and that the server is up"
        if asked_as == "data_source":
            fix += "; a directory on a web server needs a SHA256SUMS file in it"
        raise failure.explained(f"{asked_as}={source!r}: cannot be read: {failure}; {fix}") from None


def digest_of(lines: Iterable[str]) -> str:
    """SHA-256 (hex) of lines of text."""
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def local_identity(source: str, path: Path) -> str:
    """Of a file its content, of a directory names and contents of all files in it; ``source`` is for errors."""
    if path.is_file():
        return digest_of([file_digest(path)])
    if not path.is_dir():
        raise UserError(f"{source}: there is no such file or directory; give one that exists")
    files = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file()}
    if not files:
        raise UserError(f"{source}: the directory is empty; give one that holds the data")
    return digest_of(f"{name} {file_digest(file)}" for name, file in sorted(files.items()))


def listed_identity(source: str) -> str:
    """Of names, sizes and tags of all files under the prefix, or of the one file that it is."""
    found = list(list_files(source))
    if not found:
        try:
            found = [stat(source)]
        except MissingError:
            raise MissingError("nothing there") from None
    return digest_of(f"{entry.name} {entry.size} {entry.tag}" for entry in found)


def http_identity(source: str) -> str:
    """Of what the server says about the content; of the content itself where it says nothing."""
    try:
        return hashlib.sha256(read(join(source, SUMS))).hexdigest()
    except (MissingError, ForbiddenError):  # web servers answer 403 for files that are not there, too
        pass
    found = stat(source)
    if found.tag:
        return digest_of(f"{found.size} {found.tag}")
    digest = hashlib.sha256()  # the server tells nothing: only the content itself is left
    with open_file(source) as file:
        for chunk in file.chunks:
            digest.update(chunk)
    return digest.hexdigest()
