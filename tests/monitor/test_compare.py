"""Columns of a window against the reference's: against SciPy, and by hand."""

import numpy as np
import pytest
from scipy.stats import chi2_contingency, fisher_exact, ks_2samp

from flyte_ddp.monitor.compare import (
    ALPHA,
    FLOOR,
    compare_column,
    compare_columns,
    pool_rare_categories,
    rate_unusual_samples,
)

RANDOM = np.random.default_rng(0)


def test_p_values_are_scipys_corrected_by_holm() -> None:
    reference = {"numbers": RANDOM.normal(size=5000), "shifted": RANDOM.normal(size=5000)}
    window = {"numbers": RANDOM.normal(size=1000), "shifted": RANDOM.normal(0.5, size=1000)}
    reference["classes"], window["classes"] = np.repeat(["a", "b"], 2500), np.repeat(["a", "b"], (700, 300))
    found = {each.column: each for each in compare_columns(reference, window)}
    tests = {name: ks_2samp(reference[name], window[name], method="asymp") for name in ("numbers", "shifted")}
    classes = chi2_contingency([[2500, 2500], [700, 300]])
    p_values = {**{name: test.pvalue for name, test in tests.items()}, "classes": classes.pvalue}
    largest = 0.0
    for rank, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (3 - rank) * p_values[name]))
        assert found[name].p == pytest.approx(largest)
    assert found["numbers"].effect == pytest.approx(tests["numbers"].statistic)
    assert found["classes"].effect == pytest.approx(0.2)
    assert {name for name, each in found.items() if each.moved} == {"shifted", "classes"}


@pytest.mark.parametrize(("share", "moved"), [(0.05, False), (0.2, True)])
def test_a_change_below_the_floor_is_none_however_significant(share: float, moved: bool) -> None:
    reference, window = np.repeat(["a", "b"], 50_000), np.repeat(["a", "b"], (50_000 - int(share * 1e5), 50_000))
    [found] = compare_columns({"x": reference}, {"x": window})
    assert found.p < ALPHA
    assert found.moved == moved == (found.effect >= FLOOR)


def test_categories_that_the_reference_does_not_have_count() -> None:
    """Numbers of few different values are categories."""
    reference, window = np.repeat([0.0, 1.0], 500), np.repeat([0.0, 1.0, 7.0, 9.0], (400, 400, 100, 100))
    p, effect = compare_column(reference, window)
    assert effect == pytest.approx(0.2)
    p_new = fisher_exact([[0, 1000], [200, 800]], alternative="less").pvalue
    assert p == pytest.approx(2 * min(chi2_contingency([[500, 500, 0, 0], [400, 400, 100, 100]]).pvalue, p_new))


@pytest.mark.parametrize("categories", [5, 50, 200, 500, 1000])
def test_rare_categories_that_the_reference_does_not_have_count_as_one(categories: int) -> None:
    """Also where each of them is so rare that all rare ones are one category of the other test."""
    reference = RANDOM.integers(0, categories, 5000).astype(str)
    known, others = RANDOM.integers(0, categories, 900).astype(str), RANDOM.integers(2000, 2000 + categories, 100)
    [found] = compare_columns({"x": reference}, {"x": np.concatenate((known, others.astype(str)))})
    assert found.moved
    once = (np.unique(reference, return_counts=True)[1] == 1).sum()
    assert found.effect >= (~np.isin(known, reference)).mean() * 0.9 + 0.1 - once / 5000 - 1e-9


def test_as_many_new_categories_are_expected_as_the_reference_has_once() -> None:
    """Three of its nine samples, by Good and Turing; by hand."""
    reference, window = np.array([*"aaabbbxyz"]), np.array([*"aaabbbbpqr"])
    table = np.array([[3, 3, 1, 1, 1, 0, 0, 0], [3, 4, 0, 0, 0, 1, 1, 1]])
    without = chi2_contingency if pool_rare_categories(table).shape[1] > 2 else fisher_exact
    assert compare_column(reference, window)[0] == pytest.approx(without(pool_rare_categories(table)).pvalue), (
        "3 of 10 are new"
    )
    more = np.array([*"aaabbbpqrs"])
    p, effect = compare_column(reference, more)
    p_new = fisher_exact([[3, 6], [4, 6]], alternative="less").pvalue
    table = np.array([[3, 3, 1, 1, 1, 0, 0, 0, 0], [3, 3, 0, 0, 0, 1, 1, 1, 1]])
    assert p == pytest.approx(min(1, 2 * min(fisher_exact(pool_rare_categories(table)).pvalue, p_new)))
    assert effect >= 4 / 10 - 3 / 9


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [0, 1, 1.5])
@pytest.mark.parametrize("samples", [60, 1000])
def test_a_long_tail_of_categories_has_not_moved(exponent: float, samples: int) -> None:
    """Each window has some that 2,000 samples of the reference do not have; alpha is 0.01."""
    shares = 1 / np.arange(1.0, 5001) ** exponent
    random, shares = np.random.default_rng(1), shares / shares.sum()
    moved = new = 0
    for _ in range(40):
        reference, window = (random.choice(5000, size, p=shares).astype(str) for size in (2000, samples))
        moved += compare_columns({"x": reference}, {"x": window})[0].moved
        new += (~np.isin(window, reference)).mean() > FLOOR
    assert moved <= 3
    assert new >= 10


