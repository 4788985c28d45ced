"""A threshold from the training to the page, the table of predictions, the gate and the watch; against scikit-learn."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rare_tasks
import torch
from cli import HELPERS
from gate import Gate
from predictions import predict_rows
from report_page import Page
from sklearn import metrics
from training_runs import QUIET, notes, records_of, resumed_steps, train_in, weights

from flyte_ddp import load_model
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import RankError, UserError
from flyte_ddp.core.order.sampling import split_indices
from flyte_ddp.core.text.formatting import format_measure
from flyte_ddp.core.training.training_state import TrainingState
from flyte_ddp.datasets import fetch
from flyte_ddp.monitor.source import WindowSource
from flyte_ddp.monitor.watch import predict_window
from flyte_ddp.release.policy import Policy
from flyte_ddp.release.promotion import promote_version, require_champion, store_version
from flyte_ddp.release.registry import Registry
from flyte_ddp.run import Result

pytestmark = pytest.mark.slow
HP = Hyperparameters(
    dataset="rare_tasks:table", model="rare_tasks:linear", optimizer="adamw", learning_rate=0.02, batch_size=256,
    epochs=3, precision="fp64", num_ranks=1, select_by="f1",
)  # fmt: skip
RUNS = {
    "argmax": HP,
    "f1": replace(HP, threshold="f1"),
    "recall": replace(HP, threshold="recall=0.9", seed=1),
    "cost": replace(HP, threshold="cost=12", class_weights="balanced", keep="best", ema_decay=0.9),
    "average": replace(HP, threshold="f1", keep="ema", ema_decay=0.9, objective="rare_tasks:focal"),
    "fixed": replace(HP, threshold="0.2", validation_fraction=0),
    "never": replace(HP, threshold="0.999"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(HELPERS)
        yield fetch(HP.dataset, "", tmp_path_factory.mktemp("data"), progress="off")


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    done: dict[str, Result] = {}

    def train_once(name: str) -> Result:
        if name not in done:
            done[name] = train_in(tmp_path_factory.mktemp(name), RUNS[name], data)
        return done[name]

    return train_once


def sidecar_of(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.sidecar.read_text())
    return found


def score(result: Result, rows: np.ndarray) -> np.ndarray:
    """Return the second class's probabilities of the model in the file."""
    trained = {name: value.double() for name, value in weights(result).items()}
    logits = torch.from_numpy(rows).double() @ trained["weight"].T + trained["bias"]
    return logits.softmax(1)[:, 1].numpy()


