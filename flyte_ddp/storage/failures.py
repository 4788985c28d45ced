"""The errors of storage, and its timeouts."""

from flyte_ddp.errors import UnreachableError, UserError

CONNECT_TIMEOUT = 10.0  # seconds
READ_TIMEOUT = 30.0  # seconds without a byte


class UnavailableError(Exception):
    """A file could not be read or written; ``transient``: the next try may succeed."""

    def __init__(self, reason: str, *, transient: bool = False) -> None:
        super().__init__(reason)
        self.transient = transient

    def explained(self, message: str) -> UserError:
        """Return the error for the user, whose class says whether another try may help."""
        return UnreachableError(message) if self.transient else UserError(message)


class MissingError(UnavailableError):
    """There is no such file."""


class ForbiddenError(UnavailableError):
    """The server refuses to give the file, and may not even say whether there is one: HTTP 403."""


class ExistsError(UnavailableError):
    """There is a file of that name, which is not replaced."""


class AlteredError(UnavailableError):
    """The file that is there is not the one that was expected: it has another digest, size or tag."""


def refusal(status: int, detail: str) -> UnavailableError:
    """Return the error for an HTTP status."""
    kind = {403: ForbiddenError, 404: MissingError, 410: MissingError}.get(status, UnavailableError)
    return kind(f"HTTP {status} {detail}".strip(), transient=status >= 500 or status in (408, 429))
