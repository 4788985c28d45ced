"""Judgements of trained models whose measure is not the accuracy."""

import json
from pathlib import Path

import gate_tasks
import numpy as np
import pytest
from cli import HELPERS
from gate import Gate
from report_page import Page
from training_runs import QUIET, train_in

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.text.formatting import format_measure
from flyte_ddp.datasets import fetch
from flyte_ddp.datasets.prepared_set import write_prepared_set
from flyte_ddp.release.page import describe_reason, write_verdict_page
from flyte_ddp.release.policy import Policy
from flyte_ddp.release.promotion import promote_version, store_version
from flyte_ddp.release.registry import Registry

pytestmark = pytest.mark.slow


def test_models_of_several_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A better one is promoted; a worse one is kept back, and a slice and labels that lose are named."""
    monkeypatch.chdir(HELPERS)
    data = tmp_path / "data"
    data.mkdir()
    write_prepared_set(gate_tasks.labels(""), data, {})
    own = {"dataset": "gate_tasks:labels", "objective": "multilabel", "model": "objective_tasks:flat"}
    hp = Hyperparameters(num_ranks=1, learning_rate=0.02, epochs=4, **own)
    runs = {
        name: train_in(tmp_path / name, Hyperparameters.from_dict(hp.to_dict() | {"epochs": epochs}), data, QUIET)
        for name, epochs in (("weak", 4), ("good", 20))
    }
    gate = Gate(runs, Registry(str(tmp_path / "registry"), "model"), data, tmp_path)
    first = gate.release("weak").verdict
    assert first.promotes, first.reason
    assert first.reason == "there is no champion yet, and the model is better than the best constant answer"
    recorded = {name: json.loads(run.sidecar.read_text())["metrics"]["test_f1"] for name, run in runs.items()}
    assert (first.measure, first.challenger_score) == ("f1", pytest.approx(recorded["weak"], rel=1e-5))
    good = gate.release("good").verdict
    assert good.promotes, good.reason
    assert (good.look, good.samples, good.best) == (2, 300, good.challenger)
    assert good.challenger_score == pytest.approx(recorded["good"], rel=1e-5)
    assert good.champion_score == first.challenger_score
    assert "F1 better by" in good.reason
    assert "F1 on 300 test samples" in (tmp_path / "page.html").read_text()

    found = gate.judge("weak")
    assert (found.verdict.decision, found.verdict.look) == ("keep", 3)
    assert {row.name for row in found.part_checks["label"]} == {*gate_tasks.QUARTERS}
    assert found.champion is not None
    assert found.challenger is not None
    lost = np.argsort(found.challenger.scores - found.champion.scores)[:40]
    table = tmp_path / "slices.csv"
    table.write_text("id,slice\n" + "".join(f"{number},hard\n" for number in lost))
    verdict = gate.judge("weak", policy=Policy(slices=str(table), min_score=0.9999), may_promote=False).verdict
    assert "slice 'hard' loses: F1 worse by " in verdict.reason
    assert "its F1 is " in verdict.reason
    checks = gate.judge("weak", policy=Policy(rule="not_worse", margin=0.02)).verdict.checks
    assert [check.passed for check in checks if check.name == "not worse than the champion"] == [False]


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

    page = Page(write_verdict_page(found, "rare", tmp_path / "page.html").read_text())
    [curve] = [inside for tag, found, inside in page.elements if found.get("aria-label") == "precision against recall"]
    assert {"Challenger", "Champion"} <= {text.strip() for text in curve}, "both in one chart"
    [said] = page.texts("div", class_="head good" if verdict.promotes else "head ")
    assert "Its average precision is better by" in said
    truth = found.challenger.columns["truth"].numpy()
    assert page.tiles()["Best constant answer"][0] == format_measure("average_precision", float(truth.mean()))
    verdict.constant_score = None
    page = Page(write_verdict_page(found, "rare", tmp_path / "page.html").read_text())
    assert "Best constant answer" not in page.tiles()


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        ("+1.20 points: 3 samples gained", "The difference is +1.20 points: 3 samples gained."),
        (
            "F1 worse by 0.1: 3 samples better and 4 worse of 9",
            "Its F1 is worse by 0.1: 3 samples better and 4 worse of 9.",
        ),
        ("slice 'hard' loses: F1 worse by 0.1", "Slice 'hard' loses: F1 worse by 0.1."),
        ("it has the champion's weights", "It has the champion's weights."),
        ("", ""),
    ],
)
def test_reasons_are_sentences(reason: str, sentence: str) -> None:
    assert describe_reason(reason) == sentence
