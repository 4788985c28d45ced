"""The two kinds of failure: a user's mistake, and a rank that failed."""

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


class RankError(RuntimeError):
    """A rank failed through no mistake of the user's that we know of; carries what the rank itself reported."""


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
