"""Measures of evaluations: scikit-learn's of all samples, to the last digit, on any number of ranks."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from array_sources import images_in_memory
from numpy.typing import NDArray
from ranks import run_ranks
from scipy import optimize
from sklearn import metrics
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor
from torch.nn import functional

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.loading.split import Split
from flyte_ddp.core.objectives.objective import parse_class_weights
from flyte_ddp.core.order.sampling import ListedOrder
from flyte_ddp.core.parallel.distributed import rank, world_size
from flyte_ddp.core.training.evaluate import compute_batch_columns, compute_split_columns, mean_loss, measure_split
from flyte_ddp.objectives import Facts, Objective, Regression, make_objective

CLASSES = ("a", "b", "c", "d")
MOST, BATCH = 43, 5
SIZES = (1, BATCH + 1, MOST)  # of splits; 1 is fewer than ranks
Values = NDArray[Any]


@dataclass(frozen=True)
class Case:
    """An objective, with targets and outputs of MOST samples, and what scikit-learn makes of the first of them."""

    targets: Values
    outputs: Values
    expected: Callable[[Values, Values], dict[str, float]]  # of targets and outputs
    objective: str
    classes: tuple[str, ...] = CLASSES

    def make(self) -> Objective:
        return make_objective(self.objective, Facts(self.classes, self.targets.shape[1:]), {})


def mean_of_labels(function: Callable[[Values, Values], float], truth: Values, scores: Values, *, both: bool) -> float:
    """Return the mean of a measure over the labels with a positive sample, and with ``both`` with a negative one."""
    found = []
    for label in range(truth.shape[1]):
        known = ~np.isnan(truth[:, label])
        if {1.0, *((0.0,) if both else ())} <= set(truth[known, label]):
            found.append(function(truth[known, label], scores[known, label]))
    return float(np.mean(found)) if found else math.nan


def of_labels(truth: Values, logits: Values) -> dict[str, float]:
    return {
        "f1": mean_of_labels(lambda truth, scores: metrics.f1_score(truth, scores >= 0), truth, logits, both=False),
        "auroc": mean_of_labels(metrics.roc_auc_score, truth, logits, both=True),
        "average_precision": mean_of_labels(metrics.average_precision_score, truth, logits, both=False),
        "balanced_accuracy": mean_of_labels(
            lambda truth, scores: metrics.balanced_accuracy_score(truth, scores >= 0), truth, logits, both=True
        ),
    }


def of_known_labels(truth: Values, logits: Values) -> dict[str, float]:
    """Scikit-learn's own means over the labels, where each label has samples with it and without it."""
    if len(truth) < MOST:
        return of_labels(truth, logits)
    return {
        "f1": metrics.f1_score(truth, logits >= 0, average="macro"),
        "auroc": metrics.roc_auc_score(truth, logits, average="macro"),
        "average_precision": metrics.average_precision_score(truth, logits, average="macro"),
        "balanced_accuracy": np.mean(
            [metrics.balanced_accuracy_score(*each) for each in zip(truth.T, logits.T >= 0, strict=True)]
        ),
    }


def of_numbers(truth: Values, predictions: Values) -> dict[str, float]:
    """Return the measures of a number, or the means over several: each by itself, where it is known."""
    if truth.ndim == 1:
        many = len(truth) > 1
        return {
            "rmse": metrics.root_mean_squared_error(truth, predictions) if len(truth) else math.nan,
            "mae": metrics.mean_absolute_error(truth, predictions) if len(truth) else math.nan,
            "r2": metrics.r2_score(truth, predictions) if many else math.nan,
        }
    known = [~np.isnan(column) for column in truth.T]
    each = [of_numbers(truth[own, at], predictions[own, at]) for at, own in enumerate(known)]
    defined = {name: [row[name] for row in each if not math.isnan(row[name])] for name in each[0]}
    return {name: float(np.mean(values)) if values else math.nan for name, values in defined.items()}


