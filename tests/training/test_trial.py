"""What would fail only after an epoch fails before the first step, and the trial itself changes nothing."""

import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from training_runs import notes, refuse, train_in, train_on

from flyte_ddp import arrays, on_demand
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import RankError, UserError
from flyte_ddp.core.progress import Progress
from flyte_ddp.core.text.json_lines import read_records
from flyte_ddp.core.training import trial
from flyte_ddp.datasets.custom import CustomSet
from flyte_ddp.datasets.on_demand_set import OnDemand
from flyte_ddp.datasets.prepared_set import write_prepared_set
from flyte_ddp.datasets.sample_arrays import SampleArrays
from flyte_ddp.objectives import HIGHER, Classification, Facts, Objective
from flyte_ddp.run import Result

OWN = "test_trial:"
HP = Hyperparameters(
    dataset="own:data", model=f"{OWN}linear", num_ranks=1, epochs=2, batch_size=8, precision="fp32", learning_rate=0.05
)
pytestmark = pytest.mark.usefixtures("user_models")


def table(targets: Any = lambda rows: (rows[:, 0] > 0).astype(np.float32)) -> SampleArrays:
    """Twenty training and twelve test rows of three numbers."""
    random = np.random.default_rng(3)
    rows = [random.normal(size=(samples, 3)).astype(np.float32) for samples in (20, 12)]
    return arrays(*((each, targets(each)) for each in rows))


def train(folder: Path, data: SampleArrays, **changes: Any) -> Result:
    return train_on(folder, data, replace(HP, **changes))


def refuse_at_start(folder: Path, data: SampleArrays, words: str, **changes: Any) -> None:
    """Assert that a run ends before its first step with a sentence of the user's mistake."""
    assert refuse(folder, data, HP, words, **changes) == {"start"}


def linear(num_classes: int) -> nn.Module:
    return nn.Linear(3, num_classes)


MATRIX = torch.eye(2)


def by_matrix(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs @ MATRIX, targets, reduction="none")


def positive(rows: Any) -> Any:
    return (rows[:, 0] > 0).astype(int)


class Misspelt(Classification):
    """Has a measure that no data would make right."""

    measures: Mapping[str, str] = {"share": HIGHER}

    def measure(self, columns: Mapping[str, Tensor]) -> dict[str, float]:
        return {"share": columns["predicton"].mean().item()}


@pytest.mark.parametrize(
    ("objective", "words"), [("by_matrix", "expected m1 and m2 to have the same dtype"), ("Misspelt", "predicton")]
)
def test_an_objective_that_fails_only_in_evaluations_fails_before_the_first_step(
    objective: str, words: str, tmp_path: Path
) -> None:
    """With the user's own exception and traceback."""
    with pytest.raises(RankError, match=words) as caught:
        train(tmp_path, table(positive), objective=f"{OWN}{objective}")
    assert traceback.extract_tb(caught.value.__cause__.__traceback__)[-1].filename == __file__
    assert {record["kind"] for record in read_records(tmp_path / "run/unfinished/metrics.jsonl")} == {"start"}


class OtherNames(Classification):
    """Announces another measure than it has."""

    measures: Mapping[str, str] = {"kappa": HIGHER}


def test_a_measure_of_another_name_is_refused(tmp_path: Path) -> None:
    words = "OtherNames.measure returned nothing.*measures.*kappa"
    refuse_at_start(tmp_path, table(positive), words, objective=f"{OWN}OtherNames")


class Changing(nn.Module):
    """Draws, and changes attributes, a buffer and a weight, also in evaluations."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer, self.passes = nn.Linear(3, num_classes), 0
        self.dropout, self.norm = nn.Dropout(0.3), nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, rows: Tensor) -> Tensor:
        if not self.passes:
            self.scale.data = rows.abs().mean(0)
        self.passes += 1
        self.seen += len(rows)
        noise = torch.randn(()) if self.training else 0.0
        return self.layer(self.dropout(self.norm(rows / self.scale)) + 0.01 * noise)


def test_the_trial_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = {"model": f"{OWN}Changing", "objective": f"{OWN}cross_entropy", "eval_interval": 9, "log_interval": 1}
    with pytest.raises(UserError, match="the state_dict is incomplete"):  # as it changes an attribute
        train(tmp_path / "with", table(positive), **case)
    monkeypatch.setattr(trial, "try_evaluation", lambda *_: [])
    with pytest.raises(UserError, match="the state_dict is incomplete"):
        train(tmp_path / "without", table(positive), **case)
    found = [
        [(record["loss"], record["step"]) for record in read_records(path) if record["kind"] == "train"]
        for path in sorted(tmp_path.glob("*/run/unfinished/metrics.jsonl"))
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 6


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs[:, 0], targets, reduction="none")


@pytest.mark.parametrize(("side", "row"), [("test", 10), ("train", 17)])
def test_a_target_that_is_not_finite_is_named_before_training(side: str, row: int, tmp_path: Path) -> None:
    """Of an own objective; inputs are refused when the data set is made."""
    data = table()
    targets = getattr(data, f"{side}_targets").copy()
    targets[row] = np.nan
    split = {"train": "(training|validation)"}.get(side, side)
    words = rf"the loss is not finite.* the target of {split} sample {row} is not finite"
    refuse_at_start(tmp_path, replace(data, **{f"{side}_targets": targets}), words, objective=f"{OWN}squared")


def demanded(source: str) -> OnDemand:
    """The same on demand, with NaN in a test row that is not among the first."""
    data = table(positive)
    data.test_inputs[10, 2] = np.nan
    train, test = ([*zip(*side, strict=True)] for side in (
        (data.train_inputs, data.train_targets.tolist()), (data.test_inputs, data.test_targets.tolist())
    ))  # fmt: skip
    return on_demand(train, test, classes=["no", "yes"])


def test_an_evaluation_names_the_sample_on_demand_that_is_not_finite(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    data, _ = CustomSet(f"{OWN}demanded").load("", tmp_path, Progress("off"))
    write_prepared_set(data, tmp_path / "data", {"data_source": ""})
    with pytest.raises(UserError, match=r"the input of test sample 10 \(column 2\) is not finite"):
        train_in(tmp_path / "run", replace(HP, dataset=f"{OWN}demanded"), tmp_path / "data")


def mean_of_table(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs, targets)


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_reduced_table_of_losses_is_refused(tmp_path: Path) -> None:
    """Outputs [n, 1] and targets [n] make a table [n, n], whose mean only a constant minimises."""
    words = r"outputs \[8, 1\] and targets \[8\] are broadcast; use outputs\[:, 0\]"
    refuse_at_start(tmp_path, table(lambda rows: 50 + rows[:, 0]), words, objective=f"{OWN}mean_of_table")


class Centres(Objective):
    """Has a point for each class that it would have to train."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self.points = nn.Parameter(torch.ones(2, len(facts.classes)))

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs @ self.points.to(outputs), targets, reduction="none")


def test_parameters_of_an_objective_are_refused(tmp_path: Path) -> None:
    """They would never be trained."""
    words = r"depends on a parameter \[2, 2\] outside the model"
    refuse_at_start(tmp_path, table(positive), words, objective=f"{OWN}Centres")


def normalised(num_classes: int) -> nn.Module:
    return nn.utils.weight_norm(nn.Linear(3, num_classes))


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_model_that_cannot_be_copied_is_trained_with_a_note(tmp_path: Path) -> None:
    result = train(tmp_path, table(positive), model=f"{OWN}normalised")
    assert any("trial evaluation before training was skipped" in note for note in notes(result))