def test_columns_that_cannot_be_compared_are_named() -> None:
    rare = RANDOM.integers(0, 500, 5000).astype(str)
    numbers = RANDOM.normal(size=5000)
    unknown = np.where(np.arange(5000) % 30 == 0, numbers, np.nan)
    cases = {
        "all samples are 7": (np.full(5000, 7.0), np.full(100, 7.0)),
        "all samples are x": (np.repeat("x", 500), np.repeat("x", 100)),
        "all samples are unknown": (np.full(500, np.nan), np.full(100, np.nan)),
        "more than 95 % of the samples are unknown": (unknown, unknown[:1000]),
        "more than 95 % of the samples are no": (
            np.repeat(["no", "yes"], [490, 10]),
            np.repeat(["no", "yes"], [97, 3]),
        ),
        "more than 95 % of the samples have rare values, which count as one category": (rare, rare[:1000]),
        "": (numbers, numbers[:1000]),
        " ": (np.repeat(["no", "yes"], [490, 10]), np.repeat(["no", "yes"], [94, 6])),
    }
    found = compare_columns(
        {name: each[0] for name, each in cases.items()}, {name: each[1] for name, each in cases.items()}
    )
    assert [each.untested for each in found] == [name.strip() for name in cases]
    assert not any(each.moved for each in found)
    for reference, window in (
        (np.full(500, 7.0), np.full(100, 8.0)),
        (np.arange(500).astype(str), np.repeat("a", 100)),
    ):
        [changed] = compare_columns({"x": reference}, {"x": window})
        assert (changed.moved, changed.untested) == (True, "")


def test_rare_categories_count_together() -> None:
    table = np.array([[1000, 3, 20, 2, 1, 0], [100, 0, 2, 0, 0, 0]])
    pooled = pool_rare_categories(table)
    assert (pooled.sum(1) == table.sum(1)).all()
    assert (np.sort(pooled, axis=1) == [[26, 1000], [2, 100]]).all()
    even = np.array([[50, 50], [60, 40]])
    assert (np.sort(pool_rare_categories(even), axis=1) == np.sort(even, axis=1)).all()
    many = np.arange(1000).astype(str)
    p, effect = compare_column(many, many[:50])
    assert effect == pytest.approx(1 / 50 - 1 / 1000)
    assert p == pytest.approx(fisher_exact([[1, 999], [1, 49]]).pvalue)


def test_a_small_window_of_values_that_a_constant_reference_lacks_has_moved() -> None:
    """Of 60 among 5,060 samples each new value is rarer than the chi-squared test can count."""
    for reference, window in (
        (np.zeros(5000), RANDOM.normal(size=60)),
        (np.full(5000, np.nan), np.ones(60)),
        (np.arange(5000).astype(str), np.repeat(["new"], 60)),
    ):
        p, effect = compare_column(reference, window)
        assert effect == 1
        assert fisher_exact([[5000, 0], [0, 60]]).pvalue <= p <= 2 * fisher_exact([[5000, 0], [0, 60]]).pvalue


def test_what_is_not_known_is_a_value_of_its_own() -> None:
    numbers = RANDOM.normal(size=1000)
    window = np.where(RANDOM.random(1000) < 0.3, np.nan, numbers)
    p, effect = compare_column(numbers, window)
    assert p < 1e-9
    assert effect == pytest.approx(np.isnan(window).mean(), abs=0.03)
    assert compare_column(np.full(100, np.nan), np.full(60, np.nan)) == (1.0, 0.0)
    assert compare_column(np.zeros(100), np.zeros(60)) == (1.0, 0.0)
    assert compare_column(np.zeros(100), np.ones(60))[1] == 1.0


def test_a_small_reference_of_numbers_has_no_categories() -> None:
    few, others = RANDOM.normal(size=15), RANDOM.normal(size=100)
    assert compare_column(few, others)[1] == pytest.approx(ks_2samp(few, others).statistic)


def test_the_most_unusual_sample_is_the_one_farthest_out() -> None:
    reference = {"number": np.arange(1.0, 101.0), "class": np.repeat(["a", "b"], (90, 10))}
    window = {"number": np.array([50.0, 100.0, 3.0, 500.0]), "class": np.array(["a", "a", "b", "c"])}
    expected = [2 * 50 / 100 * 0.9, 2 / 100 * 0.9, 2 * 3 / 100 * 0.1, 1 / 100 / 100]
    np.testing.assert_allclose(rate_unusual_samples(reference, window), -np.log(expected))
