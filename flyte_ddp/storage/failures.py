"""The errors of reading, and its timeouts."""

from __future__ import annotations

from flyte_ddp.errors import UnreachableError, UserError

CONNECT_TIMEOUT = 10.0  # seconds
READ_TIMEOUT = 30.0  # seconds without a byte
CONNECTIONS = 64  # that one process keeps open to a server


class UnavailableError(Exception):
    """A file could not be had; ``transient``: it may be there on the next try."""

    def __init__(self, reason: str, *, transient: bool = False) -> None:
        super().__init__(reason)
        self.transient = transient

    def explained(self, message: str) -> UserError:
        """The error for the user, which says whether another try may help."""
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
    """The error for an HTTP status."""
    reason = f"HTTP {status} {detail}".strip()
    if status == 403:
        return ForbiddenError(reason)
    if status in (404, 410):
        return MissingError(reason)
    return UnavailableError(reason, transient=status >= 500 or status in (408, 429))


def root_cause(error: BaseException) -> str:
    """The innermost error's message: the errors that libraries wrap around it are long and name their objects."""
    if "ConnectTimeout" in type(error).__name__:
        return f"no connection within {CONNECT_TIMEOUT:g} s"
    if "ReadTimeout" in type(error).__name__:
        return f"no answer within {READ_TIMEOUT:g} s"
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return getattr(error, "strerror", None) or str(error)
