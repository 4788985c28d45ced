"""The first steps of a training on the digits, whose hyperparameters give each rank parts of many sizes."""

from pathlib import Path

import torch
from plain_loop import arrays_in_fp64
from torch import Tensor
from torch.nn import functional

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import open_arrays
from flyte_ddp.hardware import detect_hardware
from flyte_ddp.order import sampling
from flyte_ddp.training.train import apply_gradients, compute_gradients
from flyte_ddp.training.training_state import TrainingState

STEPS = 6
# 13 samples a batch in 3 parts: of a part of 4 or 5 on 3 ranks all have some; the last batch of 105 is one sample.
BASE = Hyperparameters(
    validation_fraction=0.93, epochs=100, batch_size=13, accumulation_steps=3, precision="fp64", backend="gloo"
)


def first_batches(order: sampling.Order) -> list[sampling.Indices]:
    """Return the batches of an epoch, the last two first."""
    batches = [*order.batches(0, BASE.batch_size)]
    return [*batches[-2:], *batches[: STEPS - 2]]


def after_steps(hp: Hyperparameters, data: Path) -> TrainingState:
    state = TrainingState(hp, detect_hardware(hp), open_arrays(data), None)
    for batch in first_batches(state.training.order):
        compute_gradients(state, batch)
        apply_gradients(state)
    return state


def losses_of(model: torch.nn.Module, data: Path) -> Tensor:
    """Return the loss of each test image."""
    images, labels = arrays_in_fp64(data, "test")
    with torch.no_grad():
        logits = model(images.to(next(model.parameters()).dtype)).double()
    return functional.cross_entropy(logits, labels, reduction="none")
