"""Which classes were taken for which: counts of the pairs that occur, at most one a sample, however many classes."""

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


def count_confusions(truth: Integers, predictions: Integers) -> Integers:
    """Return int64 [K, 3]: each pair of truth and prediction that occurs, with its number of samples, sorted by pair.

    Args:
        truth: [N] the samples' labels.
        predictions: [N] the classes that a model has predicted for them.
    """
    classes = int(predictions.max(initial=0)) + 1
    pairs, samples = np.unique(truth * classes + predictions, return_counts=True)
    return np.stack((pairs // classes, pairs % classes, samples), axis=1)


def confusion_matrix(counts: Integers, classes: int) -> Integers:
    """Return int64 [classes, classes]: the number of samples of a truth (row) with a prediction (column).

    Takes memory with the square of the classes.
    """
    matrix = np.zeros((classes, classes), dtype=np.int64)
    matrix[counts[:, 0], counts[:, 1]] = counts[:, 2]
    return matrix
