"""Sequences: a recurrent network that reads scikit-learn's digits row by row, as 8 rows of 8 numbers.

Run it with ``pyflyte run workflows/training.py training_wf --hp examples/sequences/hp.json``.
"""

from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from flyte_ddp import arrays


def read_rows(source: str) -> Any:  # noqa: ARG001 (the hyperparameter data_source, unused here)
    """Return 1,797 digits as sequences float [8 rows, 8 numbers] with their classes."""
    digits = load_digits()
    rows = (digits.images / 16).astype(np.float32)
    train, test, train_classes, test_classes = train_test_split(rows, digits.target, test_size=0.2, random_state=42)
    return arrays((train, train_classes), (test, test_classes))


class LastState(nn.Module):
    """Maps sequences [n, rows, numbers] to logits [n, classes] by the state after the last row."""

    def __init__(self, num_classes: int, input_shape: tuple[int, int], width: int = 64) -> None:
        super().__init__()
        self.recurrent = nn.GRU(input_shape[1], width, batch_first=True)
        self.head = nn.Linear(width, num_classes)

    def forward(self, rows: Tensor) -> Tensor:
        logits: Tensor = self.head(self.recurrent(rows)[0][:, -1])
        return logits
