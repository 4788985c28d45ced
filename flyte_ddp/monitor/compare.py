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
    """Return how each column of the reference has changed in the window, by p-value and effect.

    P-values are corrected by Holm's method. The effect of numbers is the largest distance of the two distribution
    functions. The effect of categories is half the sum of the shares' differences, or the excess of new categories if
    larger. A column has moved if p is at most ALPHA (0.01) and the effect at least FLOOR (0.05). If no test can find a
    change of a column, the result has the reason. Columns of the window that the reference lacks are ignored.
    """
    found = [compare_column(values, window[name]) for name, values in reference.items()]
    changes = []
    for (name, values), p, (_, effect) in zip(
        reference.items(), correct_p_values([p for p, _ in found]), found, strict=True
    ):
        moved = p <= ALPHA and effect >= FLOOR
        changes.append(
            ColumnChange(name, p, effect, moved, "" if moved else explain_untestable_column(values, window[name]))
        )
    return changes


def compare_column(reference: NDArray[Any], window: NDArray[Any]) -> tuple[float, float]:
    """Test whether a column's values differ between reference and window, and return p-value and effect.

    Texts, and numbers with few different values, are compared as categories. Other numbers are compared by Kolmogorov
    and Smirnov's test. NaN counts as infinity. If both sides have the same single value, returns (1, 0).

    Returns:
        The p-value without correction, and the effect from 0 to 1 as in :func:`compare_columns`.
    """
    reference, window = replace_nan_by_infinity(reference), replace_nan_by_infinity(window)
    if not has_categories(reference):
        numbers = ks_2samp(reference, window, method="asymp")
        return float(numbers.pvalue), float(numbers.statistic)
    table = count_categories(reference, window)[1]
    return compare_category_counts(table) if table.shape[1] > 1 else (1.0, 0.0)


def compare_category_counts(table: NDArray[np.int64]) -> tuple[float, float]:
    """Return p-value and effect of Pearson's chi-squared test on the counts [2, K], K > 1, of reference and window.

    If all categories but one are rare, Fisher's exact test compares the common category with the rest.

    Categories that the reference lacks are new. The expected share of new categories is the share of the reference's
    samples that are alone in a category (Good, Biometrika 40, 1953). If the window has more new categories than
    expected, Fisher's test also compares new categories with the rest. The smaller p-value is then doubled.
    """
    pooled = pool_rare_categories(table)
    shares, found = pooled / pooled.sum(1, keepdims=True), chi2_contingency(pooled)
    rare = pooled.shape[1] == 2 and found.expected_freq.min() < LEAST_EXPECTED
    p, effect = fisher_exact(pooled).pvalue if rare else found.pvalue, np.abs(shares[0] - shares[1]).sum() / 2
    samples, new = table.sum(1), np.array([(table[0] == 1).sum(), table[1, table[0] == 0].sum()])
    excess = new[1] / samples[1] - new[0] / samples[0]
    if excess > 0:
        p_new = fisher_exact(np.stack([new, samples - new]), alternative="less").pvalue
        p, effect = min(1.0, 2 * min(p, p_new)), max(effect, excess)
    return float(p), float(effect)


def explain_untestable_column(reference: NDArray[Any], window: NDArray[Any]) -> str:
    """Return why no test can find a change of a column that has not moved, or "" if a test can.

    No effect can reach FLOOR (0.05) if a single value, or all rare categories together, make up more than 95 % of both
    sides.
    """
    reference, window = replace_nan_by_infinity(reference), replace_nan_by_infinity(window)
    most = f"more than {100 * (1 - FLOOR):.0f} % of the"
    values, counts = np.unique(reference, return_counts=True)
    common = values[counts.argmax()]
    share = min((side == common).mean() for side in (reference, window))
    if share > 1 - FLOOR:
        shown = "unknown" if common == np.inf else format_page_cell(common.item())
        return f"{'all' if share == 1 else most} samples are {shown}"
    if has_categories(reference):
        pooled = pool_rare_categories(count_categories(reference, window)[1])
        if (pooled[:, 0] / pooled.sum(1)).min() > 1 - FLOOR:
            return f"{most} samples have rare values, which count as one category"
    return ""


def has_categories(reference: NDArray[Any]) -> bool:
    """Return whether values are categories: texts, or numbers with up to 20 different values.

    The numbers must occur at least 5 times each on average.
    """
    if reference.dtype.kind == "U":
        return True
    return len(np.unique(reference)) <= min(FEW_VALUES, len(reference) // LEAST_EXPECTED)


def replace_nan_by_infinity(values: NDArray[Any]) -> NDArray[Any]:
    """Return the values with infinity in place of NaN, so that a growing share of NaN counts as a change."""
    return np.where(np.isnan(values), np.inf, values) if values.dtype.kind == "f" else values


def count_categories(reference: NDArray[Any], window: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the K different values of reference and window, and the counts [2, K] in both."""
    values, places = np.unique(np.concatenate((reference, window)), return_inverse=True)
    sides = np.split(places, [len(reference)])
    return values, np.stack([np.bincount(side, minlength=len(values)) for side in sides])


def pool_rare_categories(table: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the counts [2, K], K > 1, with the rarest columns merged into the first column.

    Columns are merged until each column's expected count in the row with fewer samples is at least 5, or until two
    columns are left. The other columns follow by rising total.
    """
    table = table[:, np.argsort(table.sum(0), kind="stable")]
    totals, least = table.sum(0), LEAST_EXPECTED * table.sum() / table.sum(1).min()
    pooled = max(int((totals < least).sum()), int(np.searchsorted(totals.cumsum(), least)) + 1)
    return np.add.reduceat(table, [0, *range(min(pooled, len(totals) - 1), len(totals))], axis=1)


def rate_unusual_samples(
    reference: Mapping[str, NDArray[Any]], window: Mapping[str, NDArray[Any]]
) -> NDArray[np.float64]:
    """Return how unusual each sample of the window is, [n]. Higher numbers are more unusual.

    The number is the sum of -log(share) over the columns. The share is of the reference's samples that have an equal
    category, or that lie in the tails of the distribution beyond the number. A share counts as at least one sample.
    """
    found = np.zeros(len(next(iter(window.values()))))
    for name, values in reference.items():
        known, there = np.sort(replace_nan_by_infinity(values)), replace_nan_by_infinity(window[name])
        left, right = (np.searchsorted(known, there, side) for side in ("left", "right"))
        shares = right - left if has_categories(values) else 2 * np.minimum(right, len(known) - left)
        found -= np.log(np.clip(shares, 1, len(known)) / len(known))
    return found