def of_pixels(masks: Values, logits: Values) -> dict[str, float]:
    counts = masks != 255
    if not counts.any():
        return {"miou": math.nan, "pixel_accuracy": math.nan}
    truth, predicted = masks[counts], logits.argmax(1)[counts]
    return {
        "miou": metrics.jaccard_score(truth, predicted, average="macro"),
        "pixel_accuracy": metrics.accuracy_score(truth, predicted),
    }


def of_classes(truth: Values, logits: Values) -> dict[str, float]:
    recalls = metrics.recall_score(truth, logits.argmax(1), average=None, labels=np.unique(truth))
    return {"balanced_accuracy": recalls.mean(), **macro_f1(truth, logits)}


def macro_f1(truth: Values, logits: Values) -> dict[str, float]:
    f1 = metrics.f1_score(truth, logits.argmax(1), average="macro")
    return {"f1": f1, "accuracy": metrics.accuracy_score(truth, logits.argmax(1))}


def make_cases() -> dict[str, Case]:
    random = np.random.default_rng(4)
    classes = random.integers(0, 4, MOST)
    logits = random.integers(-4, 5, (MOST, 4)) / 2  # with equal ones in each column, and 0
    labels = (random.random((MOST, 4)) < 0.4).astype(np.float32)
    some = np.where(random.random(labels.shape) < 0.3, np.nan, labels)
    some[:, 3] = np.where(some[:, 3] == 1, 0, some[:, 3])  # the last label has no positive sample
    some[0] = np.nan
    numbers = random.normal(size=(MOST, 2)).astype(np.float32)
    near = numbers + random.normal(size=(MOST, 2))
    some_numbers = np.where(random.random(numbers.shape) < 0.3, np.nan, numbers)
    masks = random.integers(0, 3, (MOST, 4, 6), dtype=np.uint8)  # the last class occurs in predictions alone
    masks[random.random(masks.shape) < 0.4] = 255
    masks[0] = 255
    pixels = random.normal(size=(MOST, 4, 4, 6))
    return {
        "classification": Case(classes, logits, of_classes, "classification"),
        "own measure": Case(classes, logits, macro_f1, "objective_tasks:MacroF1"),
        "syncing measure": Case(classes, logits, macro_f1, "objective_tasks:SyncingF1"),
        "known labels": Case(labels, logits, of_known_labels, "multilabel"),
        "labels": Case(some.astype(np.float32), logits, of_labels, "multilabel"),
        "number": Case(numbers[:, 0], near[:, :1], lambda t, p: of_numbers(t, p[:, 0]), "regression", ()),
        "numbers": Case(numbers, near, of_numbers, "regression", ()),
        "some numbers": Case(some_numbers.astype(np.float32), near, of_numbers, "regression", ()),
        "segmentation": Case(masks, pixels, of_pixels, "segmentation"),
    }


CASES = make_cases()


def evaluate(case: Case, size: int) -> dict[str, Any]:
    """Evaluate the first ``size`` samples in fp64; each image is its sample's number, by which the model knows it."""
    images = torch.arange(size, dtype=torch.uint8).view(-1, 1, 1, 1)
    source = images_in_memory(images, torch.from_numpy(case.targets[:size]), torch.device("cpu"))
    outputs = torch.from_numpy(case.outputs).double()
    split = Split(source, ListedOrder(np.arange(size, dtype=np.int32)))
    objective = case.make()
    columns = compute_split_columns(lambda images, *_: outputs[images.flatten().long()], split, BATCH, objective)
    return vars(measure_split(objective, columns))


def leave_evaluations(folder: Path) -> None:
    """Leave every case's evaluations from the last rank, which has the fewest samples."""
    found = {(name, size): evaluate(case, size) for (name, case), size in itertools.product(CASES.items(), SIZES)}
    if rank() == world_size() - 1:
        torch.save(found, folder / f"{world_size()}.pt")


