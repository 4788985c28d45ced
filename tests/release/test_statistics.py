"""The tests behind a verdict, against their definitions, published figures and simulations."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize

from flyte_ddp.release import statistics


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_a_sum_of_binomial_coefficients(gained: int, lost: int) -> None:
    discordant = gained + lost
    at_least = sum(math.comb(discordant, k) for k in range(gained, discordant + 1))
    pair = statistics.ScoreDifferences(np.repeat([1.0, -1.0, 0.0], [gained, lost, 9]), "accuracy", statistics.POINTS)
    assert pair.p_value_of_gain() == pytest.approx(at_least / 2**discordant)


def test_all_looks_together_spend_alpha() -> None:
    spent = sum(statistics.alpha_of_look(0.05, look) for look in range(1, 200_000))
    assert 0.04999 < spent < 0.05


def likeliest(gained: int, lost: int, samples: int, difference: float) -> float:
    """The likeliest share of what is lost, if that is the true difference, found by search."""

    def unlikely(share: float) -> float:
        cells = ((gained, share + difference), (lost, share), (samples - gained - lost, 1 - 2 * share - difference))
        return -sum(count * math.log(max(part, 1e-300)) for count, part in cells if count)

    low, high = max(0.0, -difference), (1 - difference) / 2
    return float(optimize.minimize_scalar(unlikely, bounds=(low, high), method="bounded", options={"xatol": 1e-12}).x)


@pytest.mark.parametrize(("gained", "lost", "samples"), [(9, 3, 297), (0, 5, 100), (7, 0, 50), (40, 60, 10_000)])
@pytest.mark.parametrize("alpha", [0.05, 0.001])
def test_the_bound_is_where_the_score_test_begins_to_refuse(gained: int, lost: int, samples: int, alpha: float) -> None:
    """Tango's statistic, with the likeliest share found by search and not by his formula."""
    bound = statistics.tango_lower_bound(gained, lost, samples, alpha)
    share = likeliest(gained, lost, samples, bound)
    variance = samples * (2 * share + bound - bound**2)
    score = (gained - lost - samples * bound) / math.sqrt(variance)
    assert math.erfc(score / math.sqrt(2)) / 2 == pytest.approx(alpha, rel=1e-3)
    assert bound < (gained - lost) / samples


def test_by_hand() -> None:
    """Holm's example has 0.01 x 4, 0.02 x 3, 0.03 x 2 and 0.04, none of which may be less than the one before."""
    assert statistics.tango_lower_bound(0, 10, 10, 0.05) == -1.0, "all is lost"
    assert statistics.tango_lower_bound(0, 0, 10**6, 0.4999) == pytest.approx(0, abs=1e-9), "nothing differs"
    assert statistics.correct_p_values([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert statistics.correct_p_values([0.9, 0.8]) == [1.0, 1.0]
    assert statistics.correct_p_values([]) == []


def test_the_bound_of_a_mean_is_nearly_the_normal_one() -> None:
    values = np.random.default_rng(0).normal(0.1, 2.0, size=4000)
    normal = values.mean() - 1.6449 * values.std() / math.sqrt(len(values))
    assert statistics.bootstrap_lower_bound(values, 0.05) == pytest.approx(normal, abs=0.005)
    assert statistics.bootstrap_lower_bound(values, 0.05) == statistics.bootstrap_lower_bound(values, 0.05)
    assert statistics.bootstrap_lower_bound(np.full(5, 0.25), 0.05) == 0.25
    assert statistics.bootstrap_lower_bound(np.full(700, 0.1), 0.05) == pytest.approx(0.1)
    assert statistics.bootstrap_lower_bound(np.array([-1.0] + [0.0] * 99), 0.05) >= -1


def test_the_bound_of_a_mean_is_rarely_above_it() -> None:
    """Of values with a long tail; the percentiles of the means themselves are wrong in 12 of 100 cases here."""
    random, wrong = np.random.default_rng(5), 0
    for _ in range(200):
        values = math.exp(0.5) - random.lognormal(0.0, 1.0, 100)
        wrong += statistics.bootstrap_lower_bound(values, 0.05) > 0
    assert wrong / 200 < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 200)
