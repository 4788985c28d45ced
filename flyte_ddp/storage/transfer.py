"""Shared parts of all kinds of storage: types of files, errors, timeouts, and retries after transient errors."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from flyte_ddp.core.errors import UnreachableError, UserError

CHUNK_BYTES = 1 << 20
CONNECT_TIMEOUT = 10.0  # seconds
READ_TIMEOUT = 30.0  # seconds without a byte
ATTEMPTS = 4
FIRST_DELAY = 1.0  # seconds, doubled after each round
PRIVATE_RANDOM = random.SystemRandom()  # users' models may draw from Python's global generator

Span = tuple[int, int]  # number of the first byte, number of the byte after the last
Result = TypeVar("Result")


class Content(NamedTuple):
    """The content of an open file, or of a span of bytes."""

    size: int | None  # bytes of all chunks, or None if unknown
    chunks: Iterator[bytes]  # may raise UnavailableError
    tag: str = ""  # tag of the whole file, equal to Entry.tag, or "" if the storage sends none with the content


class Entry(NamedTuple):
    """The name, size and tag of a file."""

    name: str  # relative to the listed folder
    size: int  # in bytes, or -1 if unknown
    tag: str  # changes with the content: an ETag or a time of change


class UnavailableError(Exception):
    """A file could not be read or written. ``transient`` is true if a retry may succeed."""

    def __init__(self, reason: str, *, transient: bool = False) -> None:
        super().__init__(reason)
        self.transient = transient

    def to_user_error(self, message: str) -> UserError:
        return UnreachableError(message) if self.transient else UserError(message)


class MissingError(UnavailableError):
    """The file does not exist."""


class ForbiddenError(UnavailableError):
    """The server answered HTTP 403, and may not report whether the file exists."""


class ExistsError(UnavailableError):
    """A file of that name exists, so no file was created."""


class AlteredError(UnavailableError):
    """The file has another digest, size or tag than expected."""


def make_http_status_error(status: int, detail: str) -> UnavailableError:
    """Return the error for an HTTP status. ``detail`` is the reason, for the text.

    The error is a MissingError for 404 and 410, and a ForbiddenError for 403. A status of 408, 429 or 5xx is transient.
    """
    kind = {403: ForbiddenError, 404: MissingError, 410: MissingError}.get(status, UnavailableError)
    return kind(f"HTTP {status} {detail}".strip(), transient=status >= 500 or status in (408, 429))


def parse_etag(header: str | None) -> str:
    return (header or "").removeprefix("W/").strip('"')


def check_received_length(received: int, announced: int | None, *, remote: bool) -> None:
    """Raise UnavailableError unless exactly ``announced`` bytes were received. None accepts any number.

    The error is transient if ``remote`` is True.
    """
    if announced is not None and received != announced:
        what = "truncated after" if received < announced else "too long:"
        raise UnavailableError(f"{what} {received:,} of {announced:,} bytes", transient=remote)


def call_with_retries(
    addresses: str | Sequence[str], action: Callable[[str], Result], note: Callable[[str], object] = lambda _: None
) -> Result:
    """Return ``action(address)``. If the call fails, wait, and try again.

    Makes up to 4 rounds over the addresses of a file, and returns the first result. Pauses have random lengths of up to
    1, 2 and 4 s. After a permanent error, or two AlteredErrors in a row, an address is skipped. A single transient
    AlteredError may be a network fault. Exceptions other than UnavailableError pass through.

    Args:
        addresses: The address of a file, or several addresses of the same file.
        action: Reads or writes the file at an address.
        note: Called with a sentence before each pause.

    Raises:
        UnavailableError: The last error of the address. For several addresses, the text has the last error of each.
    """
    remaining = [addresses] if isinstance(addresses, str) else [*addresses]
    failures: dict[str, UnavailableError] = {}
    for attempt in range(ATTEMPTS):
        for address in tuple(remaining):
            try:
                return action(address)
            except UnavailableError as error:
                altered_again = isinstance(error, AlteredError) and isinstance(failures.get(address), AlteredError)
                failures[address] = error
                if not error.transient or altered_again:
                    remaining.remove(address)
        if not remaining or attempt + 1 == ATTEMPTS:
            break
        # The random part keeps many pods from retrying at the same moment.
        delay = FIRST_DELAY * 2**attempt * PRIVATE_RANDOM.uniform(0.5, 1.0)
        note(f"{remaining[0]}: {failures[remaining[0]]}; next try in {delay:.1f} s")
        time.sleep(delay)
    if isinstance(addresses, str):
        raise failures[addresses] from None
    reasons = "; ".join(f"{address}: {failure}" for address, failure in failures.items())
    raise UnavailableError(reasons, transient=any(failure.transient for failure in failures.values()))
