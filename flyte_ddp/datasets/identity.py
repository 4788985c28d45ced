"""What identifies the content behind a user's own address, so that the cache notices when it changes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from flyte_ddp.datasets.download import AllFailedError, with_retries
from flyte_ddp.datasets.progress import Progress
from flyte_ddp.datasets.transport import (
    CHUNK_BYTES,
    MissingError,
    http_response,
    join,
    local_path,
    open_file,
    s3_client,
    s3_failures,
    s3_location,
    scheme,
)
from flyte_ddp.errors import UserError


def content_identity(source: str) -> str:
    """SHA-256 (hex) that changes with the content of ``source``; empty for an empty one.

    A local file or directory is read whole. Of S3 it takes names, sizes and ETags of everything under the prefix; of
    an HTTP server the file's ETag or time of change with its size, or the ``SHA256SUMS`` of a directory that has one.

    Raises:
        UserError: there is nothing, it cannot be reached, or the server does not say what identifies it.
    """
    if not source:
        return ""
    path = local_path(source)
    if path is not None:
        return local_identity(source, path)
    read = s3_identity if scheme(source) == "s3" else http_identity
    try:
        return with_retries(source, [source], read, Progress())
    except AllFailedError as error:
        failure = next(iter(error.failures.values()))
        raise UserError(
            f"data_source={source!r}: cannot be read: {failure}; check the address, and that the server is up; "
            "a directory on a web server needs a SHA256SUMS file in it"
        ) from None


def digest_of(lines: Iterable[str]) -> str:
    """SHA-256 (hex) of lines of text."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def local_identity(source: str, path: Path) -> str:
    """Of a file its content, of a directory names and contents of all files in it."""
    if path.is_file():
        return digest_of([file_digest(path)])
    if not path.is_dir():
        raise UserError(f"data_source={source!r}: there is no such file or directory; give one that exists")
    files = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file()}
    if not files:
        raise UserError(f"data_source={source!r}: the directory is empty; give one that holds the data")
    return digest_of(f"{name} {file_digest(file)}" for name, file in sorted(files.items()))


def file_digest(path: Path) -> str:
    """SHA-256 (hex) of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def s3_identity(source: str) -> str:
    """Of names, sizes and ETags of the object, or of all objects under the prefix."""
    bucket, key = s3_location(source)
    prefix = key.rstrip("/")
    with s3_failures():
        pages = s3_client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        objects = [entry for page in pages for entry in page.get("Contents", [])]
    inside = [
        entry for entry in objects if not prefix or entry["Key"] == prefix or entry["Key"].startswith(f"{prefix}/")
    ]
    if not inside:
        raise MissingError("nothing there")
    return digest_of(f"{entry['Key'][len(prefix) :]} {entry['Size']} {entry['ETag']}" for entry in inside)


def http_identity(source: str) -> str:
    """Of what the server says about the content; of the content itself where it says nothing."""
    try:
        with open_file(join(source, "SHA256SUMS")) as (_, chunks):
            return hashlib.sha256(b"".join(chunks)).hexdigest()
    except MissingError:
        pass
    with http_response(source, "HEAD") as response:
        marks = [response.headers.get(name) for name in ("ETag", "Last-Modified", "Content-Length")]
    if marks[0] or marks[1]:
        return digest_of(f"{mark}" for mark in marks)
    digest = hashlib.sha256()  # the server tells nothing: only the content itself is left
    with open_file(source) as (_, chunks):
        for chunk in chunks:
            digest.update(chunk)
    return digest.hexdigest()
