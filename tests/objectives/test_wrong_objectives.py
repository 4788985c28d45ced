"""Targets, options and objectives that are wrong: a sentence with the value, the rule and the fix, before training."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import objective_tasks as tasks
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from training_runs import refuse, train_on

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.text.json_lines import read_records
from flyte_ddp.datasets import SampleArrays, image_arrays
from flyte_ddp.datasets.prepared import check_prepared_set
from flyte_ddp.datasets.prepared_set import write_prepared_set
from flyte_ddp.objectives import HIGHER, Classification, Facts

OWN = "test_wrong_objectives:"
HP = Hyperparameters(
    dataset="own:data", model="objective_tasks:flat", num_ranks=1, epochs=1, batch_size=8, precision="fp32"
)
pytestmark = pytest.mark.usefixtures("user_models")

IMAGES = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 1), dtype=np.uint8)
NUMBERS = np.arange(4.0)


@pytest.mark.parametrize(
    ("targets", "test_targets", "classes", "words"),
    [
        ([0, 1, 2, 3], [0, -1, 2, 3], "abcd", r"test_labels: label -1 of sample 1 .*must be 0\.\.3"),
        (NUMBERS[:3], NUMBERS, "", r"must be one label for each of the 4 images, got shape \[3\]"),
        (np.eye(4), np.eye(4)[:, :2], "abcd", r"train_labels is float32 \[4\], and of test_labels float32 \[2\]"),
    ],
)
def test_wrong_targets_are_refused_when_the_arrays_are_made(
    targets: Any, test_targets: Any, classes: str, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        image_arrays(IMAGES, targets, IMAGES, test_targets, [*classes])


def with_value(arrays: SampleArrays, value: float) -> SampleArrays:
    """Return the arrays with a value as the last test target."""
    changed = arrays.test_targets.copy()
    changed[(-1,) * changed.ndim] = value
    return replace(arrays, test_targets=changed)


def without_names(arrays: SampleArrays) -> SampleArrays:
    return replace(arrays, classes=())


@pytest.mark.parametrize(
    ("objective", "arrays", "words"),
    [
        (
            "classification",
            tasks.labels(""),
            r"targets are float32 \[41, 3\].* must be a class number .*choose another",
        ),
        ("multilabel", with_value(tasks.labels(""), -1), r"the target of row 22 at \[2\] is -1: must be 0, 1, or NaN"),
        ("multilabel", replace(tasks.labels(""), classes=("a", "b")), "have 3 labels.*2 class names"),
        ("regression", with_value(tasks.number(""), np.inf), "the target of row 22 is inf: must be a number, or NaN"),
        ("segmentation", tasks.classes(""), r"targets are int64 \[41\].* must be a mask \[height, width\]"),
        (
            "segmentation",
            with_value(tasks.masks(""), 3),
            r"the target of row 22 at \[7, 7\] is 3: must be 0..2 with 3 classes",
        ),
        ("segmentation", without_names(tasks.masks("")), "unknown number of classes; set num_classes"),
    ],
)
def test_targets_that_the_objective_does_not_take(objective: str, arrays: SampleArrays, words: str, tmp_path) -> None:
    assert refuse(tmp_path, arrays, HP, words, objective=objective) == set()


class Other:
    """No objective."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts


class Directionless(Classification):
    """Says the direction in a word of another library."""

    measures: Mapping[str, str] = {"accuracy": "max"}


