"""Sign-flip tests that a mean of paired differences is above 0, and lower bounds of the mean.

If two models are equally good, each difference may have either sign. The p-value is the probability that random signs
give at least the observed sum (Fisher, "The design of experiments", 1935, 21). The p-value is computed from the sum's
characteristic function under an exponential tilt. The tilt makes the observed sum likely. Small p-values are therefore
as exact as large p-values.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

STEPS = 1024  # of the grid, in a root mean square of the differences
BOUND_STEPS = 256  # the same, for the many tests of a bound
OUTSIDE = 41.0  # minus the natural logarithm of the probability of sums outside of the transform, 1e-18
NEGLIGIBLE = 1e-16  # frequencies f are skipped if the characteristic function's modulus is at most this times 1 + f
BLOCK = 1 << 20  # complex numbers in memory at a time

Floats = NDArray[np.float64]
Integers = NDArray[np.integer[Any]]


def sign_flip_p_value(differences: Floats) -> float:
    """Return the one-sided p-value of the exact sign-flip test that the mean of ``differences`` [N] is above 0.

    Returns 1.0 if all differences are 0. If the differences are multiples of a unit, the relative error is about 1e-12.
    For 0/1 scores the test is McNemar's exact test. Other differences are rounded to 1 / STEPS of the root mean square.
    Rounding changes the p-value by about 0.03 % times the normal quantile.
    """
    differences = differences[differences != 0]
    return p_value_of_integers(np.rint(differences / choose_unit(differences, STEPS)).astype(np.int64))


def lower_bound_by_sign_flips(differences: Floats, alpha: float) -> float:
    """Return the smallest shift of ``differences`` [N] that the sign-flip test does not reject at level ``alpha``.

    The shift is a lower bound of a symmetric distribution's mean, to about 0.001 standard errors. If there are too few
    differences to reject any shift, returns -inf. If all differences are equal, returns their mean.
    """
    mean, spread = float(differences.mean()), float(differences.std())
    if alpha < 0.5 ** len(differences):
        return -math.inf
    if spread <= 1e-12 * abs(mean):
        return mean
    unit = choose_unit(differences, BOUND_STEPS)
    unit /= math.ceil(unit * BOUND_STEPS / spread)
    rounded = np.rint(differences / unit).astype(np.int64)
    step = math.ceil(2 * spread / math.sqrt(len(differences)) / unit)
    wanted, quantiles = float(stats.norm.isf(alpha)), dict[int, float]()

    def is_rejected(shift: int) -> bool:
        """Return whether the test rejects a shift, and record the normal quantile of the p-value."""
        quantiles[shift] = float(stats.norm.isf(max(1e-300, p_value_of_integers(rounded - shift))))
        return quantiles[shift] >= wanted

    low = math.ceil(rounded.mean())  # where a p-value is 0.5 or more
    while not is_rejected(low):
        high, low = low, low - step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_rejected(middle) else (low, middle)
    return float(unit * (low + (quantiles[low] - wanted) / (quantiles[low] - quantiles[high])))


def choose_unit(differences: Floats, steps: int) -> float:
    """Return a unit of which all ``differences`` are nearly multiples, or 1 if all differences are 0.

    The unit is the greatest common divisor, unless the divisor is below a limit: 1 / ``steps`` of the root mean square
    of the differences. Below the limit, the common divisor of the magnitudes that occur more than once decides. If this
    divisor is at least the limit, the unit is the largest fraction 1/n of the divisor that is at most the limit. Equal
    sums of the magnitudes thus remain equal. Otherwise the unit is the limit.
    """
    if not np.any(differences):
        return 1.0
    least = math.sqrt(float(np.square(differences).mean())) / steps
    values, counts = np.unique(np.abs(differences), return_counts=True)
    if unit := greatest_common_divisor(values, least):
        return unit
    unit = greatest_common_divisor(values[counts > 1], least) or least
    return unit / math.ceil(unit / least)


def greatest_common_divisor(values: Floats, least: float) -> float:
    """Return the greatest common divisor of ``values``, up to rounding errors, or 0 if less than ``least``."""
    divisor = 0.0
    for value in values.tolist():
        remainder = value
        while remainder > least / 1000:
            divisor, remainder = remainder, abs(math.remainder(divisor, remainder))
        if 0 < divisor < least:
            return 0.0
    return divisor


def p_value_of_integers(differences: Integers) -> float:
    """Return the one-sided p-value of the sign-flip test of whole numbers, with a relative error of about 1e-12."""
    values, counts = np.unique(np.abs(differences[differences != 0]), return_counts=True)
    total, lost = int(values @ counts), -int(differences[differences < 0].sum())
    # P(a random negative part is at most ``lost``). It is symmetric about total / 2.
    if 2 * lost < total:
        return probability_of_coin_sum(lost, values, counts)
    return 1.0 - probability_of_coin_sum(total - lost - 1, values, counts, least=1e-17)


def probability_of_coin_sum(most: int, values: Integers, counts: Integers, least: float = 0.0) -> float:
    """Return the probability that fair coins which show heads are worth at most ``most`` together.

    Args:
        most: The limit of the sum. Must be below half of the worth of all coins.
        values: The worth of a coin of each kind, positive and ascending, [U].
        counts: The number of coins of each kind, [U].
        least: If an upper bound of the probability is below ``least``, returns 0 early.
    """
    # With biased coins, heads with probability 1 / (1 + exp(tilt * value)), ``most`` is the mean of the sum. The result
    # is a constant times the sum of P(most - m) * exp(-tilt * m) over m from 0 to ``most``. P is the inverse Fourier
    # transform of the characteristic function, which is a product over the values. So for each frequency the sum over m
    # is geometric.
    if most < 0:
        return 0.0
    scale = math.sqrt(float(counts @ np.square(values.astype(float))))

    def excess_of_mean(tilt: float) -> float:
        """Return the mean of the sum under the tilt ``tilt`` / ``scale``, minus ``most``."""
        return float((counts * values) @ special.expit(-tilt / scale * values)) - most

    steepest = 80 / int(values[0]) * scale  # is enough for ``most`` 0, where any larger tilt gives the same
    tilt = optimize.brentq(excess_of_mean, 0.0, steepest) if excess_of_mean(steepest) < 0 else steepest
    tilt /= scale
    constant = float(counts @ np.log1p(np.expm1(-tilt * values) / 2)) + tilt * most
    if math.exp(constant) < least:
        return 0.0
    heads = special.expit(-tilt * values)
    reach = min(most + 1, bound_distance(-1, most, values, counts, heads))
    size = 1 << (reach + bound_distance(1, most, values, counts, heads)).bit_length()
    angle, found = 2 * math.pi / size, 0.0
    frequencies = select_frequencies(values, counts, heads, size)
    for part in np.array_split(frequencies, 1 + len(frequencies) * len(values) // BLOCK):
        turns = angle * (np.multiply.outer(part, values) & (size - 1))
        squares = np.square(np.sin(turns / 2))
        with np.errstate(divide="ignore"):  # a modulus may be 0
            moduli = np.log1p(-4 * heads * (1 - heads) * squares) @ counts / 2  # logarithms, as exact as counts need
        phases = np.arctan2(heads * np.sin(turns), 1 - 2 * heads * squares) @ counts
        ratio = 1j * angle * part - tilt
        rotated = np.exp(moduli + 1j * (phases - angle * (part * most & (size - 1))))
        sums = rotated * np.expm1(reach * ratio) / np.expm1(ratio)
        found += float(np.where((part == 0) | (part == size // 2), 1, 2) @ sums.real)
    return min(1.0, math.exp(constant) * found / size)


def bound_distance(sign: int, mean: int, values: Integers, counts: Integers, heads: Floats) -> int:
    """Return a distance from ``mean`` beyond which a sum of random coins has probability 1e-18 at most.

    ``sign`` is the side of the mean: 1 above, -1 below. Each of the ascending ``values`` [U] is on ``counts`` [U]
    coins, which show heads with the probabilities ``heads`` [U]. ``mean`` is the mean of the sum.
    """
    speeds = np.geomspace(0.1 / math.sqrt(float(counts @ np.square(values.astype(float)))), 500 / int(values[-1]), 24)
    growth = np.log1p(heads * np.expm1(sign * np.multiply.outer(speeds, values))) @ counts
    return math.ceil(float(((growth - sign * speeds * mean + OUTSIDE) / speeds).min()))


def select_frequencies(values: Integers, counts: Integers, heads: Floats, size: int) -> NDArray[np.int64]:
    """Return the frequencies, from 0 to half of ``size``, at which a characteristic function is not negligible.

    The function belongs to a sum of random coins. Each of ``values`` [U] is on ``counts`` [U] coins, which show heads
    with the probabilities ``heads`` [U]. ``size`` is a power of two.
    """
    # Single precision and 32 bits, which may overflow as size is a power of two, make this five times as fast.
    frequencies = np.arange(size // 2 + 1, dtype=np.uint32)
    squared_moduli, least = np.ones(len(frequencies), np.float32), np.square(NEGLIGIBLE * (1.0 + frequencies))
    squared_sines = np.square(np.sin(math.pi / size * np.arange(size))).astype(np.float32)
    variances, last = 4 * heads * (1 - heads), np.uint32(size - 1)
    for place in np.argsort(-counts * variances * np.square(values)):
        factors = squared_sines[frequencies * values[place].astype(np.uint32) & last]
        factors *= np.float32(-variances[place])
        factors += 1
        squared_moduli *= factors if counts[place] == 1 else factors ** np.float32(counts[place])
        kept = squared_moduli > least
        if 2 * np.count_nonzero(kept) < len(kept):
            frequencies, squared_moduli, least = frequencies[kept], squared_moduli[kept], least[kept]
            if len(frequencies) * len(values) < BLOCK // 64:
                break
    return frequencies.astype(np.int64)
