"""Compare the columns of a window of samples with those of the reference, by tests whose power has one size."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2_contingency, fisher_exact, ks_2samp

from flyte_ddp.monitor.window import ColumnChange
from flyte_ddp.release.statistics import correct_p_values

SAMPLES = 1000  # of a window that are compared: the verdict must not depend on the window's size
ALPHA = 0.01  # of all columns of a window together
FLOOR = 0.05  # a smaller effect is no change, however significant
FEW_VALUES = 20  # numbers with at most so many different values are categories
LEAST_EXPECTED = 5  # samples of a category in the smaller of the two; rarer ones are counted together


def compare_columns(reference: Mapping[str, NDArray[Any]], window: Mapping[str, NDArray[Any]]) -> list[ColumnChange]:
    """Return each column's p-value (Holm), and effect: the largest distance of the two distributions' functions.

    Of categories the effect is half the sum of the shares' differences. A column has moved if both are beyond limits.
    """
    found = [compare_values(values, window[name]) for name, values in reference.items()]
    corrected = correct_p_values([p for p, _ in found])
    return [
        ColumnChange(name, p, effect, p <= ALPHA and effect >= FLOOR)
        for name, p, (_, effect) in zip(reference, corrected, found, strict=True)
    ]


def compare_values(reference: NDArray[Any], window: NDArray[Any]) -> tuple[float, float]:
    """Return p-value and effect of Kolmogorov and Smirnov's test, of categories of Pearson's chi-squared test.

    Where all categories but one are rare, Fisher's exact test compares that one with the rest.
    """
    reference, window = replace_nan(reference), replace_nan(window)
    if not has_categories(reference):
        numbers = ks_2samp(reference, window, method="asymp")
        return float(numbers.pvalue), float(numbers.statistic)
    table = count_categories(reference, window)[1]
    if table.shape[1] < 2:
        return 1.0, 0.0
    table = pool_rare(table)
    shares, found = table / table.sum(1, keepdims=True), chi2_contingency(table)
    rare = table.shape[1] == 2 and found.expected_freq.min() < LEAST_EXPECTED
    return float(fisher_exact(table).pvalue if rare else found.pvalue), float(np.abs(shares[0] - shares[1]).sum() / 2)


def has_categories(reference: NDArray[Any]) -> bool:
    """Return whether values are texts, or numbers of few different values, each of which comes again and again."""
    if reference.dtype.kind == "U":
        return True
    return len(np.unique(reference)) <= min(FEW_VALUES, len(reference) // LEAST_EXPECTED)


def replace_nan(values: NDArray[Any]) -> NDArray[Any]:
    """Return numbers with NaN as infinity, so that a share of unknown numbers that grows is a change."""
    return np.where(np.isnan(values), np.inf, values) if values.dtype.kind == "f" else values


def count_categories(reference: NDArray[Any], window: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the K values of both, and their counts in the reference and in the window, [2, K]."""
    values, places = np.unique(np.concatenate((reference, window)), return_inverse=True)
    sides = np.split(places, [len(reference)])
    return values, np.stack([np.bincount(side, minlength=len(values)) for side in sides])


def pool_rare(table: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return counts [2, k], k > 1, of K > 1 categories; the rarest count as one, until 5 samples are expected of it."""
    table = table[:, np.argsort(table.sum(0), kind="stable")]
    totals, least = table.sum(0), LEAST_EXPECTED * table.sum() / table.sum(1).min()
    pooled = max(int((totals < least).sum()), int(np.searchsorted(totals.cumsum(), least)) + 1)
    return np.add.reduceat(table, [0, *range(min(pooled, len(totals) - 1), len(totals))], axis=1)


def rate_samples(reference: Mapping[str, NDArray[Any]], window: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
    """Return how unusual each sample is, [n]: the sum of -log of the reference's shares that are as far out."""
    found = np.zeros(len(next(iter(window.values()))))
    for name, values in reference.items():
        known, there = np.sort(replace_nan(values)), replace_nan(window[name])
        left, right = (np.searchsorted(known, there, side) for side in ("left", "right"))
        shares = right - left if has_categories(values) else 2 * np.minimum(right, len(known) - left)
        found -= np.log(np.clip(shares, 1, len(known)) / len(known))
    return found
