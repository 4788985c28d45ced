"""Sections of a report about two classes: the threshold, the samples with the highest scores, and the calibration."""

import numpy as np

from flyte_ddp.catalog import parse_threshold
from flyte_ddp.core.objectives.binary_labels import Bools, Floats, count_at_or_above
from flyte_ddp.core.objectives.objective import Columns, Facts
from flyte_ddp.core.text.formatting import format_percent, format_value
from flyte_ddp.core.text.sections import Curve, Section, Table

TOP_PERCENT = 1, 5, 10  # of the samples, those with the highest scores
BINS = 10  # of equal width, as scikit-learn's calibration_curve has them
HALF = 0.5
RULES = {
    "": "The hyperparameter threshold changes this limit.",
    "f1": "This threshold has the highest F1 on the validation split.",
    "recall": "On the validation split this threshold has the highest precision with a recall of at least {:g}.",
    "cost": "On the validation split this threshold has the lowest cost: a miss costs as much as {:g} false alarms.",
    "fixed": "This threshold is set by the hyperparameter threshold.",
}


def list_second_class_sections(facts: Facts, columns: Columns) -> list[Section]:
    """Return sections of the report about the second of two classes: threshold, highest scores and calibration.

    ``columns`` are ``truth``, ``probability`` and ``prediction``. If all samples are of one class, returns only the
    section on the threshold.
    """
    truth, scores, name = columns["truth"].numpy() == 1, columns["probability"].numpy(), facts.classes[1]
    decision = tabulate_threshold_decisions(facts, truth, scores, columns["prediction"].numpy() == 1)
    if not truth.any() or truth.all():
        return [decision]
    return [decision, tabulate_highest_scores(name, truth, scores), make_calibration_curve(name, truth, scores)]


def tabulate_threshold_decisions(facts: Facts, truth: Bools, scores: Floats, used: Bools) -> Table:
    """Return a table of hits, false alarms and misses, for the fitted threshold and for a threshold of 0.5.

    ``used`` [N] is True where the model predicts the second class. Without a fitted threshold, the table has one row.
    """
    name, fitted = facts.classes[1], facts.threshold
    rule, number = parse_threshold(facts.threshold_rule) if facts.threshold_rule else ("", 0.0)
    limit = f"above {HALF}" if fitted is None else f"of at least {format_value(fitted)}"
    text = f"Samples with a score {limit} are predicted {name!r}. {RULES[rule].format(number)}"
    rows: list[list[str | float | None]] = []
    decisions = {HALF: scores > HALF, HALF if fitted is None else fitted: used}
    for threshold, predicted in reversed(decisions.items()):
        hits, alarms, missed = (
            int(np.sum(each)) for each in (predicted & truth, predicted & ~truth, ~predicted & truth)
        )
        shares = [
            part / whole if whole else None
            for part, whole in ((hits, hits + alarms), (hits, hits + missed), (2 * hits, 2 * hits + alarms + missed))
        ]
        rows.append([format_value(threshold), hits + alarms, hits, alarms, missed, *shares])
    header = "Threshold", f"Predicted {name}", "Right", "False alarms", "Missed", "Precision", "Recall", "F1"
    return Table("Threshold", text, header, rows)


def tabulate_highest_scores(name: str, truth: Bools, scores: Floats) -> Table:
    """Return a table of precision, lift and recall among the 1, 5 and 10 % of samples with the highest scores.

    ``name`` is the name of the positive class, which must occur. Samples with equal scores count as in a random order.
    """
    _, hits, alarms = count_at_or_above(truth, scores)
    samples, positives = len(truth), int(hits[-1])
    rows: list[list[str | float | None]] = []
    for percent in TOP_PERCENT:
        chosen = -(-percent * samples // 100)
        found = float(np.interp(chosen, np.append(0, hits + alarms), np.append(0, hits)))
        precision = found / chosen
        rows.append([f"{percent} %", chosen, precision, precision * samples / positives, found / positives])
    text = (
        f"{format_percent(positives / samples)} of the test samples are {name!r}. Lift is the precision divided by "
        "this share. Samples with equal scores are in a random order."
    )
    return Table("Samples with the highest scores", text, ("Top", "Samples", "Precision", "Lift", "Recall"), rows)


def make_calibration_curve(name: str, truth: Bools, scores: Floats) -> Curve:
    """Return a section with the calibration curve of the class ``name``.

    For each tenth of the range of scores, a point has the samples' mean score, and the share of samples of the class.
    """
    bins = np.searchsorted(np.linspace(0, 1, BINS + 1)[1:-1], scores)
    counts = np.bincount(bins, minlength=BINS)
    filled = counts > 0
    means, shares = (
        np.bincount(bins, values, minlength=BINS)[filled] / counts[filled] for values in (scores, truth.astype(float))
    )
    error = float((counts[filled] * np.abs(means - shares)).sum() / len(scores))
    brier, share = float(np.square(scores - truth).mean()), float(truth.mean())
    text = (
        f"The share of {name!r} among the test samples in each tenth of the range of scores, against the mean score of "
        f"these samples. Grey: perfect calibration. Expected calibration error {error:.4f}. Brier score {brier:.4f}; "
        f"predicting the same score for all samples gives {share * (1 - share):.4f}."
    )
    axes = "mean score", f"share of {name}"
    return Curve("Calibration", text, "", *axes, means.tolist(), shares.tolist(), (0.0, 1.0))
