"""Confusions of classes, as counts of the (truth, prediction) pairs that occur: little memory for many classes."""

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


def count_confusions(truth: Integers, predictions: Integers) -> Integers:
    """Return [K, 3]: label, predicted class and number of samples of each pair that occurs, sorted by pair."""
    classes = int(predictions.max(initial=0)) + 1
    pairs, samples = np.unique(truth * classes + predictions, return_counts=True)
    return np.stack((pairs // classes, pairs % classes, samples), axis=1)


def confusion_matrix(counts: Integers, classes: int) -> Integers:
    """Return [classes, classes]: the number of samples by label (row) and prediction (column), from counted pairs."""
    matrix = np.zeros((classes, classes), dtype=np.int64)
    matrix[counts[:, 0], counts[:, 1]] = counts[:, 2]
    return matrix
