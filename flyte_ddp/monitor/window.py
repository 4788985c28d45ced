"""A window of samples that the champion has predicted, and the windows before it in the registry.

Windows are kept by the champion's entry in the log, ``ADDRESS/NAME/monitor/00000003/00000007.json``, each written once.
"""

# No "from __future__ import annotations" here: flytekit derives the type of a task's output from real types.
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Optional

from dataclasses_json import DataClassJsonMixin

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.release.registry import DAMAGED, Entry, Registry
from flyte_ddp.text.formatting import join_first

FEWEST = 50  # samples of a verdict
RECENT = 50  # windows that are read
LOOKED_AT, NEEDED = 3, 2  # an alarm needs so many windows with a change among so many


@dataclass(frozen=True)
class ColumnChange(DataClassJsonMixin):
    """How far a column of the window is from the reference's."""

    column: str
    p: float  # corrected for all columns
    effect: float  # 0 to 1
    moved: bool


@dataclass(frozen=True)
class Window(DataClassJsonMixin):
    """What was found in a window of samples."""

    version: str
    address: str
    time: str  # ISO 8601, UTC
    by: str  # a Flyte execution, or user@host
    digest: str  # of all samples' inputs
    samples: int
    bad: int  # samples that could not be decoded or predicted; not among ``samples``
    columns: list[ColumnChange]  # empty: too few samples for a verdict
    measure: str  # the main one
    held_out: float  # its value on the test split of the champion's release
    truths: int = 0  # samples whose truth is known
    score: Optional[float] = None  # noqa: UP045  # their measure; None: too few, or not defined
    low: Optional[float] = None  # noqa: UP045  # ends of its 95 % interval; None: there is none
    high: Optional[float] = None  # noqa: UP045
    number: int = 0  # from 1, of this champion
    alarm: bool = False

    @property
    def moved(self) -> list[ColumnChange]:
        """The columns that moved, the largest effect first."""
        return sorted((each for each in self.columns if each.moved), key=lambda each: -each.effect)

    def __repr__(self) -> str:
        """Return what was found in a line, as pyflyte prints it: all columns would be thousands of characters."""
        return f"<window {self.number}, {self.describe()}>"

    def describe(self) -> str:
        if not self.columns:
            return f"no verdict: {self.samples:,} samples are too few, {FEWEST} are needed"
        if not self.moved:
            return "no alarm: no column has moved"
        waits = f"no alarm yet, which {NEEDED} of {LOOKED_AT} windows make: "
        moved = join_first(f"{each.column} ({each.effect:.2f})" for each in self.moved)
        return f"{'alarm: ' if self.alarm else waits}{moved} moved"


def is_alarm(windows: Sequence[Window]) -> bool:
    """Return whether columns have moved in the last window, and in another of the last three that have a verdict."""
    judged = [window for window in windows if window.columns][-LOOKED_AT:]
    return bool(windows[-1].moved) and sum(bool(window.moved) for window in judged) >= NEEDED


def read_windows(registry: Registry, entry: Entry) -> list[Window]:
    """Return the last 50 windows of a champion, oldest first; UserError for a damaged record."""
    folder, windows = registry.at("monitor", f"{entry.number:08}"), list[Window]()
    for name in registry.list_files(folder)[-RECENT:]:
        address = storage.join(folder, name)
        try:
            windows.append(Window.from_json(registry.read_file(address, storage.read_file) or b""))
        except DAMAGED:
            raise UserError(f"{address}: is damaged; restore or delete it") from None
    return windows


def record_window(registry: Registry, entry: Entry, window: Window, *, once: bool = False) -> Window:
    """Write a window with its number, and whether it is an alarm, into the registry; return it.

    If the address had the same samples before, or ``once`` the same author, returns that record, with what the truth
    says now, and writes nothing.
    """
    while True:
        before = read_windows(registry, entry)
        for each in before:
            same = each.digest == window.digest or (once and each.by == window.by)
            if same and each.address == window.address:
                return replace(each, truths=window.truths, score=window.score, low=window.low, high=window.high)
        number = before[-1].number + 1 if before else 1
        numbered = replace(window, number=number, alarm=is_alarm([*before, window]))
        address = registry.at("monitor", f"{entry.number:08}", f"{number:08}.json")
        if registry.create_file(address, numbered.to_json(indent=1).encode() + b"\n"):
            return numbered
