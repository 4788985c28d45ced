"""N ranks compute what one process would, with any optimiser and frozen parts: in fp64, step by step."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import own_training
import pytest
import torch
from cli import HELPERS
from plain_loop import arrays_in_fp64
from ranks import run_ranks
from states import make_state
from torch import Tensor, nn
from torch.nn import functional
from training_runs import Train, losses, weights

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.models.inputs import InputSpec
from flyte_ddp.core.order import sampling
from flyte_ddp.core.parallel.distributed import rank, world_size
from flyte_ddp.core.training.train import apply_gradients, compute_gradients
from flyte_ddp.datasets import fetch, open_arrays
from flyte_ddp.models import zoo
from flyte_ddp.plans.resolve import detect_hardware

STEPS = 10
STRATEGIES = ("shared_memory", "ddp", "hooks")
ALL_STRATEGIES = ("small_cnn-13-3", "user_models:batch_norm-30-3", "own")  # the other cases have the first one alone
BASE = Hyperparameters(epochs=1000, max_steps=STEPS, schedule="cosine", precision="fp64", backend="gloo")
BASE = replace(BASE, validation_fraction=0.93)  # 105 of the 1,500 training samples of digits are left
# Each leaves a ragged last batch: of 9 samples, of 1 (so that all ranks but one have none), of 15 in three parts, and
# of 1 in three parts (of which two are empty on all ranks).
SIZES = {"small_cnn": ((32, 1), (13, 3)), "user_models:batch_norm": ((32, 1), (26, 1), (30, 3), (13, 3))}
SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
MakeOptimizer = Callable[[nn.Module, Hyperparameters], Any]  # one, or several in a tuple


def cosine(step: int) -> float:
    return (1 + np.cos(np.pi * step / STEPS)) / 2


def square(step: int) -> float:
    return (1 - step / STEPS) ** 2


def own_groups(model: nn.Module, _: Hyperparameters) -> torch.optim.Optimizer:
    conv, norm, _, linear = model.children()
    slow = {"params": [conv.weight, conv.bias], "lr": 0.001, "weight_decay": 0.0}
    fast = {"params": [norm.weight, norm.bias, linear.weight, linear.bias]}
    return torch.optim.AdamW([slow, fast], lr=0.01, weight_decay=0.1)


def decayed_matrices(kind: Any, **options: Any) -> MakeOptimizer:
    def make(model: nn.Module, _: Hyperparameters) -> torch.optim.Optimizer:
        conv, norm, _, linear = model.children()
        matrices = {"params": [conv.weight, linear.weight], "weight_decay": 0.1}
        return kind([matrices, {"params": [conv.bias, norm.weight, norm.bias, linear.bias]}], lr=0.01, **options)

    return make


def make_sgd(model: nn.Module, hp: Hyperparameters) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    options = {"momentum": hp.momentum, "nesterov": hp.nesterov, "weight_decay": hp.weight_decay}
    return SGD(parameters, lr=hp.learning_rate, **options)


def make_schedule_free(model: nn.Module, hp: Hyperparameters) -> torch.optim.Optimizer:
    optimizer = own_training.ScheduleFree(model.parameters(), hp.learning_rate)
    optimizer.train()
    return optimizer


class Case(NamedTuple):
    """A run, and how one would write its optimiser and schedule by hand."""

    hp: Hyperparameters
    optimizer: MakeOptimizer = make_sgd
    factor: Callable[[int], float] = cosine
    frozen: tuple[int, ...] = ()  # layers
    tolerance: float = 1e-9


OWN = {"optimizer": "own_training:two_groups", "schedule": "own_training:square"}
COSINE = replace(BASE, model="user_models:batch_norm", batch_size=26, learning_rate=0.01)
NO_DECAY = replace(COSINE, decay_norms=False, weight_decay=0.1)
CASES = {
    **{
        f"{model}-{batch_size}-{parts}": Case(
            replace(BASE, model=model, batch_size=batch_size, accumulation_steps=parts)
        )
        for model, sizes in SIZES.items()
        for batch_size, parts in sizes
    },
    "own": Case(replace(COSINE, **OWN), own_groups, square),
    "sgd": Case(NO_DECAY, decayed_matrices(SGD, momentum=0.9, nesterov=True, weight_decay=0.0)),
    # AdamW divides the gradient of the convolution's bias, which is rounding alone before BatchNorm, by 1e-8.
    "adamw": Case(replace(NO_DECAY, optimizer="adamw"), decayed_matrices(ADAMW, weight_decay=0.0), tolerance=1e-8),
    "two optimisers": Case(
        replace(COSINE, optimizer="own_training:sgd_and_adamw", grad_clip_norm=0.3), own_training.sgd_and_adamw
    ),
    "schedule-free": Case(replace(COSINE, optimizer="own_training:schedule_free"), make_schedule_free),
    "frozen but the head": Case(replace(COSINE, freeze="0,1"), frozen=(0, 1)),
}
RUNS = [(name, each) for name in CASES for each in STRATEGIES[: None if name in ALL_STRATEGIES else 1]]


def first_batches(hp: Hyperparameters, samples: sampling.Indices) -> Iterator[sampling.Indices]:
    order = sampling.ListedOrder(samples, hp.seed)
    return islice((batch for epoch in count() for batch in order.batches(epoch, hp.batch_size)), STEPS)


def train_in_ranks(folder: Path) -> None:
    """Leave, from rank 0, every case's losses and parameters after each step."""
    arrays, ranks = open_arrays(folder / "digits"), world_size()
    for name, strategy in RUNS:
        case = CASES[name]
        hp = replace(case.hp, strategy=strategy, num_ranks=ranks)
        state = make_state(hp, detect_hardware(hp), arrays)
        losses, states = [], []
        for batch in first_batches(hp, state.training.order.samples_at(slice(None))):
            losses.append(compute_gradients(state, batch).loss.item() / len(batch))
            apply_gradients(state)
            states.append({key: value.clone() for key, value in state.model.state_dict().items()})
        if rank() == 0:
            torch.save((losses, states), folder / f"{name}-{strategy}.pt")


