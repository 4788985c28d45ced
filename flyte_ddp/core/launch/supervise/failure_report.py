"""Reports of a rank's failure, and the failure's cause. Imports no torch."""

import sys
import time
import traceback
from dataclasses import dataclass
from enum import Enum

from flyte_ddp.core.errors import CollectiveError, CollectiveTimeoutError, MachineError, UnreachableError, UserError

GLOO, GLOO_TIMEOUT = "/gloo/", "Timed out waiting"  # parts of the texts of gloo's errors: a source folder, and words
TORCH_TIMEOUTS = ("timed out", "timeout")  # parts of the texts of errors of NCCL and of torch's stores
# Parts of the text of torch's error for a DataLoader process that a signal has ended.
KILLED_LOADER = ("DataLoader worker (pid", "is killed by signal")
MAX_CHARACTERS = 20_000  # of an error's message, and of its traceback


class Cause(Enum):
    """The cause of a rank's failure."""

    MISTAKE = "a UserError"
    UNREACHABLE = "an UnreachableError"
    MACHINE = "a fault of the machine"
    CODE = "any other exception of the rank's code"
    TIMEOUT = "a collective operation that took too long"
    PEER = "another rank, which failed first"


ROOT_CAUSES = (Cause.MISTAKE, Cause.UNREACHABLE, Cause.MACHINE, Cause.CODE)
CONSEQUENCES = (Cause.TIMEOUT, Cause.PEER)  # they leave the rank's state intact


@dataclass(frozen=True)
class FailureReport:
    """A rank's exception, as the rank reports it to the launcher."""

    cause: Cause
    type: str  # the name of the exception's class
    message: str
    traceback: str
    time: float  # by time.monotonic() of the rank's host, at the launcher by the clock of the launcher's host

    def format(self, rank: int) -> str:
        return f"rank {rank}: {self.type}: {self.message}"


def make_failure_report(error: BaseException) -> FailureReport:
    """Return the report of an exception for the launcher.

    The report of a CollectiveError has the class and text of its cause.
    """
    raised = error.__cause__ if type(error) is CollectiveError and error.__cause__ else error  # torch's error
    trace = shorten_text("".join(traceback.format_exception(error)))
    message = exception_message(raised)
    return FailureReport(classify_error(error), type(raised).__name__, message, trace, time.monotonic())


def exception_message(error: BaseException) -> str:
    """Return an exception's text, shortened to 20,000 characters.

    If ``__str__`` raises, returns a placeholder.
    """
    return shorten_text(str(traceback.TracebackException.from_exception(error)))


def shorten_text(text: str) -> str:
    half = MAX_CHARACTERS // 2
    return text if len(text) <= MAX_CHARACTERS else f"{text[:half]}\n...\n{text[-half:]}"


def classify_error(error: BaseException) -> Cause:
    """Return the cause of a rank's failure, by the types of the exception and of the exceptions that caused it.

    The text counts only for a RuntimeError of torch. If a signal has ended a process of torch's DataLoader, the cause
    is the machine.
    """
    kinds = ((UnreachableError, Cause.UNREACHABLE), (UserError, Cause.MISTAKE), (MachineError, Cause.MACHINE))
    for kind, cause in kinds:
        if isinstance(error, kind):
            return cause
    # NCCL and torch's stores raise DistError. Without torch, CollectiveError replaces it.
    of_torch = getattr(sys.modules.get("torch.distributed"), "DistError", CollectiveError)
    origin: BaseException | None = error
    seen: set[int] = set()  # `raise error from error` makes a loop of causes
    while origin is not None and id(origin) not in seen:
        seen.add(id(origin))
        if isinstance(origin, CollectiveTimeoutError):
            return Cause.TIMEOUT
        if isinstance(origin, CollectiveError):
            return Cause.PEER
        if isinstance(origin, of_torch):
            timed_out = any(words in str(origin).lower() for words in TORCH_TIMEOUTS)
            return Cause.TIMEOUT if timed_out else Cause.PEER
        if type(origin) is RuntimeError and (found := find_cause_in_text(str(origin))) is not None:
            return found
        origin = origin.__cause__
    return Cause.CODE


def find_cause_in_text(message: str) -> Cause | None:
    """Return the cause of a failure by the text of torch's RuntimeError, or None for any other text."""
    if GLOO in message:
        return Cause.TIMEOUT if GLOO_TIMEOUT in message else Cause.PEER
    return Cause.MACHINE if all(words in message for words in KILLED_LOADER) else None
