"""Compares the columns of a window of samples with the columns of the reference, by statistical tests."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2_contingency, fisher_exact, ks_2samp

from flyte_ddp.core.objectives.table_columns import format_page_cell
from flyte_ddp.monitor.window import ColumnChange
from flyte_ddp.release.statistics import correct_p_values

SAMPLES = 1000  # of a window that are compared, because the verdict must not depend on the window's size
ALPHA = 0.01  # of all columns of a window together
FLOOR = 0.05  # a smaller effect is no change, however significant
FEW_VALUES = 20  # numbers with at most this many different values are categories
LEAST_EXPECTED = 5  # samples of a category on the smaller side; rarer categories are added up


def compare_columns(reference: Mapping[str, NDArray[Any]], window: Mapping[str, NDArray[Any]]) -> list[ColumnChange]:
    """Return each column's p-value, corrected by Holm's method, and effect, in the order of the reference.

    Columns of the window that the reference lacks are ignored. The effect of numbers is the largest distance of the two
    distribution functions. The effect of categories is half the sum of the shares' differences, or the excess of new
    categories if larger. A column has moved if p is at most ALPHA (0.01) and the effect at least FLOOR (0.05). If the
    tests cannot find a change of a column, the result has the reason.
    """
    found = [compare_values(values, window[name]) for name, values in reference.items()]
    changes = []
    for (name, values), p, (_, effect) in zip(
        reference.items(), correct_p_values([p for p, _ in found]), found, strict=True
    ):
        moved = p <= ALPHA and effect >= FLOOR
        changes.append(ColumnChange(name, p, effect, moved, "" if moved else explain_no_test(values, window[name])))
    return changes


def compare_values(reference: NDArray[Any], window: NDArray[Any]) -> tuple[float, float]:
    """Return p-value and effect of the difference between a column's values in the reference and in the window.

    Texts are compared as categories, and so are numbers if the reference has at most 20 different values, at least 5
    times each on average. Other numbers are compared by Kolmogorov and Smirnov's test. NaN counts as infinity. If both
    sides have the same single value, returns (1, 0).

    Returns:
        The p-value without correction, and the effect from 0 to 1 as in :func:`compare_columns`.
    """
    reference, window = replace_nan(reference), replace_nan(window)
    if not has_categories(reference):
        numbers = ks_2samp(reference, window, method="asymp")
        return float(numbers.pvalue), float(numbers.statistic)
    table = count_categories(reference, window)[1]
    return compare_categories(table) if table.shape[1] > 1 else (1.0, 0.0)


def compare_categories(table: NDArray[np.int64]) -> tuple[float, float]:
    """Return p-value and effect of Pearson's chi-squared test on counts [2, K], K > 1, of reference and window.

    If all categories but one are rare, Fisher's exact test compares the common category with the rest. Categories that
    the reference lacks are new. If the window has more samples of new categories than expected, Fisher's test also
    compares the new samples with the rest. The smaller p-value is then doubled. The expected share is the reference's
    share of samples that are alone in a category (Good, Biometrika 40, 1953).
    """
    pooled = pool_rare(table)
    shares, found = pooled / pooled.sum(1, keepdims=True), chi2_contingency(pooled)
    rare = pooled.shape[1] == 2 and found.expected_freq.min() < LEAST_EXPECTED
    p, effect = fisher_exact(pooled).pvalue if rare else found.pvalue, np.abs(shares[0] - shares[1]).sum() / 2
    samples, new = table.sum(1), np.array([(table[0] == 1).sum(), table[1, table[0] == 0].sum()])
    excess = new[1] / samples[1] - new[0] / samples[0]
    if excess > 0:
        p_new = fisher_exact(np.stack([new, samples - new]), alternative="less").pvalue
        p, effect = min(1.0, 2 * min(p, p_new)), max(effect, excess)
    return float(p), float(effect)


def explain_no_test(reference: NDArray[Any], window: NDArray[Any]) -> str:
    """Return why the tests cannot find a change of a column, or "" if the tests can. Call this unless the column moved.

    No effect can reach FLOOR (0.05) if a single value, or all rare categories together, make up more than 95 % of both
    sides.
    """
    reference, window = replace_nan(reference), replace_nan(window)
    most = f"more than {100 * (1 - FLOOR):.0f} % of the"
    values, counts = np.unique(reference, return_counts=True)
    common = values[counts.argmax()]
    share = min((side == common).mean() for side in (reference, window))
    if share > 1 - FLOOR:
        shown = "unknown" if common == np.inf else format_page_cell(common.item())
        return f"{'all' if share == 1 else most} samples are {shown}"
    if has_categories(reference):
        pooled = pool_rare(count_categories(reference, window)[1])
        if (pooled[:, 0] / pooled.sum(1)).min() > 1 - FLOOR:
            return f"{most} samples have rare values, which count as one category"
    return ""


def has_categories(reference: NDArray[Any]) -> bool:
    """Return whether values are categories: texts, or numbers with few different values that occur repeatedly."""
    if reference.dtype.kind == "U":
        return True
    return len(np.unique(reference)) <= min(FEW_VALUES, len(reference) // LEAST_EXPECTED)


def replace_nan(values: NDArray[Any]) -> NDArray[Any]:
    """Return numbers with infinity instead of NaN. A growing share of unknown numbers then counts as a change."""
    return np.where(np.isnan(values), np.inf, values) if values.dtype.kind == "f" else values


def count_categories(reference: NDArray[Any], window: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the K different values of reference and window, and the counts [2, K] in both."""
    values, places = np.unique(np.concatenate((reference, window)), return_inverse=True)
    sides = np.split(places, [len(reference)])
    return values, np.stack([np.bincount(side, minlength=len(values)) for side in sides])


def pool_rare(table: NDArray[np.int64]) -> NDArray[np.int64]:
    """Merge the rarest columns of counts [2, K], K > 1, into one, and return the counts.

    Merging stops when each column has an expected count of at least 5 in the row with fewer samples. It also stops when
    two columns are left. The merged column comes first, then the others by rising total.
    """
    table = table[:, np.argsort(table.sum(0), kind="stable")]
    totals, least = table.sum(0), LEAST_EXPECTED * table.sum() / table.sum(1).min()
    pooled = max(int((totals < least).sum()), int(np.searchsorted(totals.cumsum(), least)) + 1)
    return np.add.reduceat(table, [0, *range(min(pooled, len(totals) - 1), len(totals))], axis=1)


def rate_samples(reference: Mapping[str, NDArray[Any]], window: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
    """Return how unusual each sample of the window is, [n]. Higher numbers are more unusual.

    The rating is the sum over the reference's columns of -log of a share of the reference. For categories, the share is
    of equal values. For numbers, the share is of values at least as far out. A share counts as at least one sample.
    """
    found = np.zeros(len(next(iter(window.values()))))
    for name, values in reference.items():
        known, there = np.sort(replace_nan(values)), replace_nan(window[name])
        left, right = (np.searchsorted(known, there, side) for side in ("left", "right"))
        shares = right - left if has_categories(values) else 2 * np.minimum(right, len(known) - left)
        found -= np.log(np.clip(shares, 1, len(known)) / len(known))
    return found
