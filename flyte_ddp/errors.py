"""The kinds of failure: a user's mistake, a rank that failed, and a run that was told to stop."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import click

LONGEST_LIST = 12  # choices printed in full; a longer list would bury the message


class UserError(click.ClickException, ValueError):
    """A mistake that the user can mend: the message names the value, the rule and the fix.

    It is a ``ValueError`` for callers of the library and a ``ClickException`` for ``pyflyte``, which prints any other
    exception as a traceback and this one as a single panel, with exit status 1.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)

    def __reduce__(self) -> tuple[type[UserError], tuple[str]]:
        return type(self), (self.message,)


class UnreachableError(UserError):
    """Something on another machine cannot be had now: the address is wrong, or the same run may succeed later on."""


class RankError(RuntimeError):
    """A rank failed through no mistake of the user's that we know of; carries what the rank itself reported.

    ``recoverable``: the same run may well succeed when it is tried again, because what failed was the machine.
    """

    def __init__(self, message: str, *, recoverable: bool = False) -> None:
        super().__init__(message)
        self.recoverable = recoverable


class StoppedError(click.ClickException, RuntimeError):
    """The run was told to stop.

    Args:
        signal: the name of what told it.
        step: of the newest checkpoint, 0 without any, None if that is not known.

    """

    def __init__(self, signal: str, step: int | None = 0) -> None:
        super().__init__(f"stopped by {signal}; {where_it_goes_on(step)}")
        self.signal, self.step = signal, step

    def __reduce__(self) -> tuple[type[StoppedError], tuple[str, int | None]]:
        return type(self), (self.signal, self.step)


def where_it_goes_on(step: int | None) -> str:
    """What the same run will do when it is started again."""
    if step is None:
        return "the same run will go on from its last checkpoint"
    if step == 0:
        return "the same run will begin anew, as there is no checkpoint yet"
    return f"the same run will go on after step {step:,}, which is saved"


class CollectiveTimeoutError(RuntimeError):
    """Another rank did not come in time to where all ranks meet."""


class PeerGoneError(RuntimeError):
    """Another rank has ended: what a rank reports that is not itself the cause."""


def unknown_name(kind: str, name: str, choices: Iterable[str]) -> UserError:
    """The error for a name that is not in a table, with the nearest choice first and then all of them."""
    names = sorted(choices)
    near = difflib.get_close_matches(name, names, n=6, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    if len(names) > LONGEST_LIST:
        shown = [*(near or names[:6]), f"... ({len(names)} in all, listed in README.md)"]
    else:
        shown = names
    return UserError(f"unknown {kind} {name!r}: {hint}choose one of {', '.join(shown)}")
