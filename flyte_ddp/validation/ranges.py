"""Ranges between powers of two, by which numbers are counted: one look at the data is enough, whatever their scale."""

import math
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray


def describe_range(number: float) -> str:
    """Return the range between powers of two that a number is in, such as "4 to 8"; "nan" for an unknown number."""
    if not math.isfinite(number) or number == 0:
        return f"{number:g}"
    power = math.frexp(abs(number))[1]
    low, high = sorted(math.copysign(2.0**each, number) for each in (power - 1, power))
    return f"{low:g} to {high:g}"


def count_ranges(numbers: NDArray[Any]) -> Counter[str]:
    """Return how many of the numbers [n] are in each range of :func:`describe_range`."""
    values = numbers.astype(np.float64)
    usual = np.isfinite(values) & (values != 0)
    edges = np.where(usual, np.copysign(np.ldexp(0.5, np.frexp(values)[1]), values), values)  # the end nearer to 0
    found, counts = np.unique(edges + 0.0, return_counts=True)  # + 0.0: no -0
    return Counter(dict(zip(map(describe_range, found.tolist()), counts.tolist(), strict=True)))