@pytest.mark.slow
@pytest.mark.usefixtures("user_models")
def test_measures_are_scikit_learns_on_any_ranks(tmp_path: Path) -> None:
    """A batch or a rank without a positive sample, or without any, changes nothing; no sample is lost or repeated."""
    assert run_ranks(leave_evaluations, tmp_path, 2) == [0, 0]
    found = torch.load(tmp_path / "2.pt", weights_only=True)
    for (name, case), size in itertools.product(CASES.items(), SIZES):
        expected = case.expected(case.targets[:size], case.outputs[:size])
        plain = plain_columns(case, size)
        total = float(plain["loss"].sum()) / (float(plain["weight"].sum()) or 1.0 if "weight" in plain else size)
        measures, columns = (found[name, size][part] for part in ("measures", "columns"))
        at = f"{name}, {size} samples"
        assert list(measures) == [*case.make().measures, "loss"], at
        for measure, value in {"loss": total, **expected}.items():
            np.testing.assert_allclose(measures[measure], value, rtol=1e-12, err_msg=f"{at}, {measure}")
        assert columns.keys() == plain.keys(), at
        for column, values in plain.items():
            assert torch.equal(columns[column].nan_to_num(nan=-1.0), values.nan_to_num(nan=-1.0)), (at, column)
    assert math.isnan(found["labels", 1]["measures"]["f1"]), "the first sample has no known label"


def plain_columns(case: Case, size: int) -> dict[str, Tensor]:
    """Return the columns of the first samples, one after another, each by itself."""
    targets, outputs = torch.from_numpy(case.targets[:size]), torch.from_numpy(case.outputs[:size]).double()
    objective, rows = case.make(), []
    for sample in range(size):
        one = slice(sample, sample + 1)
        losses, weights = objective.losses(outputs[one], targets[one]), objective.weights(targets[one])
        used = losses if weights is None else losses * weights
        weight = {} if weights is None else {"weight": weights.reshape(1, -1).double().sum(1)}
        rows.append({"loss": used.reshape(1, -1).sum(1), **weight, **objective.columns(outputs[one], targets[one])})
    return {name: torch.cat([row[name].double() for row in rows]) for name in rows[0]}


def best_constant(objective: Objective, targets: Tensor, shape: tuple[int, ...]) -> float:
    """Return the least weighted mean loss that an output of ``shape``, equal for all samples and pixels, can have."""

    def loss(output: Values) -> float:
        spread = torch.from_numpy(output).view(1, -1, *[1] * (targets.dim() - 1 if len(shape) > 1 else 0))
        outputs = spread.expand(len(targets), *shape)
        losses, weights = objective.losses(outputs, targets), objective.weights(targets)
        used = torch.ones_like(losses) if weights is None else weights.double()
        return float((losses * used).sum() / used.sum())

    with torch.no_grad():
        return float(optimize.minimize(loss, np.zeros(shape[0]), method="Nelder-Mead", options=PRECISELY).fun)


PRECISELY = {"xatol": 1e-10, "fatol": 1e-13, "maxiter": 20_000, "maxfev": 20_000, "adaptive": True}


@pytest.mark.parametrize(
    ("name", "facts", "options"),
    [
        ("classification", {"class_weights": "0.5,2,3,1"}, {}),
        ("labels", {"class_weights": "0.5,2,3,1"}, {}),
        ("some numbers", {}, {"loss": "l1"}),
        ("segmentation", {}, {}),
    ],
)
def test_the_constant_loss_is_that_of_the_best_constant_output(name: str, facts: dict, options: dict) -> None:
    case = CASES[name]
    objective = make_objective(case.objective, Facts(case.classes, case.targets.shape[1:], **facts), options)
    targets = torch.from_numpy(case.targets)
    shape = case.outputs.shape[1:]
    outputs = torch.zeros(len(targets), *shape, dtype=torch.float64)
    columns = {key: column.double() for key, column in objective.columns(outputs, targets).items()}
    if (weights := objective.weights(targets)) is not None:
        columns["weight"] = weights.double().reshape(len(targets), -1).sum(1)
    assert objective.loss_of_best_constant(columns) == pytest.approx(best_constant(objective, targets, shape), rel=1e-6)


