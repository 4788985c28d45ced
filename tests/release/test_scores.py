"""Scores of samples and labels, against the objective's own measure without each sample in turn."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics
from torch import Tensor

from flyte_ddp.core.errors import UserError
from flyte_ddp.objectives import (
    BUILT_IN,
    HIGHER,
    Classification,
    Facts,
    Language,
    Multilabel,
    Objective,
    Regression,
    Segmentation,
    make_objective,
)
from flyte_ddp.release.checks import compare_evaluations
from flyte_ddp.release.evaluation import Evaluation
from flyte_ddp.release.policy import Policy
from flyte_ddp.release.scores import (
    needs_call_per_sample,
    pseudo_values_by_calls,
    pseudo_values_by_formula,
    pseudo_values_of_auroc,
    pseudo_values_of_ratios,
)
from flyte_ddp.release.statistics import NUMBERS, POINTS, ScoreDifferences, compare_scores
from flyte_ddp.release.vetoes import compare_labels, judge_parts_not_worse

LABELS = ("sun", "sea", "fog")
N = 60


class ByArea(Multilabel):
    measures: Mapping[str, str] = {"auroc": HIGHER, "f1": HIGHER, "average_precision": HIGHER}


class ByPrecision(Multilabel):
    measures: Mapping[str, str] = {"average_precision": HIGHER, "auroc": HIGHER, "f1": HIGHER}


class LossOnly(Objective):
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, 0] - targets).abs()


class Scored(LossOnly):
    measures: Mapping[str, str] = {"median": HIGHER}

    def scores(self, columns: Mapping[str, Tensor]) -> Tensor:
        return 1 - columns["loss"]

    def measure(self, columns: Mapping[str, Tensor]) -> dict[str, float]:
        return {"median": float(columns["loss"].median())}


def labels_of(random: np.random.Generator, noise: float, *, known: float = 0.9) -> tuple[Tensor, Tensor]:
    """Logits and targets of multilabel, some unknown; the targets depend on the generator's first draw alone."""
    truth = torch.from_numpy(random.random((N, 3)) < [0.5, 0.3, 0.2]).double()
    truth[torch.from_numpy(random.random((N, 3)) > known)] = math.nan
    return 2 * truth.nan_to_num(nan=0.5) - 1 + noise * torch.from_numpy(random.normal(size=(N, 3))), truth


def masks_of(random: np.random.Generator, noise: float) -> tuple[Tensor, Tensor]:
    truth = torch.from_numpy(random.integers(0, 3, (N, 4, 4)))
    logits = torch.nn.functional.one_hot(truth, 3).permute(0, 3, 1, 2) + noise * torch.from_numpy(
        random.normal(size=(N, 3, 4, 4))
    )
    truth[torch.from_numpy(random.random((N, 4, 4)) < 0.3)] = 255
    return logits, truth


def evaluate(objective: Objective, outputs: Tensor, targets: Tensor) -> Evaluation:
    parts = (slice(0, 25), slice(25, N))
    return Evaluation.from_batches(objective, ((outputs[part], targets[part], len(targets[part])) for part in parts))


def classes_of(random: np.random.Generator, noise: float) -> tuple[Tensor, Tensor]:
    """Logits of two classes, with ties; the second is rare."""
    truth = torch.from_numpy((random.random(N) < 0.2).astype(int))
    return torch.nn.functional.one_hot(truth, 2) + noise * torch.from_numpy(random.normal(size=(N, 2)).round()), truth


MEASURES = ("f1", "auroc", "average_precision", "balanced_accuracy")
CASES = {
    **{f"class by {name}": (Classification(Facts(("no", "yes"), select_by=name)), classes_of) for name in MEASURES},
    "macro F1": (
        Classification(Facts(LABELS, select_by="f1")),
        lambda *given: (labels_of(*given)[0], classes_of(*given)[1]),
    ),
    "balanced accuracy of three classes": (
        Classification(Facts(LABELS, select_by="balanced_accuracy")),
        lambda *given: (labels_of(*given)[0], labels_of(*given, known=1.0)[0].argmax(1)),
    ),
    "balanced accuracy": (Multilabel(Facts(LABELS, (3,), select_by="balanced_accuracy")), labels_of),
    "F1": (Multilabel(Facts(LABELS, (3,))), labels_of),
    "AUROC": (ByArea(Facts(LABELS, (3,))), labels_of),
    "average precision": (ByPrecision(Facts(LABELS, (3,))), labels_of),
    "mean IoU": (Segmentation(Facts(LABELS, (4, 4))), masks_of),
}


