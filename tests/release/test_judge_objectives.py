"""Judgements of trained models whose objective is not classification."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import gate_tasks
import numpy as np
import pytest
from cli import HELPERS
from gate import Gate
from sklearn import metrics
from training_runs import QUIET, train_in

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import fetch, open_arrays
from flyte_ddp.datasets.prepared_folder import write_prepared_set
from flyte_ddp.predict.prediction_batches import SavedModel
from flyte_ddp.release.evaluation import evaluate_split
from flyte_ddp.release.policy import Policy
from flyte_ddp.release.promotion import promote_version, roll_back_champion, store_version
from flyte_ddp.release.registry import Registry
from flyte_ddp.release.scores import name_scores
from flyte_ddp.run import Result

pytestmark = pytest.mark.slow

FLAT, PIXELS = "objective_tasks:flat", "objective_tasks:pixels"
CASES = {
    "labels": {"objective": "multilabel", "model": FLAT},
    "number": {"objective": "regression", "model": FLAT},
    "masks": {"objective": "segmentation", "model": PIXELS},
}
EPOCHS = {"labels": (4, 20), "number": (1, 2), "masks": (4, 20)}
MEASURES = {"labels": "f1", "number": "rmse", "masks": "miou"}

WORDS = {"f1": "F1", "rmse": "RMSE", "miou": "mean IoU"}


@cache
def train_both(name: str, folder: Path) -> dict[str, Result]:
    """Train a weak model and a good one."""
    (folder / name).mkdir()
    write_prepared_set(getattr(gate_tasks, name)(""), folder / name, {})
    hp = Hyperparameters(dataset=f"gate_tasks:{name}", num_ranks=1, learning_rate=0.02, **CASES[name])
    return {
        kind: train_in(folder / f"{name}-{kind}", replace(hp, epochs=epochs), folder / name, QUIET)
        for kind, epochs in zip(("weak", "good"), EPOCHS[name], strict=True)
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(params=["labels", *[pytest.param(name, marks=pytest.mark.exhaustive) for name in ("number", "masks")]])
def gate(request: pytest.FixtureRequest, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    monkeypatch.chdir(HELPERS)
    runs = train_both(request.param, models)
    return Gate(runs, Registry(str(tmp_path / "registry"), "model"), models / request.param, tmp_path)


def test_a_better_model_is_promoted_and_a_worse_one_kept_back(gate: Gate) -> None:
    first = gate.release("weak").verdict
    assert first.promotes, first.reason
    assert first.reason == "there is no champion yet, and it is better than the best constant answer"
    measure = first.measure
    assert MEASURES[gate.data.name] == measure
    recorded = {kind: json.loads(run.sidecar.read_text())["metrics"] for kind, run in gate.runs.items()}
    assert first.challenger_score == pytest.approx(recorded["weak"][f"test_{measure}"], rel=1e-5)
    good = gate.release("good").verdict
    assert good.promotes, good.reason
    assert (good.look, good.samples, good.best) == (2, 300, good.challenger)
    assert good.challenger_score == pytest.approx(recorded["good"][f"test_{measure}"], rel=1e-5)
    assert good.champion_score == first.challenger_score
    assert "better and" in good.reason
    worse = gate.judge("weak").verdict
    assert (worse.decision, worse.look) == ("keep", 3)
    names = [check.name for check in worse.checks]
    assert WORDS[measure] in names
    assert "negative log-likelihood" not in names
    page = (gate.folder / "page.html").read_text()
    assert f"{WORDS[measure]} on 300 test samples" in page
    lenient = gate.judge("good", policy=Policy(rule="not_worse"), counts=False).verdict
    assert lenient.reason == "it has the champion's weights"


def test_not_worse_by_a_margin(gate: Gate) -> None:
    """The weak model is, also against the best version ever; the good one is not, and passes."""
    gate.release("good")
    policy = Policy(rule="not_worse", margin=0.02)
    verdict = gate.judge("weak", policy=policy).verdict
    assert verdict.decision == "keep"
    [check] = [check for check in verdict.checks if check.name == "not worse than the champion"]
    assert not check.passed
    weak = store_version(gate.registry, *gate.judge("weak").model.files, verdict, {})
    promote_version(gate.registry, weak.name, "a test", by="me")
    better = gate.judge("good", policy=policy).verdict
    assert all(check.passed for check in better.checks if check.name.startswith("not worse than")), better.reason
    back = roll_back_champion(gate.registry, "a test", by="me")
    assert back.version == better.challenger


def test_a_slice_and_a_label_that_lose(gate: Gate) -> None:
    gate.release("good")
    found = gate.judge("weak", counts=False)
    assert found.champion is not None
    assert found.challenger is not None
    lost = np.argsort(found.challenger.scores - found.champion.scores)[:40]
    table = gate.folder / "slices.csv"
    table.write_text("id,slice\n" + "".join(f"{number},hard\n" for number in lost))
    verdict = gate.judge("weak", policy=Policy(slices=str(table)), counts=False).verdict
    assert f"slice 'hard' loses: {name_scores(found.challenger.objective)} worse by " in verdict.reason
    assert ("label" in found.parts, "class" in found.parts) == {
        "labels": (True, False),
        "number": (False, False),
        "masks": (False, True),
    }[gate.data.name]
    for rows in found.parts.values():
        assert {row.name for row in rows} <= {*gate_tasks.QUARTERS, "dark", "bright"}


def test_a_floor(gate: Gate) -> None:
    limit = 1e-6 if gate.data.name == "number" else 0.9999
    verdict = gate.judge("good", policy=Policy(min_score=limit), counts=False).verdict
    assert verdict.decision == "keep"
    assert f"its {WORDS[verdict.measure]} is " in verdict.reason
    [check] = [check for check in verdict.checks if check.name == WORDS[verdict.measure]]
    assert (check.value, check.limit) == (verdict.challenger_score, limit)


@pytest.mark.parametrize("gate", ["labels"], indirect=True)
def test_the_measures_are_scikit_learns(gate: Gate) -> None:
    run, data = gate.runs["good"], open_arrays(gate.data)
    found = evaluate_split(SavedModel(run.model, run.sidecar, QUIET), data)
    truth, scores = found.columns["truth"].numpy(), found.columns["probability"].numpy()
    np.testing.assert_array_equal(truth, data.test_labels)
    assert found.score == pytest.approx(metrics.f1_score(truth, scores >= 0.5, average="macro"))
    assert found.scores.mean() == pytest.approx(found.score, abs=0.01)
    assert found.ids[:3] == ["0", "1", "2"]


RARE = {"dataset": "rare_tasks:table", "model": "rare_tasks:linear", "optimizer": "adamw", "num_ranks": 1}


@pytest.mark.usefixtures("user_models")
def test_both_models_are_compared_by_the_challengers_measure(tmp_path: Path) -> None:
    """The champion was selected by the loss, so that its main measure was the accuracy."""
    data = fetch("rare_tasks:table", "", tmp_path / "data", progress="off")
    weak = train_in(tmp_path / "weak", Hyperparameters(**RARE, max_steps=1, learning_rate=0.001), data)
    good = train_in(
        tmp_path / "good", Hyperparameters(**RARE, epochs=3, learning_rate=0.02, select_by="average_precision"), data
    )
    gate = Gate({"weak": weak, "good": good}, Registry(str(tmp_path / "registry"), "model"), data, tmp_path)
    first = gate.judge("weak")
    stored = store_version(gate.registry, *first.model.files, first.verdict, {})
    promote_version(gate.registry, stored.name, "a test", by="me")
    found = gate.judge("good")
    verdict = found.verdict
    recorded = [json.loads(run.sidecar.read_text())["metrics"]["test_average_precision"] for run in (good, weak)]
    assert (first.verdict.measure, verdict.measure) == ("accuracy", "average_precision")
    assert [verdict.challenger_score, verdict.champion_score] == pytest.approx(recorded, rel=1e-5)
    assert found.challenger is not None
    assert found.champion is not None
    for evaluation, score in zip((found.challenger, found.champion), recorded, strict=True):
        assert np.mean(evaluation.scores) == pytest.approx(score, rel=0.05), "pseudo-values of the same measure"
    assert "average precision better by" in verdict.reason
