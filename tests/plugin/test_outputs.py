"""What a task's body returns: NumPy's numbers where Python's are declared."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from flytekitplugins.ddp.ranks import convert_outputs


class Named(NamedTuple):
    accuracy: float


@pytest.mark.parametrize(
    ("value", "kinds", "expected"),
    [
        (np.float64(0.5), [float], 0.5),
        (np.str_("a"), [str], "a"),
        (torch.tensor(2.5, requires_grad=True), [float], 2.5),
        (None, [], None),
        ((np.float64(0.5), torch.tensor(3)), [float, int], (0.5, 3)),
        (Named(np.float32(0.5)), [float], Named(0.5)),
        (torch.tensor(3), [torch.Tensor], torch.tensor(3)),
    ],
)
def test_numbers_of_numpy_and_torch_become_pythons(value: Any, kinds: list[Any], expected: Any) -> None:
    """A tensor stays one where no number is declared, as in a state_dict."""
    converted = convert_outputs(value, kinds)
    assert (converted, type(converted)) == (expected, type(expected))
    assert repr(converted) == repr(expected)  # which names NumPy's types, also within others
