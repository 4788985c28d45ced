"""Classes that are not equally common: the gate goes by the first measure of the objective, whatever its class."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics
from torch import Tensor

from flyte_ddp.objectives import HIGHER, Classification, Facts, Multilabel, Objective
from flyte_ddp.release.checks import compare_evaluations, judge_above_constant
from flyte_ddp.release.evaluation import Evaluation, evaluate_best_constant

N, CLASSES = 400, ("no", "yes")


def measured_by(function: Callable[..., float], *, by_scores: bool) -> type[Classification]:
    """A user's classification of two classes, with a measure of scikit-learn's as its first."""

    class Own(Classification):
        measures: Mapping[str, str] = {"own": HIGHER, "accuracy": HIGHER}

        def columns(self, outputs: Any, targets: Tensor) -> dict[str, Tensor]:
            return {**super().columns(outputs, targets), "yes": outputs.softmax(1)[:, 1]}

        def measure(self, columns: Mapping[str, Tensor]) -> dict[str, float]:
            found = columns["yes" if by_scores else "prediction"].numpy()
            return {**super().measure(columns), "own": float(function(columns["truth"].numpy(), found))}

    return Own


def logits_of(strength: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits that are never above 0 for "yes", and true classes of which 5 % are "yes"."""
    random = np.random.default_rng(seed)
    truth = (np.arange(N) % 20 == 0).astype(np.int64)
    scores = strength * truth + random.normal(size=N) - 12
    return torch.from_numpy(np.stack((np.zeros(N), scores), 1)), torch.from_numpy(truth)


def evaluate(objective: Objective, outputs: Tensor, targets: Tensor) -> Evaluation:
    return Evaluation.from_batches(objective, [(outputs, targets, len(targets))])


def area(truth: np.ndarray, scores: np.ndarray) -> float:
    """The area under the ROC curve, by ranks; many times as fast as scikit-learn's."""
    ranks, positive = stats.rankdata(scores), truth == 1
    return float((ranks[positive].mean() - (positive.sum() + 1) / 2) / (~positive).sum())


AUROC = measured_by(area, by_scores=True)


def test_a_model_that_never_names_the_rare_class_is_judged_by_its_auroc() -> None:
    objective = AUROC(Facts(CLASSES))
    good, better, noise = (evaluate(objective, *logits_of(strength)) for strength in (1.4, 2.2, 0.0))
    assert (good.columns["prediction"] == 0).all()
    assert good.score == pytest.approx(metrics.roc_auc_score(good.columns["truth"], logits_of(1.4)[0][:, 1]))
    assert 0.8 < good.score < 0.9
    assert judge_above_constant(good, 0.03).passed
    check = judge_above_constant(noise, 0.03)
    assert not check.passed
    assert check.reason.startswith("the best constant answer has own 0.5, and the model has 0.")
    pair = compare_evaluations(better, good)
    assert pair.difference == pytest.approx(better.score - good.score, abs=0.003)
    assert pair.p_value_of_gain() < 0.001
    assert pair.p_value_of_loss() > 0.99
    assert compare_evaluations(evaluate(objective, *logits_of(1.4, seed=1)), good).p_value_of_gain() > 0.05


@pytest.mark.parametrize(
    ("function", "by_scores", "expected"),
    [
        (metrics.roc_auc_score, True, 0.5),
        (metrics.average_precision_score, True, 0.05),
        (metrics.balanced_accuracy_score, False, 0.5),
        (metrics.accuracy_score, False, 0.95),
        (metrics.f1_score, False, 2 * 0.05 / 1.05),
    ],
)
def test_the_best_constant_answer_of_a_measure(
    function: Callable[..., float], by_scores: bool, expected: float
) -> None:
    objective = measured_by(function, by_scores=by_scores)(Facts(CLASSES))
    found = evaluate_best_constant(evaluate(objective, *logits_of(2.0)))
    assert found is not None
    assert found.score == pytest.approx(expected)


def test_the_best_constant_answer_of_several_labels_names_them_all() -> None:
    objective, random = Multilabel(Facts(("a", "b"), (2,))), np.random.default_rng(0)
    truth = torch.from_numpy((random.random((N, 2)) < (0.3, 0.1)).astype(np.float32))
    model = evaluate(objective, truth * 8 - 6 + torch.from_numpy(random.normal(size=(N, 2))), truth)
    constant = evaluate_best_constant(model)
    assert constant is not None
    assert constant.score == pytest.approx(metrics.f1_score(truth, np.ones((N, 2)), average="macro"))
    assert judge_above_constant(model, 0.03).passed
    assert not judge_above_constant(evaluate(objective, torch.full((N, 2), 1.0), truth), 0.03).passed