def test_outputs_that_are_not_finite_are_not_measured() -> None:
    """scikit-learn would raise; the loss, which is not finite either, ends the run in our words."""
    images, targets = torch.zeros(2, 1, 1, 1, dtype=torch.uint8), torch.zeros(2, 1)
    split, objective = (
        Split(images_in_memory(images, targets, torch.device("cpu")), ListedOrder(np.arange(2))),
        Regression(Facts((), (1,))),
    )
    outputs = torch.tensor([[0.5], [torch.nan]])
    found = measure_split(objective, compute_split_columns(lambda *_: outputs, split, 2, objective)).measures
    assert math.isnan(found.pop("loss"))
    assert [*found] == ["rmse", "mae", "r2"]
    assert all(math.isnan(value) for value in found.values())


class Unequal(Regression):
    """Has a column that is as wide as the batch is long."""

    def columns(self, outputs: Any, targets: Any) -> dict[str, Tensor]:
        return {"a": torch.zeros(len(outputs), len(outputs))}


def test_columns_of_two_shapes_are_refused() -> None:
    images, targets = torch.zeros(3, 1, 1, 1, dtype=torch.uint8), torch.zeros(3, 1)
    split = Split(images_in_memory(images, targets, torch.device("cpu")), ListedOrder(np.arange(3)))
    with pytest.raises(UserError, match=r"'a': \(2,\)\} in one batch and .*'a': \(1,\)\} in another"):
        compute_split_columns(lambda images, *_: torch.zeros(len(images), 1), split, 2, Unequal(Facts((), (1,))))


@pytest.mark.parametrize("shape", [(7,), (7, 3)])
@pytest.mark.parametrize("loss", ["mse", "l1", "huber"])
def test_known_numbers_need_no_weights(shape: tuple[int, ...], loss: str) -> None:
    """The loss is torch's mean in training and in evaluations, as it is by weights."""
    generator = torch.Generator().manual_seed(0)
    outputs, targets = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    expected = {"mse": functional.mse_loss, "l1": functional.l1_loss, "huber": functional.huber_loss}[loss]
    for known in (True, False):
        objective = Regression(Facts((), shape[1:], no_nan_targets=known), loss)
        weights = objective.weights(targets)
        assert (weights is None) == known
        total = objective.loss_sum(outputs, targets, weights, 7) / (7 if weights is None else weights.sum())
        columns = compute_batch_columns(objective, outputs, targets, 7)
        assert [*columns] == ["loss", *([] if known else ["weight"]), "prediction", "truth"]
        for found in (float(total), mean_loss(columns)):
            assert found == pytest.approx(float(expected(outputs, targets)), rel=1e-12)


def test_losses_of_pixels_have_the_bits_of_torchs_loss_of_images() -> None:
    """Also their gradients: the rows of pixels that they are computed from change no rounding."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 4, (3, 9, 7), generator=generator)
    targets[0, :4] = targets[2] = 255
    given = torch.randn(3, 4, 9, 7, generator=generator)
    own, plain = given.clone().requires_grad_(), given.clone().requires_grad_()
    found = make_objective("segmentation", Facts(CLASSES, (9, 7)), {}).losses(own, targets)
    expected = functional.cross_entropy(plain, targets, reduction="none", ignore_index=255)
    assert torch.equal(found, expected)
    for losses in (found, expected):
        (losses * losses.detach()).sum().backward()
    assert torch.equal(own.grad, plain.grad)  # type: ignore[arg-type]


def test_balanced_class_weights_are_scikit_learns() -> None:
    labels = np.repeat(np.arange(4), (7, 1, 20, 3))
    counts = tuple(np.bincount(labels).tolist())
    weights = parse_class_weights(Facts(CLASSES, class_counts=counts, class_weights="balanced"))
    expected = compute_class_weight("balanced", classes=np.arange(4), y=labels)
    np.testing.assert_array_equal(weights, expected.astype(np.float32))
