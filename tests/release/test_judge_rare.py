"""Judgements of two classes that are not equally common, by the measure that the challenger was selected by."""

import json
from pathlib import Path

import numpy as np
import pytest
from training_runs import QUIET, train_in

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import fetch
from flyte_ddp.release.judge import judge_challenger
from flyte_ddp.release.policy import Policy
from flyte_ddp.release.promotion import promote_version, store_version
from flyte_ddp.release.registry import Registry

HP = {"dataset": "rare_tasks:table", "model": "rare_tasks:linear", "optimizer": "adamw", "num_ranks": 1}


@pytest.mark.slow
@pytest.mark.usefixtures("user_models")
def test_both_models_are_compared_by_the_challengers_measure(tmp_path: Path) -> None:
    """The champion was selected by the loss, so that its main measure was the accuracy."""
    data = fetch("rare_tasks:table", "", tmp_path / "data", progress="off")
    weak = train_in(tmp_path / "weak", Hyperparameters(**HP, max_steps=1, learning_rate=0.001), data)
    good = train_in(
        tmp_path / "good", Hyperparameters(**HP, epochs=3, learning_rate=0.02, select_by="average_precision"), data
    )
    registry, policy = Registry(str(tmp_path / "registry"), "model"), Policy(latency_ratio=1000)
    first = judge_challenger(weak.model, weak.sidecar, data, registry, policy, settings=QUIET)
    promote_version(
        registry, store_version(registry, *first.model.files, first.verdict, {}, by="x").name, "a test", by="me"
    )
    found = judge_challenger(good.model, good.sidecar, data, registry, policy, settings=QUIET)
    verdict = found.verdict
    recorded = [json.loads(run.sidecar.read_text())["metrics"]["test_average_precision"] for run in (good, weak)]
    assert (first.verdict.measure, verdict.measure) == ("accuracy", "average_precision")
    assert [verdict.challenger_score, verdict.champion_score] == pytest.approx(recorded, rel=1e-5)
    assert found.challenger is not None
    assert found.champion is not None
    for evaluation, score in zip((found.challenger, found.champion), recorded, strict=True):
        assert np.mean(evaluation.scores) == pytest.approx(score, rel=0.05), "pseudo-values of the same measure"
    assert "average precision better by" in verdict.reason
