"""What a task's body returns: NumPy's numbers where Python's are declared."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from flytekitplugins.ddp.ranks import convert_outputs


@dataclass(frozen=True)
class Scores:
    loss: float
    counts: list[int]


class Named(NamedTuple):
    accuracy: float


@pytest.mark.parametrize(
    ("value", "kinds", "expected"),
    [
        (np.float64(0.5), [float], 0.5),
        (np.bool_(True), [bool], True),
        (np.str_("a"), [str], "a"),
        (np.array(2.5), [float], 2.5),
        (torch.tensor(2.5, requires_grad=True), [float], 2.5),
        (None, [], None),
        ((np.float64(0.5), torch.tensor(3)), [float, int], (0.5, 3)),
        (Named(np.float32(0.5)), [float], Named(0.5)),
        ({"a": [np.int64(1), 2]}, [dict], {"a": [1, 2]}),
        (Scores(np.float32(0.25), [np.int64(1)]), [Scores], Scores(0.25, [1])),
        ({"batches": torch.tensor(3)}, [dict], {"batches": torch.tensor(3)}),
        (torch.tensor(3), [torch.Tensor], torch.tensor(3)),
    ],
)
def test_numbers_of_numpy_and_torch_become_pythons(value: Any, kinds: list[Any], expected: Any) -> None:
    """A tensor stays one where no number is declared, as in a state_dict."""
    converted = convert_outputs(value, kinds)
    assert (converted, type(converted)) == (expected, type(expected))
    assert repr(converted) == repr(expected)  # which names NumPy's types, also within others
