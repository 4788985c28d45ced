"""What reading and listing give."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from flyte_ddp.storage.failures import UnavailableError

CHUNK_BYTES = 1 << 20

Span = tuple[int, int]  # the first byte and the one after the last


class Content(NamedTuple):
    """The content of a file, or of a span of one."""

    size: int | None  # in bytes, where it is known
    chunks: Iterator[bytes]
    tag: str = ""  # of the whole file, as in the list that it is in; where storage gives none with the content, ""


@dataclass(frozen=True)
class Entry:
    """A file below a listed folder: its name relative to that, its size in bytes, and a text that changes with it.

    Where the size is -1 it is not known, and the text is the SHA-256 (hex) of the content.
    """

    name: str
    size: int
    tag: str


def entity_tag(header: str | None) -> str:
    """Return the tag in an ETag header, without what HTTP puts around it."""
    return (header or "").removeprefix("W/").strip('"')


def check_length(received: int, announced: int | None, *, remote: bool) -> None:
    """Raise UnavailableError, transient if ``remote``, for a body that is not as long as was announced."""
    if announced is not None and received != announced:
        what = "truncated after" if received < announced else "goes on to byte"
        raise UnavailableError(f"{what} {received:,} of {announced:,} bytes", transient=remote)
