"""The kinds of failure: a user's mistake, a rank that failed, and a run that was told to stop."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

LONGEST_LIST = 12  # choices printed in full; a longer list would bury the message
LONGEST_MESSAGE = 600  # characters of a rank's message in a panel


def from_here(path: Path) -> str:
    """Return the path as a person would type it: relative if it is below the working directory, else whole."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


class UserError(click.ClickException, ValueError):
    """A mistake that the user can fix: the message names the value, the rule and the fix.

    It is a ``ValueError`` for callers of the library and a ``ClickException`` for ``pyflyte``, which prints any other
    exception as a traceback and this one as a single panel, with exit status 1.
    """


class UnreachableError(UserError):
    """Something on another machine cannot be reached: the address is wrong, or the same run may succeed later."""


class RankError(click.ClickException, RuntimeError):
    """A rank failed, and not by a known mistake of the user; carries what the rank itself reported.

    ``str`` gives all of that. ``pyflyte`` prints a panel of a few lines, which names the file that holds the rest.

    Args:
        message: what failed, in a line or two.
        details: a traceback, or where ranks are.
        recoverable: the machine failed, so the same run may succeed when it is tried again.

    """

    def __init__(self, message: str, *, details: str = "", recoverable: bool = False) -> None:
        super().__init__(message)
        self.details, self.recoverable = details, recoverable
        self.remark = ""  # on the message, of who knows more than the one who raised the error
        self.file: Path | None = None  # with the details
        self.step: int | None = None  # of the newest checkpoint; 0: there is none; None: not known

    def __str__(self) -> str:
        return "\n\n".join(filter(None, (f"{self.message}{self.remark}", self.details)))

    def format_message(self) -> str:
        """Return the text of a panel."""
        message = self.message if len(self.message) <= LONGEST_MESSAGE else f"{self.message[:LONGEST_MESSAGE]} ..."
        lines = [f"{message}{self.remark}"]
        if self.file is not None:
            lines.append(f"all that it said is in {from_here(self.file)}")
        if self.recoverable:
            lines.append(where_it_goes_on(self.step))
        return "\n".join(lines)


class RankLostError(RankError):
    """A rank's process or host was taken away; nothing says that this would happen again."""


class OutOfMemoryError(RankError):
    """The kernel killed a rank because memory ran out, by the kernel's own count."""


class StoppedError(click.ClickException, RuntimeError):
    """The run was told to stop.

    Args:
        signal: the name of what told it.
        step: of the newest checkpoint; 0: there is none; None: not known.

    """

    def __init__(self, signal: str, step: int | None = 0) -> None:
        super().__init__(f"stopped by {signal}; {where_it_goes_on(step)}")
        self.signal, self.step = signal, step

    def __reduce__(self) -> tuple[type[StoppedError], tuple[str, int | None]]:
        return type(self), (self.signal, self.step)


def where_it_goes_on(step: int | None) -> str:
    """Return a sentence on where the same run resumes when it is started again."""
    if step is None:
        return "the same run will go on from its last checkpoint"
    if step == 0:
        return "the same run will restart from scratch, as there is no checkpoint yet"
    return f"the same run will go on after step {step:,}, which is saved"


class CollectiveError(RuntimeError):
    """A collective operation failed: what a rank reports that is not the cause itself."""


class CollectiveTimeoutError(CollectiveError):
    """Another rank did not take part in a collective operation within FLYTE_DDP_TIMEOUT."""


class PeerGoneError(CollectiveError):
    """Another rank has ended."""


@contextmanager
def needing(extra: str) -> Iterator[None]:
    """Turn a failed import in the block, of what one of this package's extras installs, into a ``UserError``."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: {how_to_install(extra)}") from None


def how_to_install(extra: str) -> str:
    """Return the advice for a missing extra of this package."""
    return f"it comes with the extra {extra!r}; in the folder of flyte-ddp: uv pip install -e '.[{extra}]'"


def unknown_name(kind: str, name: str, choices: Iterable[str], page: str = "docs/hyperparameters.md") -> UserError:
    """Return the error for a name that is not in a table, with the nearest choice first and then all of them.

    Args:
        kind: What the name is.
        name: The name.
        choices: Names in the table.
        page: Document that lists them, to which the error refers if they are more than LONGEST_LIST.
    """
    names = sorted(choices)
    near = difflib.get_close_matches(name, names, n=6, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    if len(names) > LONGEST_LIST:
        names = [*(near or names[:6]), f"... ({len(names)} in all, listed in {page})"]
    return UserError(f"unknown {kind} {name!r}: {hint}choose one of {', '.join(names)}")
