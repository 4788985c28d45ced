"""N ranks compute what one process would: in fp64, against a plain loop, parameter by parameter after each step."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli import HELPERS
from plain_loop import arrays_in_fp64, plain_steps
from ranks import run_ranks
from torch import Tensor
from training_runs import Train

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import fetch, open_arrays
from flyte_ddp.hardware import detect_hardware
from flyte_ddp.json_lines import read_records
from flyte_ddp.models import zoo
from flyte_ddp.models.images import InputSpec
from flyte_ddp.order import sampling
from flyte_ddp.parallel.distributed import rank
from flyte_ddp.training.train import apply_gradients, compute_gradients
from flyte_ddp.training.training_state import TrainingState

STEPS = 25
STRATEGIES = {
    1: ("shared_memory",),  # none is needed
    2: ("shared_memory", "ddp", "hooks"),
    3: ("shared_memory", "ddp"),
    4: ("shared_memory",),
}
BASE = Hyperparameters(epochs=1000, max_steps=STEPS, schedule="cosine", precision="fp64", backend="gloo")
BASE = replace(BASE, validation_fraction=0.93)  # 105 of the 1,500 training samples of digits are left
# Each leaves a ragged last batch: of 9 samples, of 1 (so that all ranks but one have none), of 15 in three parts, and
# of 1 in three parts (of which two are empty on all ranks).
SIZES = {"small_cnn": ((32, 1), (13, 3)), "user_models:batch_norm": ((32, 1), (26, 1), (30, 3), (13, 3))}
CASES = {
    f"{model}-{batch_size}-{parts}": replace(BASE, model=model, batch_size=batch_size, accumulation_steps=parts)
    for model, sizes in SIZES.items()
    for batch_size, parts in sizes
}


def batches(hp: Hyperparameters, samples: sampling.Indices) -> Iterator[sampling.Indices]:
    for epoch in range(hp.epochs):
        yield from sampling.ListedOrder(samples, hp.seed).batches(epoch, hp.batch_size)


def train_in_ranks(folder: Path) -> None:
    """Leaves, from rank 0, every case's losses and parameters after each step."""
    arrays = open_arrays(folder / "digits")
    ranks = torch.distributed.get_world_size()
    for (name, case), strategy in itertools.product(CASES.items(), STRATEGIES[ranks]):
        hp = replace(case, strategy=strategy, num_ranks=ranks)
        state = TrainingState(hp, detect_hardware(hp), arrays, None)
        losses, states = [], []
        for _, batch in zip(range(STEPS), batches(hp, state.training.order.samples(slice(None))), strict=False):
            losses.append(compute_gradients(state, batch).loss.item() / len(batch))
            apply_gradients(state)
            states.append({key: value.clone() for key, value in state.model.state_dict().items()})
        if rank() == 0:
            torch.save((losses, states), folder / f"{name}-{strategy}.pt")


def plain_loop(hp: Hyperparameters, data: Path) -> tuple[list[float], list[dict[str, Tensor]]]:
    """One process, torch's own layers and optimiser; of the library only the order of samples and the model."""
    torch.manual_seed(hp.seed)
    arrays = open_arrays(data)
    model = zoo.build_model(hp.model, 10, InputSpec(1, 8, 8, arrays.mean, arrays.std)).double()
    images, labels = arrays_in_fp64(data, "train")
    training, _ = sampling.split_indices(len(labels), hp.validation_fraction, hp.seed)
    assert len(training) == 105
    losses, states = [], []
    first = itertools.islice(batches(hp, training), STEPS)
    cosine = [hp.learning_rate * (1 + np.cos(np.pi * step / STEPS)) / 2 for step in range(STEPS)]
    for loss in plain_steps(hp, model, images, labels, first, cosine.__getitem__):
        losses.append(loss)
        states.append({key: value.clone() for key, value in model.state_dict().items()})
    return losses, states


@pytest.fixture(scope="module")
def expected(digits: Path) -> dict[str, tuple[list[float], list[dict[str, Tensor]]]]:
    """Of each case, what the plain loop gives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(HELPERS)  # where user_models is found
        return {name: plain_loop(hp, digits) for name, hp in CASES.items()}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.exhaustive) for ranks in (1, 3, 4))])
def test_every_step_of_any_number_of_ranks_is_that_of_one_process(
    ranks: int, expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(HELPERS)
    fetch("digits", "", tmp_path / "digits", progress="off")
    assert run_ranks(train_in_ranks, tmp_path, ranks) == [0] * ranks
    for name, (expected_losses, expected_states) in expected.items():
        assert expected_losses[-1] < 0.9 * expected_losses[0], "the loop that this is compared with learns"
        for strategy in STRATEGIES[ranks]:
            losses, states = torch.load(tmp_path / f"{name}-{strategy}.pt")
            assert len(losses) == STEPS
            np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=1e-9)
            for state, other in zip(states, expected_states, strict=True):
                torch.testing.assert_close(state, other, rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("user_models")
@pytest.mark.parametrize(
    ("ranks", "case", "strategy"),
    [
        (1, "small_cnn-32-1", "auto"),
        (2, "user_models:batch_norm-13-3", "shared_memory"),
        pytest.param(3, "small_cnn-13-3", "ddp", marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_reports_the_losses_of_one_process_and_saves_its_weights(
    train: Train, expected: dict[str, Any], ranks: int, case: str, strategy: str
) -> None:
    result = train(replace(CASES[case], num_ranks=ranks, strategy=strategy, log_interval=1))
    losses, states = expected[case]
    reported = [record["loss"] for record in read_records(result.metrics) if record["kind"] == "train"]
    assert reported == pytest.approx(losses, abs=1e-9)
    for name, value in torch.load(result.model, weights_only=True).items():
        torch.testing.assert_close(value.double(), states[-1][name].double(), rtol=0, atol=1e-6)