def split_rows(hp: Hyperparameters) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return rows and truths of the validation and the test split."""
    rows, truth = rare_tasks.draw_rows()
    held_out = rare_tasks.TESTS + split_indices(rare_tasks.ROWS, hp.validation_fraction, hp.seed)[1]
    return {
        "validation": (rows[held_out], truth[held_out]),
        "test": (rows[: rare_tasks.TESTS], truth[: rare_tasks.TESTS]),
    }


def cost(truth: np.ndarray, predicted: np.ndarray) -> float:
    [[_, alarms], [missed, _]] = metrics.confusion_matrix(truth, predicted)
    return float(-(12 * missed + alarms))


def precision_at_recall(truth: np.ndarray, predicted: np.ndarray) -> float:
    return metrics.precision_score(truth, predicted) if metrics.recall_score(truth, predicted) >= 0.9 else -1.0


@pytest.mark.parametrize(
    ("name", "goal"),
    [("f1", metrics.f1_score), ("recall", precision_at_recall), ("cost", cost), ("average", metrics.f1_score)],
)
def test_the_threshold_is_the_best_on_the_validation_split_for_the_kept_weights(
    name: str, goal: Callable[..., float], run: Callable[[str], Result]
) -> None:
    """Also with class weights, a moving average, the best evaluation's weights, and a loss of one's own."""
    result, splits = run(name), split_rows(RUNS[name])
    threshold, (rows, truth) = sidecar_of(result)["threshold"], splits["validation"]
    scores = score(result, rows)
    occurring = np.unique(scores)
    candidates = occurring[:: max(1, len(occurring) // 150)]  # scikit-learn's functions take a millisecond each
    best = max(goal(truth, scores >= each) for each in candidates)
    assert goal(truth, scores >= threshold) >= best
    if name == "f1":
        precision, recall, _ = metrics.precision_recall_curve(truth, scores)
        curve = 2 * precision * recall / np.maximum(precision + recall, 1e-300)
        assert goal(truth, scores >= threshold) == pytest.approx(curve.max(), rel=1e-12)
    assert not (scores == threshold).any()


@pytest.mark.parametrize("name", ["f1", "recall", "cost", "fixed"])
def test_measures_page_and_predictions_are_those_of_the_threshold(
    name: str, run: Callable[[str], Result], data: Path, tmp_path: Path
) -> None:
    result, (rows, truth) = run(name), split_rows(RUNS[name])["test"]
    sidecar, scores = sidecar_of(result), score(run(name), rows)
    predicted = scores >= sidecar["threshold"]
    assert predicted.tolist() != (scores >= 0.5).tolist()
    expected = {
        "f1": metrics.f1_score(truth, predicted),
        "accuracy": metrics.accuracy_score(truth, predicted),
        "balanced_accuracy": metrics.balanced_accuracy_score(truth, predicted),
        "auroc": metrics.roc_auc_score(truth, scores),
        "average_precision": metrics.average_precision_score(truth, scores),
    }
    found = dict(result.measures)
    del found["loss"]
    assert found == pytest.approx(expected, rel=1e-9)
    assert sidecar["metrics"]["test_f1"] == found["f1"]
    if RUNS[name].keep == "last":
        assert records_of(result, "evaluation")[-1]["test_f1"] == found["f1"], "the course is that of the decision, too"
    html = result.report.read_text()
    page = Page(html)
    assert page.tiles()["Test F1"][0] == format_measure("f1", found["f1"])
    matrix = metrics.confusion_matrix(truth, predicted)
    for count in matrix.ravel():
        assert f">{count:,}<" in html or f">{count}<" in html, "the cells of the confusion matrix"
    shown = f"{sidecar['threshold']:.4g}"
    row = next(row for row in page.rows() if row[0] == shown)
    assert row[1:5] == [f"{count:,}" for count in (matrix[:, 1].sum(), matrix[1, 1], matrix[0, 1], matrix[1, 0])]
    table = predict_rows(result.model, result.sidecar, tmp_path / "p.csv", dataset=data)
    assert [row["prediction"] for row in table] == ["yes" if each else "no" for each in predicted]
    assert [row["id"] for row in table] == [*map(str, range(len(table)))], "the table is in the order of the rows"
    np.testing.assert_allclose([float(row["score_yes"]) for row in table], scores, rtol=1e-4)
    first = Page((tmp_path / "p.html").read_text())
    assert first.texts("h2")[1] == "The 24 with the highest score of 'yes'"
    assert [row[0] for row in first.rows() if row and row[0].isdigit()] == [*map(str, np.argsort(-scores)[:24])]
    assert ["Predicted 'yes'", f"{predicted.sum():,}, with a score of at least {shown}"] in first.rows()


def test_a_threshold_changes_no_weights_and_no_threshold_changes_nothing(run: Callable[[str], Result]) -> None:
    assert run("f1").model.read_bytes() == run("argmax").model.read_bytes()
    assert "threshold" not in sidecar_of(run("argmax"))
    rows, truth = split_rows(HP)["test"]
    scores = score(run("argmax"), rows)
    assert run("argmax").measures["f1"] == pytest.approx(metrics.f1_score(truth, scores > 0.5), rel=1e-12)
    assert run("f1").measures["f1"] > run("argmax").measures["f1"]


def test_any_number_of_ranks_finds_the_same_threshold(run: Callable[[str], Result], data: Path, tmp_path: Path) -> None:
    found = train_in(tmp_path / "run", replace(RUNS["f1"], num_ranks=3), data)
    assert sidecar_of(found)["threshold"] == pytest.approx(sidecar_of(run("f1"))["threshold"], rel=1e-9)
    assert dict(found.measures) == pytest.approx(dict(run("f1").measures), rel=1e-9)


def test_a_resumed_run_has_the_threshold_of_a_run_that_came_through(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kept weights are those of an evaluation before the cut, and are not evaluated again."""
    hp, update = (
        replace(RUNS["f1"], keep="best", select_by="accuracy", epochs=4, learning_rate=0.5),
        TrainingState.update_average,
    )
    expected = train_in(tmp_path / "run", hp, data)
    kept = sidecar_of(expected)["metrics"]["kept_epoch"]
    assert kept < hp.epochs

    def fail_later(state: TrainingState) -> None:
        if state.step == kept * state.steps_per_epoch + 3:
            raise MemoryError
        update(state)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingState, "update_average", fail_later)
        with pytest.raises(RankError, match="MemoryError"):
            train_in(tmp_path / "again", hp, data)
    again = train_in(tmp_path / "again", hp, data)
    assert resumed_steps(again)[-1] > 0
    assert again.model.read_bytes() == expected.model.read_bytes()
    assert sidecar_of(again)["threshold"] == sidecar_of(expected)["threshold"]
    assert dict(again.measures) == dict(expected.measures)


def test_a_model_in_other_programs_decides_as_the_documents_say(run: Callable[[str], Result]) -> None:
    """By probabilities, and by logits alone, as an ONNX returns them."""
    rows, _ = split_rows(HP)["test"]
    model, sidecar = load_model(run("f1").model, run("f1").sidecar)
    with torch.no_grad():
        logits = model(torch.from_numpy(rows))
    threshold = sidecar.threshold
    expected = (score(run("f1"), rows) >= threshold).tolist()
    assert (logits.softmax(1)[:, 1] >= threshold).tolist() == expected
    assert (logits[:, 1] - logits[:, 0] >= np.log(threshold / (1 - threshold))).tolist() == expected


