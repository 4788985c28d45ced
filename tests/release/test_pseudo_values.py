"""Pseudo-values against leaving out one sample at a time, with the measures of scikit-learn."""

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn import metrics
from torch import Tensor

from flyte_ddp.errors import UserError
from flyte_ddp.release.pseudo_values import (
    pseudo_values_by_calls,
    pseudo_values_of_auroc,
    pseudo_values_of_ratios,
)

Floats = NDArray[np.float64]


def leave_one_out(measure: Callable[..., float], *arrays: Floats) -> Floats:
    """By its definition."""
    samples = len(arrays[0])
    without = [measure(*(np.delete(array, place, axis=0) for array in arrays)) for place in range(samples)]
    return samples * measure(*arrays) - (samples - 1) * np.array(without)


def test_auroc() -> None:
    """With ties, and with targets that are not known."""
    random = np.random.default_rng(0)
    targets = (random.random((60, 3)) < [0.5, 0.2, 0.9]).astype(float)
    scores = np.round(random.normal(size=(60, 3)) + targets, 1)
    targets[random.random((60, 3)) < 0.1] = math.nan

    def auroc(scores: Floats, targets: Floats) -> float:
        known = ~np.isnan(targets)
        return float(np.mean([metrics.roc_auc_score(targets[at, k], scores[at, k]) for k, at in enumerate(known.T)]))

    found = pseudo_values_of_auroc(scores, targets).mean(axis=1)
    np.testing.assert_allclose(found, leave_one_out(auroc, scores, targets), rtol=1e-9)
    assert found.mean() == pytest.approx(auroc(scores, targets))


def test_macro_f1() -> None:
    random = np.random.default_rng(1)
    targets = random.random((80, 5)) < 0.3
    predicted = targets ^ (random.random((80, 5)) < 0.2)
    right = 2.0 * (predicted & targets)
    found = pseudo_values_of_ratios(right, right + (predicted ^ targets)).mean(axis=1)
    expected = leave_one_out(lambda y, p: metrics.f1_score(y, p, average="macro"), targets, predicted)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_miou() -> None:
    """scikit-learn takes pixels; the samples are images of 30 pixels each."""
    random = np.random.default_rng(2)
    truth = random.integers(0, 4, (25, 30))
    predicted = np.where(random.random((25, 30)) < 0.7, truth, random.integers(0, 4, (25, 30)))
    ours, theirs = (masks[:, :, None] == np.arange(4) for masks in (predicted, truth))
    found = pseudo_values_of_ratios((ours & theirs).sum(axis=1) * 1.0, (ours | theirs).sum(axis=1) * 1.0).mean(axis=1)
    expected = leave_one_out(
        lambda y, p: metrics.jaccard_score(y.ravel(), p.ravel(), average="macro"), truth, predicted
    )
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_a_label_of_one_sample_is_not_changed_by_it() -> None:
    """A label without any sample of its own has no pseudo-values."""
    scores = np.array([[0.9, 0.1], [0.2, 0.5], [0.6, 0.3]])
    targets = np.array([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    np.testing.assert_allclose(pseudo_values_of_auroc(scores, targets), [[1, math.nan]] * 3)
    above, below = np.array([[1.0, 0, 1], [0, 0, 0], [1, 0, 0]]), np.array([[2.0, 0, 1], [1, 0, 0], [1, 0, 0]])
    values = pseudo_values_of_ratios(above, below)
    np.testing.assert_allclose(values[:, 0], [3 / 2 - 2 / 2, 3 / 2 - 4 / 3, 3 / 2 - 2 / 3])
    assert np.isnan(values[:, 1]).all()
    np.testing.assert_allclose(values[:, 2], [1, 1, 1])
    positive = np.array([[1.0, 0, 0], [0, 0, 0], [0, 0, 0]])
    values = pseudo_values_of_ratios(above, below, positive)
    np.testing.assert_allclose(values[:, 0], [1 / 2, 3 / 2 - 4 / 3, 3 / 2 - 2 / 3])
    assert np.isnan(values[:, 2]).all()


def test_any_other_measure() -> None:
    random = np.random.default_rng(3)
    truth, predicted = random.normal(size=50), random.normal(size=50)

    def r2(columns: Mapping[str, Tensor]) -> float:
        return float(metrics.r2_score(columns["truth"].numpy(), columns["predicted"].numpy()))

    columns = {"truth": torch.from_numpy(truth), "predicted": torch.from_numpy(predicted)}
    expected = leave_one_out(metrics.r2_score, truth, predicted)
    np.testing.assert_allclose(pseudo_values_by_calls(r2, columns), expected)
    scores = {"loss": torch.arange(30.0, dtype=torch.float64)}
    values = pseudo_values_by_calls(lambda columns: float(columns["loss"].mean()), scores)
    np.testing.assert_allclose(values, np.arange(30.0), err_msg="a mean of scores gives the scores")
    with pytest.raises(UserError, match=r"20,001 samples are more than 20,000 .* scores\(columns\)"):
        pseudo_values_by_calls(r2, {"truth": torch.zeros(20_001)})
