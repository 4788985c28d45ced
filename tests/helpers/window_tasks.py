"""A table of prices that drifts in tests: three numbers and a category, with known truth."""

from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from flyte_ddp import arrays
from flyte_ddp.objectives import Regression

TRAIN, TEST, CATEGORIES = 600, 600, 3
WEIGHTS = np.array([1.0, -2.0, 0.5, 0.3])


def draw_rows(samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows [n, 4] and their prices [n]."""
    random = np.random.default_rng(seed)
    rows = np.column_stack([random.normal(size=(samples, 3)), random.integers(0, CATEGORIES, samples)])
    return rows, (rows @ WEIGHTS + random.normal(0, 0.5, samples)).astype(np.float32)


def prices(_: str) -> Any:
    (train, known), (test, truth) = draw_rows(TRAIN, 1), draw_rows(TEST, 2)
    return arrays((train, known), (test, truth), prepare=prepare)


def prepare(_: Any, source: str) -> Any:
    """Read rows of an id and numbers."""
    lines = [line.split(",") for line in Path(source).read_text().splitlines()]
    return np.array([[float(each) for each in numbers] for _, *numbers in lines]), [name for name, *_ in lines]


def write_rows(path: Path, rows: np.ndarray) -> Path:
    path.write_text("".join(f"row {place},{','.join(map(str, row))}\n" for place, row in enumerate(rows.tolist())))
    return path


def linear(num_classes: int, input_shape: tuple[int]) -> nn.Module:
    return nn.Linear(*input_shape, num_classes)


class Silent(Regression):
    """Returns no answers for tables, other answers in the second batch, or too few answers."""

    def __init__(self, *given: Any, how: str = "raises", **others: Any) -> None:
        super().__init__(*given, **others)
        self.how, self.calls = how, 0

    def answers(self, outputs: Any) -> Any:
        self.calls += 1
        if self.how == "raises":
            raise RuntimeError("no words")
        outputs.zero_()  # the judged outputs must not change
        values = outputs[:, 0].tolist()
        return {"few": {"number": values[1:]}, "other": {f"number {self.calls}": values}}[self.how]
