"""Statistics of leaves: values, types, targets and ranges of numbers."""

import hashlib
import math
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.samples.leaves import IGNORED, IGNORED_TOKEN
from flyte_ddp.validation.profile import CLASSES, LABELS, MASKS, NUMBERS

COLUMNS = 64  # of a table with more columns, only the means of rows are counted

Values = NDArray[Any] | list[NDArray[Any]]  # a leaf of n samples: [n, ...], or one array for each


def has_numbers(values: Values) -> bool:
    return all(each.dtype.kind in "biuf" for each in ([values] if isinstance(values, np.ndarray) else values))


def apply_to_rows(values: Values, function: Callable[[NDArray[Any]], Any]) -> NDArray[Any]:
    """Return ``function(rows)`` [n], where ``rows`` [n, k] are the flattened samples.

    The function gets samples of unequal shapes one by one.
    """
    if isinstance(values, np.ndarray):
        return np.asarray(function(values.reshape(len(values), -1)))
    return np.concatenate([function(value.reshape(1, -1)) for value in values])


def row_means_or_zero(rows: NDArray[Any]) -> NDArray[np.float64]:
    """Return the mean of each row [n] of ``rows`` [n, k], or 0 for rows without numbers."""
    with np.errstate(all="ignore"):
        return np.asarray(rows.sum(1, np.float64) / max(1, rows.shape[1]))


def compute_leaf_statistics(
    name: str, values: Values, columns: Sequence[str] = (), *, with_numbers: bool
) -> dict[str, NDArray[Any]]:
    """Return the statistics of a leaf by name, such as "types of inputs", with a value for each sample.

    Args:
        name: The leaf's name in the names of the statistics.
        values: The leaf of n samples.
        columns: The names of the leaf's columns. If empty, columns are numbered.
        with_numbers: Whether numbers are statistics, too: those of up to COLUMNS (64) columns, or else the means of
            samples.
    """
    if isinstance(values, np.ndarray):
        found = {f"types of {name}": np.full(len(values), describe_array_type(values.dtype, values.shape[1:]))}
    else:
        types = [describe_array_type(each.dtype, ("?", *each.shape[1:])[: each.ndim]) for each in values]
        found = {f"types of {name}": np.array(types)}
        if values[0].ndim:
            found[f"lengths of {name}"] = np.array([len(each) for each in values])
    if not with_numbers or not has_numbers(values):
        return found
    if isinstance(values, np.ndarray) and values.ndim == 2 and 1 < values.shape[1] <= COLUMNS:
        called = columns or range(values.shape[1])
        return found | {f"column {place} of {name}": each for place, each in zip(called, values.T, strict=True)}
    return found | {f"means of {name}": apply_to_rows(values, row_means_or_zero)}


def describe_array_type(dtype: np.dtype[Any], shape: Sequence[Any]) -> str:
    called = {"U": "text", "S": "bytes", "O": "object"}.get(dtype.kind, dtype.name)
    return f"{called} [{' x '.join(map(str, shape))}]" if shape else called


def digest_leaves(leaves: Sequence[Any]) -> int:
    """Return a digest of the leaves' shapes and bytes, an int64. The dtype is not part of the digest."""
    digest = hashlib.blake2b(digest_size=8)  # two of a million samples collide with probability 3e-8
    for leaf in leaves:
        value = np.asarray(leaf)
        digest.update(str(value.shape).encode())
        digest.update(value.tobytes() if value.dtype.kind != "O" else pickle.dumps(value.item()))
    return int.from_bytes(digest.digest(), "little", signed=True)


def count_samples_by_target(values: Values, kind: str) -> Counter[str]:
    """Return the number of samples by target, as text.

    With the kinds CLASSES, MASKS and LABELS, a target is a class number. With NUMBERS, a target is the range of the
    first number, such as "4 to 8". Otherwise targets are ranges of tokens, and a range counts once for each sample
    that has a token in the range. Ignored pixels and tokens do not count.
    """
    if kind == CLASSES:
        return Counter(map(str, np.array(values).tolist()))
    if kind == MASKS:
        return Counter(str(label) for mask in values for label in np.setdiff1d(mask, [IGNORED]).tolist())
    if kind == LABELS:
        ones = (np.stack([*values]) == 1).sum(0)
        return Counter({str(label): number for label, number in enumerate(ones.tolist()) if number})
    if kind == NUMBERS:
        return count_by_range(
            apply_to_rows(values, lambda rows: rows[:, 0] if rows.shape[1] else np.full(len(rows), np.nan))
        )
    return Counter(name for value in values for name in count_by_range(value[value != IGNORED_TOKEN]))


def find_labels_out_of_range(samples: Sequence[int], values: Values, classes: int) -> dict[str, int]:
    """Return the numbers of samples with a label outside of 0 to ``classes`` - 1, by the label as a text.

    If the smallest label is negative, the result has the smallest label. If the largest label is too large, the result
    has the largest label. A label is a class number or a token. Ignored tokens are skipped. ``samples`` are the numbers
    of the samples, and ``values`` the samples' class numbers or tokens.
    """
    lowest = apply_to_rows(values, lambda rows: np.where(rows == IGNORED_TOKEN, 0, rows).min(1, initial=0))
    highest = apply_to_rows(values, lambda rows: rows.max(1, initial=0))
    ends = {str(lowest.min()): int(lowest.argmin()), str(highest.max()): int(highest.argmax())}
    return {token: samples[place] for token, place in ends.items() if not 0 <= int(token) < classes}


def describe_range(number: float) -> str:
    """Return the range between powers of two around a number, such as "4 to 8" from 4 to below 8.

    Negative numbers give, for example, "-8 to -4". Other texts are "0", "inf", "-inf" and "nan".
    """
    if not math.isfinite(number) or number == 0:
        return f"{number:g}"
    power = math.frexp(abs(number))[1]
    low, high = sorted(math.copysign(2.0**each, number) for each in (power - 1, power))
    return f"{low:g} to {high:g}"


def count_by_range(numbers: NDArray[Any]) -> Counter[str]:
    """Return how many numbers are in each range between powers of two, by the range as text.

    The texts are results of :func:`describe_range`, such as "4 to 8", "0" or "nan".
    """
    values = numbers.astype(np.float64)
    usual = np.isfinite(values) & (values != 0)
    edges = np.where(usual, np.copysign(np.ldexp(0.5, np.frexp(values)[1]), values), values)  # the end nearer to 0
    found, counts = np.unique(edges + 0.0, return_counts=True)  # + 0.0: no -0
    return Counter(dict(zip(map(describe_range, found.tolist()), counts.tolist(), strict=True)))
