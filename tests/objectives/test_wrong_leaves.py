"""Texts and tables that do not fit an objective, a model or a setting: a sentence with the value, the rule, the fix."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import leaf_tasks as tasks
import numpy as np
import pytest
from torch import Tensor
from training_runs import refuse, train_on, weights

from flyte_ddp import arrays
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.samples.leaves import Ragged
from flyte_ddp.datasets.sample_arrays import SampleArrays

OWN = "test_wrong_leaves:"
HP = Hyperparameters(
    dataset="own:data", num_ranks=1, epochs=1, batch_size=8, precision="fp32", collate="padded", objective="language",
    model="leaf_tasks:Reader",
)  # fmt: skip
pytestmark = pytest.mark.usefixtures("user_models")


def with_token(data: SampleArrays, part: str, token: int) -> SampleArrays:
    """Return texts with a token as the last one of a part."""
    leaf: Ragged = getattr(data, part)
    values = leaf.values.copy()
    values[-1] = token
    return replace(data, **{part: Ragged(values, leaf.ends)})


class WithoutMask(tasks.Reader):
    """Takes tokens alone."""

    def forward(self, tokens: Tensor) -> Any:  # type: ignore[override]
        return super().forward(tokens)


class OneRowLess(tasks.TwoInputs):
    """Leaves out the first pair."""

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        amount, logits = super().forward(left, right)
        return amount[1:], logits[1:]


class FewerLosses(tasks.NumberAndClass):
    """Takes what such a model returns."""

    def losses(self, outputs: tuple[Tensor, Tensor], targets: dict[str, Tensor]) -> Tensor:
        return (outputs[0] - targets["amount"][1:]) ** 2


TABLE = {"collate": "stacked", "objective": "regression", "model": "leaf_tasks:Tabular"}
PAIRS = {"collate": "stacked", "objective": "leaf_tasks:NumberAndClass", "model": "leaf_tasks:TwoInputs"}
CASES: dict[str, tuple[Callable[[], SampleArrays], dict[str, Any], str]] = {
    "a target that is no token": (
        lambda: with_token(tasks.texts(""), "test_targets", 7),
        {},
        r"^test sample 22: objective='language': the target at \[\d+\] is 7: must be 0\.\.6 with 7 tokens",
    ),
    "an input that the model does not know": (
        lambda: with_token(tasks.texts(""), "test_inputs", 9),
        {},
        r"model 'leaf_tasks:Reader'.*embedding.* 0 0\.\.9",
    ),
    "texts as classes": (
        lambda: tasks.texts(""),
        {"objective": "classification"},
        "objective='classification': the targets of dataset='own:data' have different lengths; use language",
    ),
    "no mask": (
        lambda: tasks.texts(""),
        {"model": f"{OWN}WithoutMask"},
        "forward does not accept .* a tuple of 2: too many positional arguments; .*collate='padded'",
    ),
    "fewer rows for an own objective": (
        lambda: tasks.pairs(""),
        {**PAIRS, "model": f"{OWN}OneRowLess", "objective": f"{OWN}FewerLosses"},
        r"losses have shape \[7\]: must be \[8\].*weights; do not reduce",
    ),
    "several targets": (
        lambda: tasks.pairs(""),
        {**PAIRS, "objective": "regression"},
        "objective='regression'.*single array.*dataset='own:data' has several",
    ),
    "mixup of whole numbers": (
        lambda: tasks.table(""),
        {**TABLE, "mixup": 0.3},
        r"mixup=0.3: the inputs are numbers float \[4\], kind int64 \[\], and only floats of one shape can be mixed",
    ),
    "a missing number": (
        lambda: with_missing(tasks.table("")),
        TABLE,
        r"the loss is not finite.* the input 'numbers' of training sample \d+ .column 0. is not finite",
    ),
    "a table of losses": (
        lambda: tasks.table(""),
        {**TABLE, "objective": f"{OWN}table_of_losses"},
        r"losses have shape \[8, 8\]: must be \[8\], one for each sample; .* use outputs\[:, 0\]",
    ),
}


def with_missing(data: SampleArrays) -> SampleArrays:
    """The same with NaN in all training samples, as most would be missing by chance."""
    numbers = np.full_like(data.train_inputs["numbers"], np.nan)
    return replace(data, train_inputs={**data.train_inputs, "numbers": numbers})


def table_of_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.reshape(-1, 1) - targets).abs()


@pytest.mark.parametrize("kind", CASES)
def test_what_does_not_fit_is_told(kind: str, tmp_path: Path) -> None:
    make, changes, words = CASES[kind]
    refuse(tmp_path, make(), HP, words, **changes)


def test_a_step_without_any_target_is_no_mistake(tmp_path: Path) -> None:
    """Nor an evaluation without one, whose measures are not defined."""
    tokens = np.zeros((20, 4), np.int64)
    data = arrays((tokens, tokens - 100), (tokens, tokens - 100), classes="abcdefg")
    result = train_on(tmp_path, data, replace(HP, collate="stacked"))
    assert all(value.isfinite().all() for value in weights(result).values())
