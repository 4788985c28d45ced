"""Training steps on N ranks and in parts, and the same steps in a plain loop. Tests compare both in fp64."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import objective_tasks as tasks
import pytest
import torch
from states import make_state
from torch import Tensor, nn

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.order import sampling
from flyte_ddp.core.parallel.distributed import rank
from flyte_ddp.core.training.evaluate import compute_split_columns, measure_split
from flyte_ddp.core.training.train import apply_gradients, compute_gradients
from flyte_ddp.datasets import open_prepared
from flyte_ddp.plans.resolve import detect_hardware

STEPS = 7  # more than an epoch of batches of 8
BASE = Hyperparameters(
    epochs=1000, max_steps=STEPS, schedule="constant", learning_rate=0.05, precision="fp64", backend="gloo",
    validation_fraction=0.0, test_batch_size=5,
)  # fmt: skip
# The losses and parameters after each step, and the loss of the test split.
Steps = tuple[list[float], list[dict[str, Tensor]], float]


def batches(hp: Hyperparameters) -> Iterator[sampling.Indices]:
    for epoch in range(hp.epochs):
        yield from sampling.ListedOrder(np.arange(tasks.TRAIN), hp.seed).batches(epoch, hp.batch_size)


def step_in_ranks(folder: Path, cases: Iterable[tuple[str, str, Hyperparameters]]) -> None:
    """Write each case's Steps from rank 0. A case is a name, a prepared folder's name, and hyperparameters."""
    ranks = torch.distributed.get_world_size()
    for name, data, case in cases:
        hp = replace(case, strategy="shared_memory")
        hardware = replace(detect_hardware(replace(BASE, num_ranks=ranks, strategy=hp.strategy)), threads=1)
        state = make_state(hp, hardware, open_prepared(folder / data))
        losses, states = [], []
        for batch in itertools.islice(batches(hp), STEPS):
            sums = compute_gradients(state, batch)
            losses.append(float(sums.loss) / (float(sums.weight) or 1.0))
            apply_gradients(state)
            states.append({key: value.clone() for key, value in state.model.state_dict().items()})
        with state.evaluation_mode():
            columns = compute_split_columns(state.predict, state.test, hp.test_batch_size, state.objective)
            found = measure_split(state.objective, columns)
        if rank() == 0:
            torch.save((losses, states, found.measures["loss"]), folder / f"{name}.pt")
        state.splits.close()


def step_plainly(
    hp: Hyperparameters,
    make_model: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module, sampling.Indices, int], tuple[Tensor, Tensor | float]],
    loss_of_tests: Callable[[nn.Module], tuple[Tensor, Tensor | float]],
) -> Steps:
    """Train in one process with torch's layers and optimiser. Losses are sums, each with the weight that divides them.

    ``loss_of`` gets the model, the samples of a batch, and the step.
    """
    torch.manual_seed(hp.seed)
    model = make_model().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, hp.momentum, weight_decay=hp.weight_decay, nesterov=True)
    losses, states = [], []
    for step, batch in enumerate(itertools.islice(batches(hp), STEPS)):
        optimizer.zero_grad()
        total, weight = loss_of(model, batch, step)
        loss = total / weight if weight else 0 * total
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        states.append({key: value.clone() for key, value in model.state_dict().items()})
    with torch.no_grad():
        total, weight = loss_of_tests(model)
    return losses, states, float(total / weight)


def check_steps(folder: Path, plain: dict[str, Steps]) -> None:
    """Assert that the ranks' Steps equal the plain loop's Steps to 1e-9."""
    for name, (losses, states, test_loss) in plain.items():
        found: Any = torch.load(folder / f"{name}.pt")
        np.testing.assert_allclose(found[0], losses, rtol=0, atol=1e-9, err_msg=name)
        for state, other in zip(found[1], states, strict=True):
            torch.testing.assert_close(state, other, rtol=0, atol=1e-9)
        assert found[2] == pytest.approx(test_loss, abs=1e-9)