def test_the_gate_judges_each_model_by_its_own_threshold(
    run: Callable[[str], Result], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that has none; the page says what decides, and what is watched is what was judged."""
    runs = {name: run(name) for name in ("argmax", "f1", "recall", "never")}
    gate = Gate(runs, Registry(str(tmp_path / "registry"), "model"), data, tmp_path)
    champion = gate.judge("recall")
    stored = store_version(gate.registry, *champion.model.files, champion.verdict, {})
    promote_version(gate.registry, stored.name, "a test", by="me")
    (rows, truth), own = split_rows(HP)["test"], sidecar_of(runs["recall"])["threshold"]
    at = {
        each: metrics.f1_score(truth, score(runs["recall"], rows) >= each)
        for each in (own, 0.5, sidecar_of(runs["f1"])["threshold"])
    }
    assert len({*at.values()}) == 3, "another's threshold would be noticed"
    for name in ("f1", "argmax"):
        found = gate.judge(name)
        assert found.verdict.challenger_score == pytest.approx(runs[name].measures["f1"], rel=1e-6)
        assert found.verdict.champion_score == pytest.approx(at[own], rel=1e-6)
        assert found.challenger is not None
        assert found.champion is not None
        for evaluation, model in ((found.challenger, name), (found.champion, "recall")):
            scores, limit = score(runs[model], rows), sidecar_of(runs[model]).get("threshold", 0.5)
            np.testing.assert_array_equal(evaluation.columns["prediction"], scores >= limit)
            np.testing.assert_allclose(
                evaluation.columns["confidence"], np.where(scores >= limit, scores, 1 - scores), rtol=1e-5
            )
    assert "class 'yes' loses: " in gate.judge("f1").verdict.reason, "by what each threshold decides"
    verdict = gate.release("f1", policy=Policy(class_loss=1.0)).verdict
    assert verdict.promotes, verdict.reason
    html = (tmp_path / "page.html").read_text()
    for title, name in (("Challenger", "f1"), ("Champion", "recall")):
        assert f"{title}: Samples with a score of at least {sidecar_of(runs[name])['threshold']:.4g} are" in html
    with pytest.raises(UserError, match="already in the registry, with another threshold"):
        gate.release("argmax")

    monkeypatch.setenv("FLYTE_DDP_RUNS", str(tmp_path / "runs"))
    window, watched = predict_window(
        gate.registry,
        require_champion(gate.registry),
        WindowSource(dataset=HP.dataset),
        Path(),
        settings=QUIET,
        by="me",
    )
    limit = sidecar_of(runs["f1"])["threshold"]
    predicted = np.where(score(runs["f1"], rows) >= limit, "yes", "no")
    assert watched.columns["prediction"].tolist() == predicted.tolist()
    assert window.score == window.held_out == verdict.challenger_score
    assert not window.moved


def test_a_model_of_one_answer_is_said_on_each_page(run: Callable[[str], Result], data: Path, tmp_path: Path) -> None:
    result, (_, truth) = run("never"), split_rows(HP)["test"]
    share = f"{100 * (1 - truth.mean()):.2f}\N{NO-BREAK SPACE}%"
    said = f"All 2,000 test samples are predicted 'no', which is right for {share} of them."
    assert said in notes(result)
    assert said in Page(result.report.read_text()).texts("li")
    assert not [note for note in notes(run("f1")) if note.startswith("All ")]
    gate = Gate({"never": result}, Registry(str(tmp_path / "registry"), "model"), data, tmp_path)
    assert not gate.release("never").verdict.promotes
    assert f"Challenger: {said}" in Page((tmp_path / "page.html").read_text()).texts("p")
    predict_rows(result.model, result.sidecar, tmp_path / "p.csv", dataset=data)
    assert ["Predicted for all samples", "no"] in Page((tmp_path / "p.html").read_text()).rows()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"validation_fraction": 3 / 8000}, "threshold='f1': .*which has no sample of class 'yes'; raise validation"),
        (
            {"dataset": "objective_tasks:classes", "model": "objective_tasks:flat"},
            "threshold='f1': .*two classes, .* 3; .*omit threshold",
        ),
    ],
)
def test_data_that_no_threshold_fits_are_refused_before_ranks_start(
    changes: dict[str, Any], words: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hp = replace(RUNS["f1"], select_by="loss", **changes)
    with pytest.raises(UserError, match=words):
        train_in(tmp_path / "run", hp, fetch(hp.dataset, "", tmp_path / "cache", progress="off"))
    assert not (tmp_path / "run").exists()