def plain_loop(case: Case, data: Path) -> tuple[list[float], list[dict[str, Tensor]]]:
    """One process, torch's own layers and optimisers; of the library only the order of samples and the model."""
    hp, arrays = case.hp, open_arrays(data)
    torch.manual_seed(hp.seed)
    model = zoo.build_model(hp.model, 10, InputSpec(1, 8, 8, arrays.mean, arrays.std)).double()
    images, labels = arrays_in_fp64(data, "train")
    samples, _ = sampling.split_indices(len(labels), hp.validation_fraction, hp.seed)
    assert len(samples) == 105
    for number in case.frozen:
        model[number].requires_grad_(False).eval()
    made, losses, states = case.optimizer(model, hp), [], []
    optimizers = made if isinstance(made, tuple) else (made,)
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    for step, batch in enumerate(first_batches(hp, samples)):
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * case.factor(step)
        model.zero_grad()
        parts = [part for part in np.array_split(batch, hp.accumulation_steps) if len(part)]
        sums = [functional.cross_entropy(model(images[part]), labels[part], reduction="sum") for part in parts]
        loss = sum(sums) / len(batch)
        loss.backward()
        if hp.grad_clip_norm > 0:
            nn.utils.clip_grad_norm_(model.parameters(), hp.grad_clip_norm)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
        states.append({key: value.clone() for key, value in model.state_dict().items()})
    return losses, states


@pytest.fixture(scope="module")
def expected(digits: Path) -> dict[str, tuple[list[float], list[dict[str, Tensor]]]]:
    """Of each case, what the plain loop gives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(HELPERS)  # where user_models is found
        return {name: plain_loop(case, digits) for name, case in CASES.items()}


@pytest.mark.slow
def test_every_step_of_three_ranks_is_that_of_one_process(expected: dict[str, Any], tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(HELPERS)
    fetch("digits", "", tmp_path / "digits", progress="off")
    assert run_ranks(train_in_ranks, tmp_path, 3) == [0, 0, 0]
    for name, strategy in RUNS:
        (expected_losses, expected_states), tolerance = expected[name], CASES[name].tolerance
        losses, states = torch.load(tmp_path / f"{name}-{strategy}.pt")
        assert len(losses) == STEPS
        np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=tolerance)
        for state, other in zip(states, expected_states, strict=True):
            torch.testing.assert_close(state, other, rtol=0, atol=tolerance)


@pytest.mark.slow
@pytest.mark.usefixtures("user_models")
def test_a_run_reports_the_losses_of_one_process_and_saves_its_weights(train: Train, expected: dict[str, Any]) -> None:
    case = "user_models:batch_norm-13-3"
    result = train(replace(CASES[case].hp, num_ranks=2, log_interval=1))
    expected_losses, states = expected[case]
    assert losses(result) == pytest.approx(expected_losses, abs=1e-9)
    for name, value in weights(result).items():
        torch.testing.assert_close(value.double(), states[-1][name].double(), rtol=0, atol=1e-6)
