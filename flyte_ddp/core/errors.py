"""Exceptions of this library, texts that several errors share, and notices on stderr."""

from __future__ import annotations

import difflib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import click

LONGEST_LIST = 12  # choices printed in full; a longer list would bury the message
LONGEST_MESSAGE = 600  # characters of a rank's message in a panel


class UserError(click.ClickException, ValueError):
    """A mistake that the user can fix.

    The message names the value, the rule and the fix. Because this is a ``ClickException``, ``pyflyte`` prints a single
    panel without a traceback, and exits with status 1. ``tasks/command_line.py`` turns some errors of flytekit into
    UserErrors.
    """


class UnreachableError(UserError):
    """Something on another machine cannot be reached.

    Either the address is wrong, or a retry may succeed later.
    """


class BusyError(UserError):
    """Another process is writing into the same run folder."""


class RankError(click.ClickException, RuntimeError):
    """A rank failed for another reason than a known mistake of the user.

    ``message`` describes the failure in a line or two. ``details`` is a traceback, or the stacks of ranks that hang. If
    ``recoverable`` is True, the machine failed, and a retry may succeed. In ``pyflyte``,
    ``tasks/command_line.py`` shows the lines of :meth:`format_message` in a panel, without the details.
    """

    def __init__(self, message: str, *, details: str = "", recoverable: bool = False) -> None:
        super().__init__(message)
        self.details, self.recoverable = details, recoverable
        self.file: Path | None = None  # the file that holds the details
        self.step: int | None = None  # step of the newest checkpoint (0: no checkpoint, None: unknown)
        self.noticed = time.time()  # when the failure was noticed, in seconds since 1970

    def __str__(self) -> str:
        return "\n\n".join(filter(None, (self.message, self.details)))

    def with_reason(self, reason: str) -> Self:
        """Return a copy of the error with ``reason`` at the end of its message."""
        longer = type(self)(f"{self.message}{reason}", details=self.details, recoverable=self.recoverable)
        longer.step, longer.noticed = self.step, self.noticed
        return longer

    def format_message(self, what: str = "run", *, is_resumable: bool = True) -> str:
        """Return the text of click's panel: the message, the file with the details, and the step to resume from.

        ``what`` is the word for the run in the text. ``is_resumable`` is whether the same ``what`` would resume.
        """
        message = self.message if len(self.message) <= LONGEST_MESSAGE else f"{self.message[:LONGEST_MESSAGE]} ..."
        lines = [message]
        if self.file is not None:
            lines.append(f"the full error is in {shorten_path(self.file)}")
        if self.recoverable:
            lines.append(describe_resumption(self.step, what, is_resumable=is_resumable))
        return "\n".join(lines)


class RankLostError(RankError):
    """A rank's process or host disappeared. A retry may succeed."""


class OutOfMemoryError(RankError):
    """A rank was killed, and the kernel's count of out-of-memory kills grew."""


class StoppedError(click.ClickException, RuntimeError):
    """A signal stopped the run.

    ``signal`` is the name of the signal. ``step`` is the newest checkpoint's step (0: no checkpoint, None: unknown).
    """

    def __init__(self, signal: str, step: int | None = 0) -> None:
        super().__init__(f"stopped by {signal}")
        self.signal, self.step = signal, step

    def __str__(self) -> str:
        return self.format_message()

    def format_message(self, what: str = "run", *, is_resumable: bool = True) -> str:
        return f"{self.message}; {describe_resumption(self.step, what, is_resumable=is_resumable)}"

    def __reduce__(self) -> tuple[type[StoppedError], tuple[str, int | None]]:
        return type(self), (self.signal, self.step)


class UserCodeError(RuntimeError):
    """A user-defined function failed on a sample.

    The text names the function, the sample and the error.
    """


class MachineError(RuntimeError):
    """A part of the machine that a rank needs failed, such as a GPU. A retry may succeed."""


class CollectiveError(RuntimeError):
    """A collective operation failed because of another rank.

    This rank's error is not the root cause.
    """


class CollectiveTimeoutError(CollectiveError):
    """Another rank did not join a collective operation within FLYTE_DDP_TIMEOUT."""


class PeerGoneError(CollectiveError):
    """A collective operation failed because another rank has exited."""


def describe_resumption(step: int | None, what: str = "run", *, is_resumable: bool = True) -> str:
    """Return a sentence that names the step from which the next start resumes.

    ``step`` is 0 without a checkpoint, and None if unknown. ``what`` is the word in the sentence, such as "run".
    ``is_resumable`` is whether the same ``what`` would resume, and not start another run.
    """
    if not is_resumable:
        return f"the same {what} will train anew"
    if step is None:
        return f"the same {what} will go on from its last checkpoint"
    if step == 0:
        return f"the same {what} will restart from scratch, as no checkpoint exists yet"
    return f"the same {what} will go on after step {step:,}, which is saved"


def print_to_stderr(text: str) -> None:
    with suppress(OSError, ValueError):  # the stream may be closed
        print(text, file=sys.stderr, flush=True)


def shorten_path(path: Path) -> str:
    """Return a path below the working directory as a relative path, and any other path unchanged."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


@contextmanager
def require_extra(extra: str) -> Iterator[None]:
    """Turn a ModuleNotFoundError of the block into a UserError that shows how to install ``extra``."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: {install_hint(extra)}") from None


def install_hint(extra: str) -> str:
    return f"it comes with the extra {extra!r}; in the folder of flyte-ddp: uv pip install -e '.[{extra}]'"


def unknown_name_error(
    kind: str, name: str, choices: Iterable[str], page: str = "docs/hyperparameters.md"
) -> UserError:
    """Return the UserError for an unknown name. The error suggests the nearest choice.

    If there are many choices, the error shows only some, and refers to ``page``.
    """
    names = sorted(choices)
    near = [name.lower()] if name.lower() in names else difflib.get_close_matches(name, names, n=6, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    if len(names) > LONGEST_LIST:
        names = [*(near or names[:6]), f"... ({len(names)} in all, listed in {page})"]
    return UserError(f"unknown {kind} {name!r}: {hint}choose one of {', '.join(names)}")
