"""What a task's body returns: NumPy's numbers where Python's are declared."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from flytekitplugins.ddp.ranks import to_python


@dataclass(frozen=True)
class Scores:
    loss: float
    counts: list[int]


class Named(NamedTuple):
    accuracy: float


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(0.5), 0.5),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.array(2.5), 2.5),
        (torch.tensor(2.5, requires_grad=True), 2.5),
        (None, None),
        ((np.float64(0.5), "a"), (0.5, "a")),
        (Named(np.float32(0.5)), Named(0.5)),
        ({"a": [np.int64(1), 2]}, {"a": [1, 2]}),
        (Scores(np.float32(0.25), [np.int64(1)]), Scores(0.25, [1])),
    ],
)
def test_numbers_of_numpy_and_torch_become_pythons(value: Any, expected: Any) -> None:
    converted = to_python(value)
    assert (converted, type(converted)) == (expected, type(expected))
    assert repr(converted) == repr(expected)  # which names NumPy's types, also within others
