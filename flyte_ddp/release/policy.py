"""What data may be trained on, and when a model takes the champion's place: one flat, frozen, validated dataclass."""

# No "from __future__ import annotations" here: flytekit derives the console's form from real types.
from dataclasses import dataclass

from flyte_ddp.checked_fields import CheckedFields, setting

SUPERIOR, NOT_WORSE = "superior", "not_worse"
IF_POSSIBLE, REQUIRED, OFF = "if_possible", "required", "off"


@dataclass(frozen=True)
class Policy(CheckedFields, called="policy setting"):
    """What data must be like, and what a challenger must show. Tests are on the same samples as the champion's.

    Raises:
        UserError: an unknown field, a value of the wrong type, or a value out of range.

    """

    rule: str = setting(
        SUPERIOR,
        "superior: the challenger must be better (McNemar's exact test); not_worse: it must not be worse than the "
        "champion, nor than the best version ever, by more than `margin`.",
        choices=(SUPERIOR, NOT_WORSE),
    )
    alpha: float = setting(
        0.05,
        "How often, over all judgements on one test split together, superior may promote a model that is no better, or "
        "not_worse one that is worse by `margin`; and how often each kind of veto may keep one of equal quality back.",
        above=0.0,
        below=0.5,
    )
    margin: float = setting(
        0.01, "With not_worse: by how much less accuracy is accepted; 0.01 is a point.", above=0.0, below=1.0
    )
    min_accuracy: float = setting(0.0, "Test accuracy below which no model is promoted.", at_least=0.0, at_most=1.0)
    class_loss: float = setting(
        0.05,
        "By how much accuracy on a class, or on a slice, may go down; more is a veto where it is significant.",
        at_least=0.0,
        at_most=1.0,
    )
    slices: str = setting(
        "",
        "A CSV file (path or URI) with the columns `id` and `slice`: parts of the test split that are looked at as "
        "classes are; ids as in the tables of predictions.",
    )
    nll_rise: float = setting(
        0.05,
        "By how much the mean negative log-likelihood (nats) may go up; more is a veto where it is significant.",
        at_least=0.0,
    )
    brier_rise: float = setting(
        0.02, "By how much the Brier score (0 to 2) may go up; more is a veto where it is significant.", at_least=0.0
    )
    size_ratio: float = setting(2.0, "Largest size of the weights, as a multiple of the champion's.", above=0.0)
    latency_ratio: float = setting(
        2.0, "Longest time for a batch, as a multiple of the champion's, in turns on the same machine.", above=0.0
    )
    export: str = setting(
        IF_POSSIBLE,
        "Whether a version gets an ONNX that answers all test samples as torch does: required keeps a model back that "
        "has none.",
        choices=(IF_POSSIBLE, REQUIRED, OFF),
    )
    max_duplicates: float = setting(
        0.01, "Share of test samples that may have the pixels of a training sample.", at_least=0.0, at_most=1.0
    )
    max_conflicts: float = setting(
        0.001,
        "Share of samples that may have the pixels of another sample with another label.",
        at_least=0.0,
        at_most=1.0,
    )