class Weighted(Classification):
    """Has weights by an option."""

    def __init__(self, facts: Facts, kind: str = "none") -> None:
        super().__init__(facts)
        self.kind = kind

    def weights(self, targets: Tensor) -> Tensor | None:
        if self.kind == "none":
            return None
        values = torch.ones(len(targets))
        if self.kind == "mean":
            return values.mean().view(1)
        values[targets == 2] = -2.0
        return values


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"objective": "objective_tasks:focsl"}, "objective_tasks .* has no 'focsl'; name a function or class"),
        ({"objective": f"{OWN}Other"}, r"Other'.*subclass of flyte_ddp.objectives.Objective"),
        ({"objective": f"{OWN}Directionless"}, "measure 'accuracy' has 'max': must be 'lower' or 'higher'"),
        ({"select_by": "acuracy"}, "unknown select_by 'acuracy': did you mean 'accuracy'.* accuracy, .*f1, loss"),
        ({"objective": "objective_tasks:focal", "label_smoothing": 0.1}, "label_smoothing=0.1: not used by objective="),
        (
            {"class_weights": "0,1,2", "label_smoothing": 0.1},
            "class_weights='0,1,2'.*label_smoothing=0.1.*weight 0",
        ),
        ({"class_weights": "1,2"}, "class_weights='1,2': has 2 numbers: must be 3"),
        ({"options": '{"objective": {"gamma": 2}}'}, "options of objective 'classification': .*'gamma'; correct"),
        *(
            ({"objective": f"{OWN}Weighted", "options": f'{{"objective": {{"kind": "{kind}"}}}}'}, words)
            for kind, words in (
                ("negative", "weights range from -2 to 1: must be finite and at least 0"),
                ("mean", r"weights have shape \[1\].*one or more .*41 samples; do not reduce"),
            )
        ),
    ],
)
def test_wrong_objectives_and_options(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert refuse(tmp_path, tasks.classes(""), HP, words, **changes) == set()


@pytest.mark.parametrize(
    ("arrays", "changes", "words"),
    [
        (tasks.numbers(""), {"select_by": "accuracy"}, "unknown select_by 'accuracy': .*loss, mae, r2, rmse"),
        (
            without_names(tasks.labels("")),
            {"objective": "multilabel", "class_weights": "1,2"},
            "class_weights='1,2': has 2 numbers: must be 3",
        ),
        *(
            (
                replace(tasks.arrays_of(tasks.brightness()[:, :1] > 0), classes=names),
                {"objective": "multilabel", "class_weights": weights},
                f"class_weights='{weights}'.*at least two classes or labels",
            )
            for names, weights in (((), "balanced"), (("rare",), "3"))
        ),
        (
            replace(tasks.classes(""), classes=("a", "b", "c", "never")),
            {"objective": "classification", "class_weights": "balanced"},
            "class_weights='balanced': a class has no training sample",
        ),
    ],
)
def test_options_that_do_not_fit_the_targets(
    arrays: SampleArrays, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    assert refuse(tmp_path, arrays, HP, words, **{"objective": "regression", **changes}) == set()


def too_few(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")[:-1]


def not_a_number(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none") * float("nan")


def reduced(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets)


class OtherNames(Classification):
    """Announces another measure than it has."""

    measures: Mapping[str, str] = {"kappa": HIGHER}


class NoRows(Classification):
    """Has one value of a whole batch in a column."""

    def columns(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {**super().columns(outputs, targets), "mean": outputs.mean()}


IN_TRAINING = {
    "too_few": r"losses have shape \[7\]: must be \[8\], one for each sample; do not reduce",
    "not_a_number": r"the loss is nan at epoch 0, step 1.*must be finite",
    "OtherNames": "OtherNames.measure returned nothing.*measures.*kappa",
    "NoRows": r"column 'mean' of the objective has shape \[\]: must have a row for each of the \d+ samples",
}


@pytest.mark.parametrize("name", IN_TRAINING)
def test_wrong_results_of_an_objective(name: str, tmp_path: Path) -> None:
    """What can be known in the trial, in the first step, or in the first evaluation."""
    assert "start" in refuse(tmp_path, tasks.classes(""), HP, IN_TRAINING[name], objective=f"{OWN}{name}")


@pytest.mark.slow
def test_other_ranks_do_not_wait_for_one_with_a_wrong_result(tmp_path: Path) -> None:
    """Measures are taken on rank 0 alone."""
    objective = f"{OWN}OtherNames"
    words = IN_TRAINING["OtherNames"]
    assert "start" in refuse(tmp_path, tasks.classes(""), HP, words, objective=objective, num_ranks=2)


def one_too_many(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return tasks.flat(num_classes + 1, input_shape)


@pytest.mark.parametrize(
    ("objective", "model", "arrays", "words"),
    [
        ("multilabel", f"{OWN}one_too_many", tasks.labels(""), r"\(8, 4\): .*\(samples, classes\) = \(8, 3\); size"),
        ("regression", f"{OWN}one_too_many", tasks.numbers(""), r"\(8, 3\): .*\(samples, numbers\) = \(8, 2\); size"),
        ("segmentation", "objective_tasks:flat", tasks.masks(""), r"\(8, 3\): .*\(8, 3, 8, 8\)"),
        ("regression", "objective_tasks:InDict", tasks.number(""), "dict: .* return only the outputs"),
    ],
)
def test_outputs_that_do_not_fit_the_targets(
    objective: str, model: str, arrays: SampleArrays, words: str, tmp_path: Path
) -> None:
    words = f"model {model!r} returned {words}"
    assert "start" in refuse(tmp_path, arrays, HP, words, objective=objective, model=model)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda masks: masks, ""),
        (lambda masks: np.where(masks == 0, 0, 255), "class 'b', 'c', and pixels .*255 are ignored.* // 255"),
        (lambda masks: masks * 0 + 1, "has the class 'a', 'c'$"),
    ],
)  # fmt: skip
def test_classes_without_any_pixel_are_said_before_training(change: Any, words: str, tmp_path: Path) -> None:
    """Of masks painted 0 and 255 all that is not background would be ignored, and each answer right."""
    found = tasks.masks("")
    write_prepared_set(replace(found, train_targets=change(found.train_targets).astype(np.uint8)), tmp_path, {})
    said = check_prepared_set(tmp_path, replace(HP, objective="segmentation"))
    assert len(said) == bool(words)
    assert not words or re.search(words, said[0])


FIGURES = tuple(itertools.product(("validation", "test"), ("loss", "accuracy")))


def test_a_mean_is_taken(tmp_path: Path) -> None:
    """As classification by its name: a mean counts as the loss of each sample."""
    folders = [tmp_path / "own", tmp_path / "named"]
    for folder, objective in zip(folders, (f"{OWN}reduced", "classification"), strict=True):
        train_on(folder, tasks.classes(""), replace(HP, objective=objective, epochs=2))
    own, named = ([*read_records(folder / "run/metrics.jsonl")] for folder in folders)
    for one, other in zip(own, named, strict=True):
        assert one.keys() <= other.keys(), "its own measures alone, if it has any"
        if one["kind"] == "evaluation":
            values = [[record[f"{split}_{measure}"] for split, measure in FIGURES] for record in (one, other)]
            assert values[0] == pytest.approx(values[1], rel=1e-6)
    weights, expected = (torch.load(folder / "run/model.pt", weights_only=True) for folder in folders)
    for key, value in weights.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6)
