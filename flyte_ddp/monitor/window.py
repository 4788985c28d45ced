"""A window of samples that the champion has predicted, and the rule for alarms."""

# No "from __future__ import annotations" here: flytekit derives the type of a task's output from real types.
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from dataclasses_json import DataClassJsonMixin

from flyte_ddp.core.text.formatting import format_measure, join_first, name_measure

FEWEST = 50  # least samples of a verdict
LOOKED_AT, NEEDED = 3, 2  # an alarm needs 2 of 3 windows with moved columns, or with worse scores


@dataclass(frozen=True)
class ColumnChange(DataClassJsonMixin):
    """The distance of a column of the window from the same column of the reference."""

    column: str
    p: float  # corrected for all columns
    effect: float  # 0 to 1
    moved: bool
    untested: str = ""  # why the tests cannot find a change; empty: they can


@dataclass(frozen=True, kw_only=True)
class Score(DataClassJsonMixin):
    """The main measure of the samples whose truth is known."""

    truths: int = 0  # samples whose truth is known
    score: Optional[float] = None  # noqa: UP045  # the measure of these samples; None: too few, or undefined
    low: Optional[float] = None  # noqa: UP045  # ends of the score's 95 % interval; None: no interval
    high: Optional[float] = None  # noqa: UP045
    worse_p: Optional[float] = None  # noqa: UP045  # of a score worse than held out; None: no test
    worse: bool = False  # whether the score is worse than the held-out one beyond chance


@dataclass(frozen=True)
class Window(Score):
    """The results of a window of samples."""

    version: str
    address: str
    time: str  # ISO 8601, UTC
    by: str  # a Flyte execution, or user@host
    digest: str  # of all samples' inputs
    samples: int
    bad: int  # samples that could not be decoded or predicted; not among ``samples``
    columns: list[ColumnChange]  # empty: too few samples for a verdict
    measure: str  # the name of the main measure
    held_out: float  # the main measure on the test split of the champion's release
    number: int = 0  # from 1, of this champion
    alarm: bool = False

    @property
    def moved(self) -> list[ColumnChange]:
        """The columns that moved, the largest effect first."""
        return sorted((each for each in self.columns if each.moved), key=lambda each: -each.effect)

    def __repr__(self) -> str:
        """Return the verdict in a line for the output of pyflyte. All columns would be thousands of characters."""
        return f"<window {self.number}, {self.describe()}>"

    def describe(self) -> str:
        """Return the verdict as text: an alarm, changes without an alarm, no change, or too few samples."""
        if not self.columns:
            return f"no verdict: {self.samples:,} samples are too few; at least {FEWEST} are needed"
        changes = []
        if self.moved:
            changes.append(f"{join_first(f'{each.column} ({each.effect:.2f})' for each in self.moved)} moved")
        if self.worse:
            now, before = (format_measure(self.measure, value) for value in (self.score, self.held_out))
            changes.append(f"{name_measure(self.measure)} is {now}, and was {before} on the held-out samples")
        if changes:
            waits = f"no alarm yet (an alarm needs {NEEDED} of {LOOKED_AT} windows): "
            return f"{'alarm: ' if self.alarm else waits}{'; '.join(changes)}"
        untested = [each.column for each in self.columns if each.untested]
        return "no alarm: no column has moved" + (f"; cannot be compared: {join_first(untested)}" if untested else "")


def is_alarm(windows: Sequence[Window]) -> bool:
    """Return whether the last of the ``windows``, oldest first, is an alarm.

    A window with moved columns is an alarm if another of the last three windows has moved columns, too. The same rule
    holds for worse scores. The three windows are the last windows with a verdict on columns, or on the score.
    """
    last = windows[-1]
    moved = [bool(window.moved) for window in windows if window.columns][-LOOKED_AT:]
    worse = [window.worse for window in windows if window.worse_p is not None][-LOOKED_AT:]
    return (bool(last.moved) and sum(moved) >= NEEDED) or (last.worse and sum(worse) >= NEEDED)
