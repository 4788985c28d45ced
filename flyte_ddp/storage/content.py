"""The types that reading and listing files return."""

from collections.abc import Iterator
from typing import NamedTuple

from flyte_ddp.storage.failures import UnavailableError

CHUNK_BYTES = 1 << 20

Span = tuple[int, int]  # number of the first byte, number of the byte after the last


class Content(NamedTuple):
    """The content of an open file, or of a span of bytes of it."""

    size: int | None  # bytes that the chunks have together; None if the server does not say
    chunks: Iterator[bytes]  # may raise UnavailableError
    tag: str = ""  # tag of the whole file, equal to that of its Entry; "" if the storage sends none with the content


class Entry(NamedTuple):
    """The name, size and tag of a file."""

    name: str  # relative to the listed folder
    size: int  # in bytes; -1 if unknown
    tag: str  # changes with the content: an ETag or a time of change


def parse_etag(header: str | None) -> str:
    return (header or "").removeprefix("W/").strip('"')


def check_length(received: int, announced: int | None, *, remote: bool) -> None:
    """Raise UnavailableError unless ``announced`` bytes (None: any number) were received; transient if ``remote``."""
    if announced is not None and received != announced:
        what = "truncated after" if received < announced else "goes on to byte"
        raise UnavailableError(f"{what} {received:,} of {announced:,} bytes", transient=remote)
