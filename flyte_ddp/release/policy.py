"""The policy: requirements on data before training, and on a model before promotion."""

# No "from __future__ import annotations" here: flytekit derives the console's form from real types.
from dataclasses import dataclass

from flyte_ddp.core.checks.fields import CheckedFields, setting

LEAVE_OUT, COMPARE = "leave_out", "compare"
SUPERIOR, NOT_WORSE = "superior", "not_worse"
IF_POSSIBLE, REQUIRED, OFF = "if_possible", "required", "off"


@dataclass(frozen=True)
class Policy(CheckedFields, called="policy setting"):
    """Requirements on the data, and on a challenger that is compared with the champion on the same samples."""

    rule: str = setting(
        SUPERIOR,
        "superior: the challenger must be better (McNemar's exact test, or sign flips if scores are not 0 or 1); "
        "not_worse: the challenger must not be worse than the champion or the best version ever by more than `margin`.",
        choices=(SUPERIOR, NOT_WORSE),
    )
    alpha: float = setting(
        0.05,
        "Significance level of all judgements on one test split together: the probability of promoting a model that is "
        "not better (superior) or is worse by `margin` (not_worse), and of each kind of veto rejecting an equally good "
        "model.",
        above=0.0,
        below=0.5,
    )
    margin: float = setting(
        0.01,
        "With not_worse: the largest loss of accuracy, or of another measure, that is accepted; 0.01 is a point. If "
        "less is better, a share of the champion's squared error or loss.",
        above=0.0,
        below=1.0,
    )
    min_score: float = setting(
        0.0,
        "Lowest main measure on the test split with which a model is promoted (accuracy, F1, mean IoU: 0 to 1), or the "
        "highest if less is better (RMSE). 0: no limit.",
    )
    class_loss: float = setting(
        0.05,
        "Largest loss on a class, a label or a slice, in the unit of `margin`; a larger, significant loss is a veto.",
        at_least=0.0,
        at_most=1.0,
    )
    slices: str = setting(
        "",
        "A CSV file (path or URI) with the columns `id` and `slice`: parts of the test split that are checked like "
        "classes; ids as in the tables of predictions.",
    )
    nll_rise: float = setting(
        0.05,
        "Largest rise of the mean negative log-likelihood (nats); a larger, significant rise is a veto.",
        at_least=0.0,
    )
    export: str = setting(
        IF_POSSIBLE,
        "Whether a version gets an ONNX model, verified against torch on all test samples; required: no promotion "
        "without an ONNX model.",
        choices=(IF_POSSIBLE, REQUIRED, OFF),
    )
    seen_samples: str = setting(
        LEAVE_OUT,
        "Test samples that the champion was trained on (found by id or content); leave_out: excluded from the "
        "comparison; compare: both models are judged on them, too.",
        choices=(LEAVE_OUT, COMPARE),
    )
    max_shift: float = setting(
        1.0,
        "Largest share of the samples by which a column, or the classes, may differ from the champion's training data. "
        "Beyond this share, training does not start.",
        at_least=0.0,
        at_most=1.0,
    )
    max_duplicates: float = setting(
        0.01,
        "Largest share of test samples whose inputs, such as pixels, equal those of a training sample.",
        at_least=0.0,
        at_most=1.0,
    )
    max_conflicts: float = setting(
        0.001,
        "Largest share of samples whose inputs equal those of a sample with another label.",
        at_least=0.0,
        at_most=1.0,
    )
