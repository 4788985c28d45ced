"""The policy: requirements on data before training, and on a model before promotion."""

# No "from __future__ import annotations" here: flytekit derives the console's form from real types.
from dataclasses import dataclass

from flyte_ddp.checks.fields import CheckedFields, setting

LEAVE_OUT, COMPARE = "leave_out", "compare"
SUPERIOR, NOT_WORSE = "superior", "not_worse"
IF_POSSIBLE, REQUIRED, OFF = "if_possible", "required", "off"


@dataclass(frozen=True)
class Policy(CheckedFields, called="policy setting"):
    """Requirements on the data, and on a challenger that is compared with the champion on the same samples."""

    rule: str = setting(
        SUPERIOR,
        "superior: the challenger must be better (McNemar's exact test, sign flips where scores are not 0 or 1); "
        "not_worse: it must not be worse than the champion, nor than the best version ever, by more than `margin`.",
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
        "With not_worse: the largest loss of accuracy, or of another measure, that is accepted; 0.01 is a point. Where "
        "less is better, a share of the champion's squared error or loss.",
        above=0.0,
        below=1.0,
    )
    min_score: float = setting(
        0.0,
        "Main measure on the test split (accuracy, F1, mean IoU: 0 to 1; RMSE) below which no model is promoted; where "
        "less is better, above which. 0: no limit.",
    )
    class_loss: float = setting(
        0.05,
        "Largest loss, measured as `margin` is, on a class, a label or a slice; a larger one is a veto if it is "
        "significant.",
        at_least=0.0,
        at_most=1.0,
    )
    slices: str = setting(
        "",
        "A CSV file (path or URI) with the columns `id` and `slice`: parts of the test split that are checked as "
        "classes are; ids as in the tables of predictions.",
    )
    nll_rise: float = setting(
        0.05,
        "Largest rise of the mean negative log-likelihood (nats); a larger one is a veto if it is significant.",
        at_least=0.0,
    )
    export: str = setting(
        IF_POSSIBLE,
        "Whether a version gets an ONNX with torch's logits on all test samples; required: a model without one is not "
        "promoted.",
        choices=(IF_POSSIBLE, REQUIRED, OFF),
    )
    seen_samples: str = setting(
        LEAVE_OUT,
        "What becomes of test samples that the champion was trained on, which are found by id or content; compare: "
        "both models are judged on them, too.",
        choices=(LEAVE_OUT, COMPARE),
    )
    max_shift: float = setting(
        1.0,
        "Share of the samples by which a column, or the classes, may differ from those that the champion was trained "
        "on. Beyond it nothing is trained.",
        at_least=0.0,
        at_most=1.0,
    )
    max_duplicates: float = setting(
        0.01,
        "Share of test samples whose inputs, such as pixels, may be those of a training sample.",
        at_least=0.0,
        at_most=1.0,
    )
    max_conflicts: float = setting(
        0.001,
        "Share of samples whose inputs may be those of another sample with another label.",
        at_least=0.0,
        at_most=1.0,
    )
