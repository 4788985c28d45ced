"""The threshold of a rare class: its fit against a search over all thresholds and scikit-learn's, and what is shown."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn import metrics
from sklearn.calibration import calibration_curve
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import TunedThresholdClassifierCV

from flyte_ddp import catalog
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.objectives.objective import Columns
from flyte_ddp.core.text.sections import Curve, Section, Table
from flyte_ddp.objectives import Classification, Facts, make_objective
from flyte_ddp.objectives.threshold import fit_threshold

NAMES = "no", "yes"
Goal = Callable[[int, int, int], float]  # of hits, false alarms and misses: more is better
RULES: dict[str, Goal] = {
    "f1": lambda hits, alarms, missed: 2 * hits / (2 * hits + alarms + missed),
    "recall=0.9": lambda hits, alarms, missed: hits / (hits + alarms) if hits / (hits + missed) >= 0.9 else -1.0,
    "recall=1": lambda hits, alarms, missed: hits / (hits + alarms) if not missed else -1.0,
    "cost=10": lambda _, alarms, missed: -(10 * missed + alarms),
    "cost=0.25": lambda _, alarms, missed: -(0.25 * missed + alarms),
}


def draw(seed: int, samples: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Truths with at least one positive, and scores of which many are equal; some are 0 or 1."""
    random = np.random.default_rng(seed)
    truth = random.random(samples) < 0.2
    truth[0] = True
    return truth, (random.normal(0.35 + 0.3 * truth, 0.25).clip(0, 1) * 20).round() / 20


def judge(goal: Goal, truth: np.ndarray, scores: np.ndarray, threshold: float) -> float:
    predicted = scores >= threshold
    return goal(int((predicted & truth).sum()), int((predicted & ~truth).sum()), int((~predicted & truth).sum()))


@pytest.mark.parametrize("rule", RULES)
def test_no_threshold_is_better_than_the_fitted_one(rule: str) -> None:
    """All scores, all places between them, and both ends; of equally good ones the highest is taken."""
    for seed in range(200):
        truth, scores = draw(seed)
        occurring = np.unique([0.0, *scores, 1.0])
        tried = np.unique([*occurring, *(occurring[1:] + occurring[:-1]) / 2])
        values = np.array([judge(RULES[rule], truth, scores, each) for each in tried])
        fitted = fit_threshold(rule, truth, scores)
        assert judge(RULES[rule], truth, scores, fitted) == values.max()
        highest = tried[np.flatnonzero(values == values.max())[-1]]
        assert ((scores >= fitted) == (scores >= highest)).all()
        assert 0 <= fitted <= 1
        order = np.random.default_rng(seed).permutation(len(truth))
        assert fit_threshold(rule, truth[order], scores[order]) == fitted


def test_the_fitted_threshold_has_the_best_f1_and_precision_of_scikit_learns_curve() -> None:
    for seed in range(20):
        truth, scores = draw(seed)
        precision, recall, thresholds = metrics.precision_recall_curve(truth, scores)
        predicted = scores >= fit_threshold("f1", truth, scores)
        best = max(metrics.f1_score(truth, scores >= each) for each in thresholds)
        assert metrics.f1_score(truth, predicted) == best
        predicted = scores >= fit_threshold("recall=0.8", truth, scores)
        assert metrics.recall_score(truth, predicted) >= 0.8
        assert metrics.precision_score(truth, predicted) == precision[:-1][recall[:-1] >= 0.8].max()


def test_the_fitted_threshold_is_at_least_as_good_as_that_of_scikit_learns_search() -> None:
    """TunedThresholdClassifierCV tries 100 thresholds between the lowest and the highest score."""
    random = np.random.default_rng(0)
    rows = random.normal(size=(600, 3))
    truth = random.random(600) < 1 / (1 + np.exp(2.5 - rows @ np.array([1.5, -1.0, 0.0])))
    model = LogisticRegression().fit(rows, truth)
    search = TunedThresholdClassifierCV(model, scoring="f1", cv="prefit", refit=False).fit(rows, truth)
    scores = model.predict_proba(rows)[:, 1]
    ours, theirs = (scores >= each for each in (fit_threshold("f1", truth, scores), search.best_threshold_))
    assert metrics.f1_score(truth, theirs) == pytest.approx(search.best_score_)
    assert metrics.f1_score(truth, ours) >= search.best_score_ > metrics.f1_score(truth, scores >= 0.5)