@pytest.mark.parametrize("case", CASES)
def test_scores_are_pseudo_values_of_the_main_measure(case: str) -> None:
    objective, make = CASES[case]
    assert not needs_call_per_sample(objective)
    found = evaluate(objective, *make(np.random.default_rng(0), 1.0))
    name, everything = objective.main_measure, torch.arange(N)
    without = np.array(
        [
            objective.measure({key: column[everything != place] for key, column in found.columns.items()})[name]
            for place in range(N)
        ]
    )
    np.testing.assert_allclose(found.scores, N * found.score - (N - 1) * without, rtol=1e-9)
    assert found.score == found.measures[name]
    np.testing.assert_allclose(pseudo_values_by_formula(objective, found.columns).mean(axis=1), found.scores)


@pytest.mark.parametrize("name", BUILT_IN)
def test_main_measures_of_built_in_objectives_need_no_calls(name: str) -> None:
    assert not needs_call_per_sample(make_objective(name, Facts(LABELS, (3,)), {}))


def test_scores_of_numbers_are_squared_errors() -> None:
    random = np.random.default_rng(1)
    truth, outputs = (torch.from_numpy(random.normal(size=(N, 1))) for _ in range(2))
    found = evaluate(Regression(Facts((), ())), outputs, truth[:, 0])
    np.testing.assert_allclose(found.scores, -((outputs - truth)[:, 0] ** 2))
    assert found.score == pytest.approx(math.sqrt(-found.scores.mean()))
    unknown = truth.clone()
    unknown[10:20] = math.nan
    known = np.r_[0:10, 20:N]
    with_unknown = evaluate(Regression(Facts((), ())), outputs, unknown[:, 0])
    assert with_unknown.scores.mean() == pytest.approx(found.scores[known].mean(), rel=1e-3)
    assert np.ptp(with_unknown.scores[10:20]) == pytest.approx(0), "an unknown number says nothing"


def test_scores_of_texts_are_losses_of_all_tokens() -> None:
    """A long text counts for more than a short one, as in the perplexity."""
    random = np.random.default_rng(2)
    tokens = torch.from_numpy(random.integers(0, 5, (N, 7)))
    tokens[torch.arange(7) >= torch.from_numpy(random.integers(1, 8, N))[:, None]] = -100
    outputs = torch.from_numpy(random.normal(size=(N, 7, 5)))
    found = evaluate(Language(Facts(tuple("abcde"))), outputs, tokens)

    def mean_loss(rows: Tensor) -> float:
        logits = outputs[rows].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, tokens[rows].flatten()).item()

    everything = torch.arange(N)
    without = np.array([mean_loss(everything[everything != place]) for place in range(N)])
    np.testing.assert_allclose(-found.scores, N * mean_loss(everything) - (N - 1) * without, rtol=1e-9)
    assert found.score == pytest.approx(math.exp(mean_loss(everything)))


def test_an_objective_of_ones_own_may_say_what_its_scores_are() -> None:
    random = np.random.default_rng(2)
    outputs, targets = torch.from_numpy(random.normal(size=(N, 1))), torch.from_numpy(random.normal(size=N))
    losses = (outputs[:, 0] - targets).abs().numpy()
    found = evaluate(LossOnly(Facts()), outputs, targets)
    np.testing.assert_allclose(found.scores, -losses)
    assert found.score == pytest.approx(losses.mean())
    np.testing.assert_allclose(evaluate(Scored(Facts()), outputs, targets).scores, 1 - losses)


def test_a_measure_that_the_split_does_not_define() -> None:
    outputs, targets = torch.zeros(N, 3, dtype=torch.float64), torch.zeros(N, 3, dtype=torch.float64)
    with pytest.raises(UserError, match="F1 is undefined on this test split"):
        evaluate(Multilabel(Facts(LABELS, (3,))), outputs, targets)
    outputs[7, 1] = math.nan
    found = evaluate(Multilabel(Facts(LABELS, (3,))), outputs, targets)
    assert (found.finite.sum(), found.finite[7], found.score, found.samples) == (N - 1, False, 0.0, N)


