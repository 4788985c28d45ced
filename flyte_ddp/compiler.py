"""torch's compiler, which takes a second to import: only ranks that compile their model import it.

torch's optimisers import it to keep it out of what they do, in every method and at every step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from flyte_ddp.batch_norm import GlobalBatchNorm
from flyte_ddp.dropout import SampleDropout

DISABLED = "__dynamo_disable"  # where torch/_compile.py looks
KEPT_OUT = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def compiled(model: nn.Module) -> nn.Module:
    """The model, compiled; but for layers that talk to other ranks, or see other samples at each step."""
    for module in model.modules():
        if isinstance(module, (GlobalBatchNorm, SampleDropout)):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign,no-untyped-call,unused-ignore]
    return cast("nn.Module", torch.compile(model))


def leave_out_of_optimizers() -> None:
    """Tells torch's optimisers, where it keeps what it has found out itself, that their methods need no compiler.

    Where another version of torch keeps that elsewhere, it imports the compiler, and all is as it would have been.
    """
    for function in methods():
        setattr(function, DISABLED, function)


def back_into_optimizers() -> None:
    """Undoes that."""
    for function in methods():
        if getattr(function, DISABLED, None) is function:
            delattr(function, DISABLED)


def methods() -> list[Callable[..., object]]:
    """What the optimisers would import it for, but for their steps."""
    return [inspect.unwrap(getattr(torch.optim.Optimizer, name)) for name in KEPT_OUT]


def step(optimizer: torch.optim.Optimizer) -> None:
    """``optimizer.step()`` without its wrappers, for profilers, hooks and the compiler."""
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(optimizer)
