"""A call on its way to ranks: what tells a checkpoint's arguments from others, and what can be sent."""

import os
import pickle
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flyte_ddp.calls import make_comparable_value, pickle_by_value


class Config:
    """Sets, which differ in order from process to process, and tensors."""

    def __init__(self) -> None:
        self.classes, self.weights = {"cat", "dog", "horse", "ship"}, torch.arange(3, dtype=torch.bfloat16)


def describe_arguments() -> str:
    return str(
        make_comparable_value([torch.arange(4.0), {"weight": torch.ones(2, 2)}, Config(), frozenset(["cat", "dog"])])
    )


def test_arguments_are_the_same_in_all_processes() -> None:
    """Python's own order of texts in sets is another in each; a tensor's address is, too."""
    elsewhere = [torch.zeros(number) for number in range(300)]
    described = describe_arguments()
    assert "Tensor " in described
    code = "import test_arguments; print(test_arguments.describe_arguments())"
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(__file__).parent)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert ended.stdout.strip() == described
    assert elsewhere


def test_tensors_with_other_values_shapes_or_types_differ() -> None:
    values = [torch.zeros(4), torch.ones(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.zeros(())]
    assert len({make_comparable_value(value) for value in values}) == len(values)
    assert make_comparable_value(torch.ones(2, 3).T) == make_comparable_value(torch.ones(3, 2))


def make_loss(weight: float) -> Callable[[float], Any]:
    """Return a function that knows its weight, and itself."""

    def loss(value: float) -> Any:
        return loss if value < 0 else weight * value

    return loss


def test_functions_differ_by_what_they_bring_along() -> None:
    assert (
        make_comparable_value(make_loss(0.5))
        == make_comparable_value(make_loss(0.5))
        != make_comparable_value(make_loss(0.25))
    )
    assert make_comparable_value("a".join) != make_comparable_value("b".join)
    assert make_comparable_value(make_loss) == f"{__name__}:make_loss"


CLASSES = "def function(data): return torch.ones(len(data.classes))"  # torch has a module of this name
SCRIPTS = [CLASSES, "def function(): torch.backends.cudnn.benchmark = True", "def function(): return torch.ops.aten"]


@pytest.mark.parametrize("code", SCRIPTS)
def test_functions_may_name_torch_and_modules_that_are_no_ordinary_ones(code: str) -> None:
    script = types.ModuleType("__main__")
    script.torch = torch
    exec(code, vars(script))
    sent = pickle.loads(pickle_by_value(script.function))
    assert sent.__code__ == script.function.__code__
    assert sent.__globals__["torch"] is torch