def test_the_same_scores_are_counts_or_differences() -> None:
    """Scores of 0 and 1 have the same p-values either way, and errors are shares of the champion's."""
    random = np.random.default_rng(4)
    mine, theirs = (random.random(500) < share for share in (0.8, 0.7))
    counts = compare_scores(mine * 1.0, theirs * 1.0, "accuracy")
    scores = ScoreDifferences(counts.values, "accuracy", NUMBERS)
    assert counts.unit == POINTS
    assert counts.p_value_of_gain() == pytest.approx(scores.p_value_of_gain(), rel=1e-12)
    assert counts.p_value_of_loss() == pytest.approx(scores.p_value_of_loss(), rel=1e-12)
    errors = compare_scores(np.array([-1.0, -3.0]), np.array([-2.0, -3.0]), "loss", is_loss=True)
    assert errors.describe() == "loss better by 20.00 %: 1 sample better and 0 worse of 2"
    assert compare_scores(np.zeros(3), np.zeros(3), "loss", is_loss=True).difference == 0


def test_a_label_that_loses_is_named() -> None:
    """The same targets; the second model knows nothing of one label."""
    objective = Multilabel(Facts(LABELS, (3,)))
    logits, truth = labels_of(np.random.default_rng(5), 0.3, known=1.0)
    worse = logits.clone()
    worse[:, 1] = torch.from_numpy(np.random.default_rng(6).normal(size=N))
    champion, challenger = (evaluate(objective, outputs, truth) for outputs in (logits, worse))
    check, rows = judge_parts_not_worse("label", compare_labels(LABELS, challenger, champion), Policy())
    assert [row.name for row in rows if not row.passed] == ["sea"]
    assert check.reason.startswith("label 'sea' loses: F1 worse by 0.")
    assert compare_evaluations(challenger, champion).p_value_of_gain() > 0.99
    same = evaluate(Classification(Facts(("a", "b"))), torch.eye(2).repeat(30, 1), torch.arange(N) % 2)
    assert compare_labels("ab", same, same) == {}


class Off(Objective):
    """Losses by a model's outputs of another form, and no scores."""

    def losses(self, outputs: Any, targets: Tensor) -> Tensor:
        return (outputs["a"] - targets) ** 2


class Wrong(LossOnly):
    def scores(self, columns: Mapping[str, Tensor]) -> Tensor:
        return torch.full_like(columns["loss"], torch.nan)


@pytest.mark.parametrize("others", [{"b": torch.zeros(4, 2)}, {"c": torch.zeros(4, 0)}])
def test_outputs_of_any_form_are_evaluated(others: dict[str, Tensor]) -> None:
    targets = torch.arange(4.0)
    for values, finite in ((targets + 1, True), (torch.tensor([1, torch.inf, 3, 4]), False)):
        found = Evaluation.from_batches(Off(Facts()), [({"a": values, **others}, targets, len(targets))])
        assert found.finite.tolist() == [True, finite, True, True]
        assert not finite or found.score == 1.0


def test_scores_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(UserError, match=r"scores have shape \[4\], and 4 are not finite: must be a finite number"):
        _ = Evaluation.from_batches(Wrong(Facts()), [(torch.zeros(4, 1), torch.zeros(4), 4)]).scores


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
    random, places = np.random.default_rng(3), np.arange(50)
    truth, predicted = random.normal(size=50), random.normal(size=50)

    def r2(columns: Mapping[str, Tensor]) -> float:
        return float(metrics.r2_score(columns["truth"].numpy(), columns["predicted"].numpy()))

    columns = {"truth": torch.from_numpy(truth), "predicted": torch.from_numpy(predicted)}
    without = [metrics.r2_score(truth[places != place], predicted[places != place]) for place in places]
    expected = 50 * metrics.r2_score(truth, predicted) - 49 * np.array(without)
    np.testing.assert_allclose(pseudo_values_by_calls(r2, columns), expected)
    scores = {"loss": torch.arange(30.0, dtype=torch.float64)}
    values = pseudo_values_by_calls(lambda columns: float(columns["loss"].mean()), scores)
    np.testing.assert_allclose(values, np.arange(30.0), err_msg="a mean of scores gives the scores")
    with pytest.raises(UserError, match=r"20,001 samples are more than 20,000 .* scores\(columns\)"):
        pseudo_values_by_calls(r2, {"truth": torch.zeros(20_001)})
