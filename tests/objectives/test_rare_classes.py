"""Two classes that are not equally common: measures, curves, the headline, predictions; against sklearn."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import rare_tasks
import torch
from predictions import predict_rows
from report_page import Page
from sklearn import metrics
from torch import Tensor
from training_runs import notes, records_of, train_in, weights

from flyte_ddp import catalog
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.text.sections import Curve, encode_sections
from flyte_ddp.datasets import fetch
from flyte_ddp.objectives import Facts, Objective, make_objective
from flyte_ddp.run import Result

HP = Hyperparameters(
    dataset="rare_tasks:table", model="rare_tasks:linear", optimizer="adamw", learning_rate=0.02, batch_size=256,
    epochs=4, precision="fp32", keep="best", select_by="auroc", num_ranks=1,
)  # fmt: skip
N = 300
Columns = dict[str, Tensor]


def columns_of(objective: Objective, outputs: Tensor, targets: Tensor) -> Columns:
    found = {name: column.double() for name, column in objective.columns(outputs, targets).items()}
    return {**found, "loss": objective.losses(outputs, targets).double().reshape(len(targets), -1).sum(1)}


def draw(classes: int, seed: int = 0, *, among: int | None = None) -> tuple[Tensor, Tensor]:
    """Logits with many ties, and targets of the first ``among`` classes."""
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.integers(-3, 4, (N, classes)) / 2)
    return logits, torch.from_numpy(random.integers(0, among or classes, N) * (random.random(N) < 0.4))


@pytest.mark.parametrize("weights", ["", "1,7"])
def test_measures_of_two_classes_are_scikit_learns(weights: str) -> None:
    """Also with ties; class weights are of the loss alone."""
    objective = make_objective("classification", Facts(("no", "yes"), class_weights=weights), {})
    logits, truth = draw(2)
    scores, predicted = logits.softmax(1)[:, 1].numpy(), logits.argmax(1).numpy()
    assert len(set(scores)) < 20
    found = objective.measure(columns_of(objective, logits, truth))
    assert found == pytest.approx(
        {
            "accuracy": metrics.accuracy_score(truth, predicted),
            "balanced_accuracy": metrics.balanced_accuracy_score(truth, predicted),
            "f1": metrics.f1_score(truth, predicted),
            "auroc": metrics.roc_auc_score(truth, scores),
            "average_precision": metrics.average_precision_score(truth, scores),
        },
        rel=1e-12,
    )


@pytest.mark.parametrize(("only", "defined"), [(0, {"accuracy"}), (1, {"accuracy", "f1", "average_precision"})])
def test_a_split_of_one_class_leaves_measures_undefined(only: int, defined: set[str]) -> None:
    objective = make_objective("classification", Facts(("no", "yes")), {})
    logits, _ = draw(2)
    columns = columns_of(objective, logits, torch.full((N,), only))
    found = objective.measure(columns)
    assert {name for name, value in found.items() if not math.isnan(value)} == defined
    sections = objective.sections(columns)
    assert not [section for section in sections if isinstance(section, Curve)]
    json.loads(encode_sections(sections), parse_constant=pytest.fail)


def test_curves_are_scikit_learns() -> None:
    objective = make_objective("classification", Facts(("no", "yes")), {})
    logits, truth = draw(2)
    columns = columns_of(objective, logits, truth)
    roc, precision, _ = [each for each in objective.sections(columns) if isinstance(each, Curve)]
    scores = columns["probability"]
    alarms, recall, _ = metrics.roc_curve(truth, scores, drop_intermediate=False)
    np.testing.assert_allclose((roc.x, roc.y), (alarms, recall))
    precisions, recalls, _ = metrics.precision_recall_curve(truth, scores)
    np.testing.assert_allclose((precision.x, precision.y), (recalls[-2::-1], precisions[-2::-1]))
    assert precision.chance == pytest.approx([truth.double().mean().item()] * 2)


def test_the_measures_that_select_by_may_name_are_those_of_the_objectives() -> None:
    facts = {"classification": Facts(("no", "yes")), "multilabel": Facts(("a", "b"), (2,))}
    for name, measures in catalog.MEASURES.items():
        assert (*make_objective(name, facts.get(name, Facts(("a", "b"))), {}).measures,) == measures


@pytest.mark.parametrize("objective", catalog.MEASURES)
def test_a_wrong_select_by_is_refused_with_the_choices(objective: str) -> None:
    with pytest.raises(UserError, match=f"unknown select_by 'acc'.*{catalog.MEASURES[objective][-1]}"):
        Hyperparameters(objective=objective, select_by="acc")


def train(folder: Path, hp: Hyperparameters) -> Result:
    return train_in(folder / "run", hp, fetch(hp.dataset, "", folder / "cache", progress="off"))


@pytest.mark.slow
@pytest.mark.usefixtures("user_models")
def test_rows_are_shown_with_their_inputs_by_name(tmp_path: Path) -> None:
    """The worst mistakes of a real run, and the first predictions of its model."""
    hp = replace(HP, dataset="rare_tasks:named", model="rare_tasks:OfNamed", epochs=1, select_by="loss")
    result = train(tmp_path, hp)
    inputs, _ = rare_tasks.draw_rows()
    header = ["Sample", "Prediction", "Truth", "Score", "age", "income"]
    predict_rows(result.model, result.sidecar, tmp_path / "p.csv", dataset=tmp_path / "cache")
    for path, shown in ((result.report, 16), (tmp_path / "p.html", 24)):
        rows = Page(path.read_text()).rows()
        rows = rows[rows.index(header) + 1 :][:shown]
        assert len(rows) == shown
        for name, *_, age, income in rows:
            expected = inputs[int(name.removeprefix("sample "))][:2]
            assert [float(age), float(income)] == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("user_models")
def test_a_rare_class_is_measured_selected_and_shown_by_the_auroc(tmp_path: Path) -> None:
    """From the real run: headline, page, sidecar and predictions."""
    result = train(tmp_path, HP)
    rows, truth = (part[: rare_tasks.TESTS] for part in rare_tasks.draw_rows())
    trained = weights(result)
    scores = (torch.from_numpy(rows) @ trained["weight"].T + trained["bias"]).double().softmax(1)[:, 1].numpy()
    assert [*result.measures] == ["auroc", "accuracy", "balanced_accuracy", "f1", "average_precision", "loss"]
    assert result.measures["auroc"] == pytest.approx(metrics.roc_auc_score(truth, scores), abs=1e-6)
    evaluations = records_of(result, "evaluation")
    assert result.epoch_accuracies == [record["test_auroc"] for record in evaluations]
    best = max(record["validation_auroc"] for record in evaluations)
    sidecar = json.loads(result.sidecar.read_text())
    kept = next(record for record in evaluations if record["epoch"] == sidecar["metrics"]["kept_epoch"])
    assert kept["validation_auroc"] == best
    page = Page(result.report.read_text())
    value, detail = page.tiles()["Test AUROC"]
    assert (value, "average precision" in detail) == (f"{result.measures['auroc']:.4g}", True)
    assert page.texts("h3")[page.texts("h3").index("ROC curve") + 1] == "Precision-recall curve", "side by side"
    rows = predict_rows(result.model, result.sidecar, tmp_path / "p.csv", dataset=tmp_path / "cache")
    np.testing.assert_allclose([float(row["score_yes"]) for row in rows], scores, atol=1e-5)


@pytest.mark.usefixtures("user_models")
def test_a_measure_of_two_classes_is_refused_of_three_before_ranks_start(tmp_path: Path) -> None:
    hp = replace(HP, dataset="objective_tasks:classes", model="objective_tasks:flat")
    with pytest.raises(UserError, match=r"'auroc'.*two classes, not 3; choose loss, accuracy, bal"):
        train(tmp_path, hp)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("user_models")
def test_a_measure_that_the_validation_split_does_not_define_is_said(tmp_path: Path) -> None:
    """None of the three samples that are held out is positive."""
    result = train(tmp_path, replace(HP, validation_fraction=3 / 8000, epochs=2))
    assert {record["validation_auroc"] for record in records_of(result, "evaluation")} == {None}
    said = "select_by='auroc' is not defined on the validation split"
    assert any(note.startswith(said) for note in notes(result))
