"""Functions that are sent by value, as those of a main script are."""

import pickle
import types

import pytest
import torch

from flyte_ddp.loops.call import pickle_by_value

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
