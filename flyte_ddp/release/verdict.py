"""The verdict of a judgement with its checks, and the outcome of a release."""

# No "from __future__ import annotations" here: flytekit derives the type of a task's output from real types.
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

from dataclasses_json import DataClassJsonMixin

from flyte_ddp.core.text.formatting import format_count, format_measure

LISTED = 5  # changes of the data that an outcome lists
PROMOTED, KEPT, NO_COMPARISON = "promote", "keep", "no_comparison"


@dataclass(frozen=True)
class Check(DataClassJsonMixin):
    """One check of a judgement."""

    name: str
    passed: bool
    value: Optional[float] = None  # noqa: UP045  # flytekit's form; None: no number, or an infinite one
    limit: Optional[float] = None  # noqa: UP045  # of the value
    shown: str = ""  # the value in words
    rule: str = ""  # the limit in words; empty: no limit, the value is only shown
    reason: str = ""  # why the check failed; for a passed check a note, or empty


@dataclass
class Verdict(DataClassJsonMixin):
    """The judgement of a challenger against the champion."""

    decision: str = ""  # promote, keep or no_comparison; empty until it is made
    reason: str = ""
    challenger: str = ""  # the SHA-256 of its weights
    champion: str = ""  # the SHA-256 of its weights; empty if there was none
    best: str = ""  # the version with the best measure so far, this challenger included
    log_number: int = 0  # of the log's last entry at the judgement; 0: the log was empty
    test_digest: str = ""  # of the test split
    samples: int = 0  # of the test split, without undecodable ones; 0: not evaluated
    measure: str = ""  # the objective's main measure: accuracy, f1, rmse, miou, loss, or user-defined
    challenger_score: float = 0.0  # its main measure; 0 if not evaluated, or (but for classification) not finite
    champion_score: float = 0.0  # the champion's main measure; 0 if there was none, or it was not evaluated
    look: int = 0  # number of the judgement on this test split, from 1; 0: not counted, and cannot promote
    alpha: float = 0.0  # significance level of this judgement; 0: nothing was tested
    time: str = ""  # ISO 8601, UTC
    seen: int = 0  # test samples that were skipped, because the champion was trained on them
    champion_at_release: Optional[float] = None  # noqa: UP045  # its main measure then; None: not known, or another one
    constant_score: Optional[float] = None  # noqa: UP045  # the main measure of the best constant answer; None: not known
    changes: list[str] = field(default_factory=list)  # how the data differ from the champion's training data
    checks: list[Check] = field(default_factory=list)

    @property
    def promotes(self) -> bool:
        return self.decision == PROMOTED

    def has_score_of(self, measure: str) -> bool:
        return self.measure == measure and self.samples > 0

    @property
    def outcome(self) -> str:
        """A text with the reason, the champion's scores at its release and today, and the changes of the data."""
        parts = [self.reason]
        if self.champion_at_release is not None and self.decision != NO_COMPARISON:
            now, then = (format_measure(self.measure, each) for each in (self.champion_score, self.champion_at_release))
            version = f"the champion {self.champion[:12]}"
            parts.append(f"{version} has {now} on these samples and had {then} at its release")
        if self.seen:
            parts.append(f"{format_count(self.seen, 'test sample')} of its training excluded")
        more = f"{len(self.changes) - LISTED} more changes of the data" if len(self.changes) > LISTED else ""
        text = "; ".join([*parts, *self.changes[:LISTED], *([more] if more else [])])
        return text.replace("\N{NO-BREAK SPACE}", " ")  # logs and tuples show other characters as escapes

    def __repr__(self) -> str:
        """Return the decision in a line for the output of pyflyte. All checks would be thousands of characters."""
        return f"<verdict, {self.describe() if self.decision else 'not made yet'}>"

    def describe(self) -> str:
        """Return the decision and the outcome as text. The decision must have been made."""
        promoted = "to be promoted" if self.look else "would be promoted"
        kept = "the champion is kept" if self.champion else "there is no champion yet"
        decision = {PROMOTED: promoted, KEPT: kept, NO_COMPARISON: "no comparison"}
        return f"{decision[self.decision]}: {self.outcome}"


class Released(NamedTuple):
    """The versions of model and champion (SHA-256 of the weights), and the decision with its reason."""

    version: str
    champion: str  # empty if there is none
    outcome: str
