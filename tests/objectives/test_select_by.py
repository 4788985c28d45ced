"""The weights that are kept, and when training stops, by a measure of the objective: in its direction, and resumed."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import objective_tasks as tasks
import pytest
import torch
from training_runs import records_of, resumed_steps, train_on, weights

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import RankError
from flyte_ddp.core.training.evaluate import Evaluation, Selection
from flyte_ddp.core.training.training_state import TrainingState
from flyte_ddp.run import Result

EPOCHS, STEPS = 10, 4  # of an epoch: 29 training samples in batches of 8
HP = Hyperparameters(
    model="objective_tasks:flat", precision="fp64", num_ranks=1, epochs=EPOCHS, batch_size=8, schedule="constant",
    learning_rate=0.1, validation_fraction=0.3, keep="best",
)  # fmt: skip
RUNS = {
    "auroc": replace(HP, dataset="objective_tasks:labels", objective="multilabel", learning_rate=0.3),
    "rmse": replace(HP, dataset="objective_tasks:numbers", objective="regression"),
}
pytestmark = pytest.mark.usefixtures("user_models")


def train(hp: Hyperparameters, folder: Path) -> Result:
    return train_on(folder, getattr(tasks, hp.dataset.partition(":")[2])(""), hp)


def best_epoch(result: Result, measure: str) -> int:
    """Return the first epoch with the best value, by the direction that is written down here."""
    values = [record[f"validation_{measure}"] for record in records_of(result, "evaluation")]
    return values.index(min(values) if measure == "rmse" else max(values)) + 1


@pytest.mark.parametrize("measure", ["auroc", "rmse"])
def test_the_kept_weights_are_those_of_the_best_evaluation(measure: str, tmp_path: Path) -> None:
    """huggingface/transformers#31142, georgemilosh/Climate-Learning#86: the best by the wrong direction."""
    hp = replace(RUNS[measure], select_by=measure)
    result = train(hp, tmp_path / "run")
    best = best_epoch(result, measure)
    values = [record[f"validation_{measure}"] for record in records_of(result, "evaluation")]
    assert len(values) == EPOCHS
    worst = values.index(max(values) if measure == "rmse" else min(values)) + 1
    assert best not in (worst, EPOCHS), "the wrong direction, or the last weights, would be noticed"
    [end] = records_of(result, "end")
    assert end[f"test_{measure}"] == records_of(result, "evaluation")[best - 1][f"test_{measure}"]
    cut = train(replace(hp, max_steps=best * STEPS, keep="last"), tmp_path / "cut")
    found = weights(cut)
    assert all(torch.equal(value, found[name]) for name, value in weights(result).items())


def test_a_resumed_run_keeps_what_a_run_that_came_through_keeps(tmp_path, monkeypatch) -> None:
    """A resume loses the best value, or the average: atomistic-machine-learning/schnetpack#785, roboflow/rf-detr#969.

    Also lightly-ai/lightly-train#892 and open-mmlab/mmcv#2195.
    """
    measure = "rmse"
    hp = replace(RUNS[measure], select_by=measure)
    expected = train(hp, tmp_path / "run")
    best, update = best_epoch(expected, measure), TrainingState.update_average

    def fail_after_the_best_epoch(state: TrainingState) -> None:
        if state.step == (best + 1) * STEPS + 1:
            raise MemoryError
        update(state)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingState, "update_average", fail_after_the_best_epoch)
        with pytest.raises(RankError, match="MemoryError"):
            train(hp, tmp_path / "again")
    again = train(hp, tmp_path / "again")
    first, second = resumed_steps(again)
    assert first == 0 < second
    assert again.model.read_bytes() == expected.model.read_bytes()
    timeless = [[{**each, "time": 0} for each in records_of(result, "evaluation")] for result in (again, expected)]
    assert timeless[0] == timeless[1]


def test_training_stops_when_the_measure_is_no_longer_better(tmp_path: Path) -> None:
    measure = "auroc"
    hp = replace(RUNS[measure], select_by=measure, early_stop_patience=2, epochs=40)
    result = train(hp, tmp_path / "run")
    [end], best = records_of(result, "end"), best_epoch(result, measure)
    assert len(records_of(result, "evaluation")) == best + 2 < 40
    assert end["stopped"] == f"after epoch {best + 2}: no better validation {measure} in 2 evaluation(s)"


def test_a_measure_that_is_not_defined_is_never_better() -> None:
    for higher, sign in itertools.product((False, True), (1.0, -1.0)):
        selection = Selection("best", 3, "own", higher_is_better=higher)
        for epoch, value in enumerate((math.nan, 1.0, math.nan, 1.0 + sign, 1.0), 1):
            evaluation = Evaluation({"loss": -float(epoch), "own": value}, {})
            selection.select_weights(epoch, evaluation, evaluation, {"weight": torch.tensor(float(epoch))})
            assert selection.epoch == (1 if epoch == 1 else 4 if epoch > 3 and higher == (sign > 0) else 2)
            assert selection.weights["weight"] == selection.epoch
        assert bool(selection.stopped) == (higher != (sign > 0))
