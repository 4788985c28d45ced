"""The evaluation of a model of many classes, whose batches are computed in parts."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flyte_ddp.objectives import Classification, Facts
from flyte_ddp.objectives.classification import split_logits
from flyte_ddp.predict.sample_columns import compute_prediction_columns
from flyte_ddp.release.evaluation import Evaluation, evaluate_best_constant

N, CLASSES = 8000, 1000
OBJECTIVE = Classification(Facts(tuple(f"class {number}" for number in range(CLASSES)), select_by="f1"))


class LargestTensor(TorchDispatchMode):
    """Records the bytes of the largest tensor that an operation returns, without views of the ``given`` one."""

    def __init__(self, given: Tensor) -> None:
        super().__init__()
        self.given, self.bytes = given.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        memory = [each.untyped_storage() for each in tree_leaves(returned) if isinstance(each, Tensor)]
        self.bytes = max([self.bytes, *(each.nbytes() for each in memory if each.data_ptr() != self.given)])
        return returned


@pytest.fixture(scope="module")
def logits() -> Tensor:
    return torch.randn(N, CLASSES, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def truth(logits: Tensor) -> Tensor:
    """All classes. The logits predict about half of the samples."""
    places = torch.arange(N)
    return torch.where(places % 2 == 0, logits.argmax(1), places // 2 % CLASSES)


def evaluate(logits: Tensor, truth: Tensor) -> Evaluation:
    """Evaluate the samples in two batches, the last of which is short."""
    return Evaluation.from_batches(
        OBJECTIVE, [(logits[part], truth[part], len(truth[part])) for part in (slice(0, N - 3), slice(N - 3, N))]
    )


def test_parts_of_a_batch_change_no_bit_of_any_measure(logits: Tensor, truth: Tensor) -> None:
    assert len(split_logits(logits)) > 50, "else nothing is computed in parts"
    found, numbers = evaluate(logits, truth), logits.double()
    logs = numbers.log_softmax(1)
    columns = {
        "loss": functional.cross_entropy(numbers, truth, reduction="none"),
        "prediction": numbers.argmax(1).double(),
        "truth": truth.double(),
        "confidence": logs.amax(1).exp(),
        "nll": -logs[torch.arange(N), truth],
    }
    assert found.columns.keys() == columns.keys()
    for name, column in columns.items():
        assert torch.equal(found.columns[name], column), name
    expected = truth.numpy(), logits.argmax(1).numpy()
    assert found.measures == pytest.approx(
        {
            "f1": metrics.f1_score(*expected, average="macro"),
            "accuracy": metrics.accuracy_score(*expected),
            "balanced_accuracy": metrics.balanced_accuracy_score(*expected),
            "loss": metrics.log_loss(truth.numpy(), numbers.softmax(1).numpy()),
        },
        rel=1e-12,
    )


def test_a_part_that_is_not_finite_is_found(logits: Tensor, truth: Tensor) -> None:
    broken = logits.clone()
    broken[[5, 4000, N - 1], 7] = torch.tensor([torch.nan, torch.inf, torch.nan])
    assert np.flatnonzero(~evaluate(broken, truth).finite).tolist() == [5, 4000, N - 1]


def test_a_judgement_makes_no_tensor_as_large_as_a_batch(logits: Tensor, truth: Tensor) -> None:
    with LargestTensor(logits) as largest:
        found = evaluate(logits, truth)
        evaluate_best_constant(found)
        compute_prediction_columns(logits, OBJECTIVE)
    assert logits.nbytes / 100 < largest.bytes < logits.nbytes / 20


def test_the_reference_has_the_confidence_and_entropy_of_each_sample(logits: Tensor) -> None:
    described, shares = compute_prediction_columns(logits, OBJECTIVE), logits.double().softmax(1).numpy()
    assert described["prediction"].tolist() == [f"class {number}" for number in shares.argmax(1)]
    np.testing.assert_allclose(described["confidence"], shares.max(1), rtol=1e-12)
    np.testing.assert_allclose(described["entropy"], -(shares * np.log(shares)).sum(1), rtol=1e-12)
