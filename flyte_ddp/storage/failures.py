"""The errors of storage, and its timeouts."""

from flyte_ddp.errors import UnreachableError, UserError

CONNECT_TIMEOUT = 10.0  # seconds
READ_TIMEOUT = 30.0  # seconds without a byte


class UnavailableError(Exception):
    """A file could not be read or written; ``transient`` says whether a retry may succeed."""

    def __init__(self, reason: str, *, transient: bool = False) -> None:
        super().__init__(reason)
        self.transient = transient

    def to_user_error(self, message: str) -> UserError:
        return UnreachableError(message) if self.transient else UserError(message)


class MissingError(UnavailableError):
    """There is no such file."""


class ForbiddenError(UnavailableError):
    """The server answers HTTP 403: it refuses to give the file, and may not say whether the file exists."""


class ExistsError(UnavailableError):
    """A file of that name exists, so it was not created."""


class AlteredError(UnavailableError):
    """The file has another digest, size or tag than expected."""


def http_status_error(status: int, detail: str) -> UnavailableError:
    """Return the error for an HTTP status and its reason; it is transient for 408, 429 and 5xx."""
    kind = {403: ForbiddenError, 404: MissingError, 410: MissingError}.get(status, UnavailableError)
    return kind(f"HTTP {status} {detail}".strip(), transient=status >= 500 or status in (408, 429))
