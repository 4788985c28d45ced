"""A table with rare positives (5 %), drawn from a logistic model of five columns."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from flyte_ddp import arrays

ROWS, TESTS = 8000, 2000
WEIGHTS = np.array([1.0, -0.7, 0.5, 0.0, 0.0])
INTERCEPT = -3.5  # makes one row in twenty positive


def draw_rows(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    rows = random.normal(size=(ROWS + TESTS, len(WEIGHTS))).astype(np.float32)
    return rows, (random.random(len(rows)) < 1 / (1 + np.exp(-(rows @ WEIGHTS + INTERCEPT)))).astype(np.int64)


def table(_: str) -> Any:
    rows, classes = draw_rows()
    return arrays((rows[TESTS:], classes[TESTS:]), (rows[:TESTS], classes[:TESTS]), classes=["no", "yes"])


def named(_: str) -> Any:
    """Return the first two columns of the table, by name."""
    rows, classes = draw_rows()
    test, train = ({"age": part[:, 0], "income": part[:, 1]} for part in (rows[:TESTS], rows[TESTS:]))
    return arrays((train, classes[TESTS:]), (test, classes[:TESTS]), classes=["no", "yes"])


class OfNamed(nn.Module):
    """A linear model of the two columns."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(2, num_classes)

    def forward(self, age: Tensor, income: Tensor) -> Any:
        return self.head(torch.stack([age, income], 1))


def linear(num_classes: int, input_shape: tuple[int]) -> nn.Module:
    return nn.Linear(*input_shape, num_classes)


def focal(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = functional.cross_entropy(outputs, targets, reduction="none")
    return (1 - torch.exp(-loss)) ** 2 * loss
