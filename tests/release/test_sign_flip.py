"""The sign-flip test against McNemar's and against all signs, and its bound against the test."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.random import Generator
from numpy.typing import NDArray
from scipy import stats

from flyte_ddp.release.sign_flip import (
    STEPS,
    choose_unit,
    lower_bound_by_sign_flips,
    p_value_of_integers,
    sign_flip_p_value,
)

Floats = NDArray[np.float64]


@pytest.mark.parametrize(
    ("gained", "lost"),
    [
        *[(1, 0), (0, 1), (1, 1), (9, 3), (3, 9), (40, 0), (0, 40), (54, 1), (30, 5), (120, 60), (700, 540)],
        *[(5400, 4600), (50_700, 49_300), (50_000, 49_999)],
    ],
)
def test_it_is_mcnemars_test_where_scores_are_0_or_1(gained: int, lost: int) -> None:
    """To 12 digits, and in the tail: 700 against 540 have 3e-6, 5,400 against 4,600 have 6e-16."""
    differences = np.repeat([1.0, -1.0, 0.0], [gained, lost, 1000])
    expected = stats.binomtest(gained, gained + lost, 0.5, alternative="greater").pvalue
    assert sign_flip_p_value(differences) == pytest.approx(expected, rel=1e-12, abs=0)


KINDS: dict[str, Callable[[Generator, int], Floats]] = {
    "whole numbers": lambda random, n: random.integers(-4, 9, n).astype(float),
    "tenths": lambda random, n: random.integers(-4, 9, n) / 10 - 0.1,
    "lognormal": lambda random, n: random.lognormal(0, 1.5, n) - 1,
    "mixed": lambda random, n: np.where(
        random.random(n) < 0.5, random.integers(-1, 3, n), random.lognormal(0, 1, n) - 0.5
    ),
}


def p_value_of_all_signs(differences: Floats, total: float) -> float:
    """The share of all 2^N sums that are at least ``total``."""
    signs = 2.0 * (np.arange(2 ** len(differences))[:, None] >> np.arange(len(differences)) & 1) - 1
    return float((signs @ np.abs(differences) >= total).mean())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("samples", [1, 2, 3, 7, 14])
def test_it_counts_all_signs(kind: str, samples: int) -> None:
    """Where there is no unit, of rounded differences: each of the two sums is off by half a step for each of them."""
    random = np.random.default_rng(samples)
    for _ in range(3):
        differences = KINDS[kind](random, samples)
        p, total = sign_flip_p_value(differences), float(differences.sum())
        if kind in ("whole numbers", "tenths"):
            assert p == pytest.approx(p_value_of_all_signs(differences, total - 1e-9), rel=1e-12)
        else:
            nonzero = differences[differences != 0]
            rounded = np.rint(nonzero / choose_unit(nonzero, STEPS))
            assert p == pytest.approx(p_value_of_all_signs(rounded, rounded.sum()), rel=1e-12)
            off = math.sqrt(len(nonzero) * (nonzero**2).sum()) / STEPS
            highest, lowest = (p_value_of_all_signs(differences, total + sign * off) for sign in (-1, 1))
            assert lowest * (1 - 1e-12) <= p <= highest * (1 + 1e-12)


@pytest.mark.parametrize("quantile", [2.0, 5.6])
def test_small_p_values_have_as_many_digits(quantile: float) -> None:
    """A grid that is 8 times finer gives p-values that differ by about 0.03 % times the normal quantile."""
    differences = np.random.default_rng(2).lognormal(0, 1, 500)
    differences -= differences.mean() - quantile * differences.std() / math.sqrt(500)
    fine = np.rint(differences / choose_unit(differences, 8 * STEPS)).astype(np.int64)
    assert sign_flip_p_value(differences) == pytest.approx(p_value_of_integers(fine), rel=0.001 * quantile)


def test_by_hand() -> None:
    assert sign_flip_p_value(np.zeros(5)) == 1.0
    assert sign_flip_p_value(np.array([])) == 1.0
    assert sign_flip_p_value(np.array([2.0, -2.0])) == pytest.approx(0.75), "of -4, 0, 0 and 4 three are at least 0"
    assert sign_flip_p_value(np.array([3.0, 2.0, -1.0])) == pytest.approx(2 / 8), "only 4 and 6"
    assert sign_flip_p_value(np.array([0.3, 0.2, -0.1, -0.4])) == pytest.approx(9 / 16), "equal to all of 0.1 x 0"
    assert sign_flip_p_value(np.arange(1.0, 41)) == pytest.approx(2.0**-40, rel=1e-12)
    assert sign_flip_p_value(-np.arange(1.0, 41)) == 1.0
    assert sign_flip_p_value(np.array([2.0**30, 2.0**30 - 1, *-np.arange(1.0, 9)])) == pytest.approx(0.25, rel=1e-3)
    assert lower_bound_by_sign_flips(np.array([1.0, 2.0, 3.0]), 0.05) == -math.inf, "1/8 is the least p-value of three"
    assert lower_bound_by_sign_flips(np.full(10, 0.25), 0.05) == 0.25


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("samples", [30, 300])
@pytest.mark.parametrize("alpha", [0.05, 1e-4])
def test_the_bound_is_where_the_test_begins_to_reject(kind: str, samples: int, alpha: float) -> None:
    differences = KINDS[kind](np.random.default_rng(3), samples)
    bound, error = lower_bound_by_sign_flips(differences, alpha), differences.std() / math.sqrt(samples)
    step = 0.02 * error
    assert sign_flip_p_value(differences - bound + step) < alpha < sign_flip_p_value(differences - bound - step)