def test_a_threshold_is_halfway_between_the_scores_that_it_divides() -> None:
    truth, scores = np.array([False, True, True]), np.array([0.25, 0.5, 0.75])
    assert fit_threshold("f1", truth, scores) == 0.375
    assert fit_threshold("f1", truth, np.array([0.5, np.nextafter(0.5, 1), 0.75])) == np.nextafter(0.5, 1)
    assert fit_threshold("f1", ~truth, 1 - scores) == 0.625
    assert fit_threshold("recall=1", np.array([False, True]), np.array([0.5, 0.25])) == 0.125, "all are positive"
    rare = np.array([True, False])
    assert fit_threshold("cost=0.5", rare, np.array([0.25, 0.5])) == 0.75, "none is positive"
    certain = np.array([True, False, False]), np.array([0.25, 0.25, 1.0])
    assert fit_threshold("cost=0.5", *certain) == 0.625, "any threshold predicts the score 1 to be positive"
    assert fit_threshold("0.3", *certain) == 0.3


def make_columns(objective: Classification, logits: np.ndarray, truth: np.ndarray) -> Columns:
    outputs, targets = torch.from_numpy(logits), torch.from_numpy(truth.astype(np.int64))
    found = {name: column.double() for name, column in objective.columns(outputs, targets).items()}
    return {**found, "loss": objective.losses(outputs, targets)}


def make(rule: str = "", threshold: float | None = None) -> Classification:
    found = make_objective("classification", Facts(NAMES, threshold_rule=rule, threshold=threshold), {})
    assert isinstance(found, Classification)
    return found


def draw_columns(seed: int = 3, samples: int = 400) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Truths, logits and the second class's probabilities, of which many are equal."""
    random = np.random.default_rng(seed)
    truth = random.random(samples) < 0.15
    logits = np.stack([np.zeros(samples), (random.normal(-2.5 + 2 * truth, 1) * 4).round() / 4], axis=1)
    return truth, logits, 1 / (1 + np.exp(-logits[:, 1]))


def test_measures_predictions_and_answers_are_those_of_the_threshold() -> None:
    truth, logits, scores = draw_columns()
    unfitted = make("f1")
    objective = unfitted.with_fitted_threshold(make_columns(unfitted, logits, truth))
    threshold = objective.facts.threshold
    assert unfitted.facts.threshold is None, "the objective itself is not changed"
    assert threshold == pytest.approx(fit_threshold("f1", truth, scores), rel=1e-12)
    assert threshold < 0.45, "else the likelier class would do"
    columns, predicted = make_columns(objective, logits, truth), scores >= threshold
    np.testing.assert_array_equal(columns["prediction"], predicted)
    assert objective.measure(columns) == pytest.approx(
        {
            "accuracy": metrics.accuracy_score(truth, predicted),
            "balanced_accuracy": metrics.balanced_accuracy_score(truth, predicted),
            "f1": metrics.f1_score(truth, predicted),
            "auroc": metrics.roc_auc_score(truth, scores),
            "average_precision": metrics.average_precision_score(truth, scores),
        },
        rel=1e-12,
    )
    answers = objective.answers(torch.from_numpy(logits).float())
    assert answers["prediction"] == [NAMES[int(each)] for each in predicted]
    np.testing.assert_allclose(answers["score_yes"], scores, rtol=1e-5)
    np.testing.assert_allclose(answers["score"], np.where(predicted, scores, 1 - scores), rtol=1e-5)
    assert objective.with_threshold(threshold) is objective
    assert objective.with_threshold(None).answers(torch.from_numpy(logits)) == make().answers(torch.from_numpy(logits))


def test_a_validation_split_without_positives_is_refused() -> None:
    truth, logits, _ = draw_columns()
    with pytest.raises(UserError, match=r"threshold='f1'.*validation split, which has no sample of class 'yes'; raise"):
        make("f1").with_fitted_threshold(make_columns(make(), logits, truth & False))
    with pytest.raises(UserError, match="no sample of class 'yes'"):
        make("recall=0.9").with_fitted_threshold({})
    assert make("0.25").with_fitted_threshold({}).facts.threshold == 0.25, "a number is not fitted"


def own_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")


class OwnColumns(Classification):
    """Decides between classes in a way that no threshold of ours changes."""

    def columns(self, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {**super().columns(outputs, targets), "prediction": outputs.argmin(1)}


def test_what_a_threshold_cannot_decide_is_refused() -> None:
    for classes in ((), ("a",), ("a", "b", "c")):
        with pytest.raises(UserError, match=f"threshold='f1'.*two classes, not {len(classes)};"):
            make_objective("classification", Facts(classes, threshold_rule="f1"), {})
    facts = Facts(NAMES, threshold_rule="f1")
    with pytest.raises(UserError, match=r"threshold='f1'.*user-defined columns or answers"):
        make_objective(f"{__name__}:OwnColumns", facts, {})
    own = make_objective(f"{__name__}:own_loss", facts, {})
    assert "threshold" in own.used_hyperparameters, "a loss of one's own leaves the decision to us"
    assert "threshold" not in make_objective(f"{__name__}:own_loss", Facts((), (2,)), {}).used_hyperparameters


def find(sections: list[Section], title: str) -> Section:
    return next(each for each in sections if getattr(each, "title", "") == title)


def test_the_report_has_precision_and_recall_at_the_threshold() -> None:
    truth, logits, scores = draw_columns()
    for rule, words in (
        ("f1", "highest F1 on the validation split"),
        ("recall=0.75", "recall of at least 0.75"),
        ("cost=4", "a miss costs as much as 4 false alarms"),
        ("0.3", "is set by the hyperparameter threshold"),
        ("", "above 0.5 are predicted 'yes'. The hyperparameter threshold changes"),
    ):
        objective = make(rule)
        objective = objective.with_fitted_threshold(make_columns(objective, logits, truth))
        table = find(objective.sections(make_columns(objective, logits, truth)), "Threshold")
        assert isinstance(table, Table)
        assert words in table.text
        fitted = objective.facts.threshold
        rows = {row[0]: row[1:] for row in table.rows}
        assert [*rows] == [*([] if fitted is None else [f"{fitted:.4g}"]), "0.5"]
        for name, threshold in {"0.5": 0.5 + 1e-12, **({} if fitted is None else {f"{fitted:.4g}": fitted})}.items():
            predicted = scores >= threshold
            [[_, alarms], [missed, hits]] = metrics.confusion_matrix(truth, predicted).tolist()
            shares = [
                score(truth, predicted) for score in (metrics.precision_score, metrics.recall_score, metrics.f1_score)
            ]
            assert rows[name] == pytest.approx([hits + alarms, hits, alarms, missed, *shares])


def test_precision_and_lift_at_the_top_are_the_mean_over_orders_of_equal_scores() -> None:
    """Of all orders, for few samples; the first 10 % of 20 samples are 2, and one of them is among equal ones."""
    truth = np.array([1, 1, 0, 1, 0, 0] + [0] * 14, dtype=bool)
    logits = np.stack([np.zeros(20), [3.0, 2, 2, 2, 2, 1] + [-1.0] * 14], axis=1)
    table = find(make().sections(make_columns(make(), logits, truth)), "Samples with the highest scores")
    assert isinstance(table, Table)
    orders = [[0, *middle] for middle in itertools.permutations(range(1, 5))]
    expected = np.mean([truth[order[:2]].mean() for order in orders])
    assert [row[:2] for row in table.rows] == [["1 %", 1], ["5 %", 1], ["10 %", 2]]
    assert table.rows[2][2:] == pytest.approx([expected, expected / truth.mean(), 2 * expected / truth.sum()])
    assert table.rows[0][2:] == pytest.approx([1.0, 20 / 3, 1 / 3])
    backwards = make_columns(make(), logits[::-1].copy(), truth[::-1].copy())
    assert find(make().sections(backwards), table.title).rows == table.rows, "the order of samples changes nothing"


def test_the_calibration_curve_is_scikit_learns() -> None:
    truth, logits, scores = draw_columns()
    curve = find(make().sections(make_columns(make(), logits, truth)), "Calibration")
    assert isinstance(curve, Curve)
    shares, means = calibration_curve(truth, scores, n_bins=10)
    np.testing.assert_allclose((curve.x, curve.y), (means, shares))
    counts = [int(((scores > low) & (scores <= high)).sum()) for low, high in itertools.pairwise(np.linspace(0, 1, 11))]
    error = np.average(np.abs(means - shares), weights=[count for count in counts if count])
    assert (
        f"Expected calibration error {error:.4f}. Brier score {metrics.brier_score_loss(truth, scores):.4f};"
        in curve.text
    )
    constant = metrics.brier_score_loss(truth, np.full(len(truth), truth.mean()))
    assert f"for all samples gives {constant:.4f}" in curve.text


def test_predictions_of_one_class_alone_are_said() -> None:
    truth, logits, _ = draw_columns()
    always, columns = make("0.999"), make_columns(make(threshold=0.999), logits, truth)
    share = f"{100 * (1 - truth.mean()):.2f}\N{NO-BREAK SPACE}%"
    text = f"All 400 test samples are predicted 'no', which is right for {share} of them."
    assert always.describe_single_prediction(columns) == text
    assert make().describe_single_prediction(make_columns(make(), logits, truth)) == ""
    single = {name: column[:1] for name, column in columns.items()}
    assert make().describe_single_prediction(single) == "", "one sample has one prediction"


def test_thresholds_are_of_classification_alone() -> None:
    takers = [name for name, settings in catalog.SETTINGS_OF_OBJECTIVES.items() if "threshold" in settings]
    assert takers == ["classification"]
