"""torch's compiler, which takes a second to import: only ranks that compile their model import it.

torch's optimisers and DistributedDataParallel import it to keep it out of what they do, torchvision for one question
that one of its operators may ask.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flyte_ddp.batch_norm import GlobalBatchNorm
from flyte_ddp.dropout import SampleDropout

DISABLED = "__dynamo_disable"  # where torch/_compile.py looks
DDP_MODE = "ddp_optimizer"  # what torch._dynamo.utils.get_optimize_ddp_mode answers as long as it is not configured
KEPT_OUT = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def compiled(model: nn.Module) -> nn.Module:
    """The model, compiled; but for layers that talk to other ranks, or see other samples at each step."""
    for module in model.modules():
        if isinstance(module, (GlobalBatchNorm, SampleDropout)):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign,no-untyped-call,unused-ignore]
    return cast("nn.Module", torch.compile(model))


def leave_out() -> None:
    """Tells torch, where it keeps what it has found out itself, that these methods need no compiler.

    Where another version of torch keeps that elsewhere, it imports the compiler, and all is as it would have been.
    """
    for function in methods():
        setattr(function, DISABLED, function)


def let_in_again() -> None:
    """Undoes that."""
    for function in methods():
        if getattr(function, DISABLED, None) is function:
            delattr(function, DISABLED)


def methods() -> list[Callable[..., object]]:
    """What it would be imported for, but for the optimisers' steps."""
    of_optimizers = [getattr(torch.optim.Optimizer, name) for name in KEPT_OUT]
    of_ddp = getattr(DistributedDataParallel, "_inside_ddp_forward", None)
    return [inspect.unwrap(method) for method in (*of_optimizers, of_ddp) if method is not None]


class StandIn:
    """Gives some of a module's names without importing it; whatever else is asked of it does import it."""

    def __init__(self, name: str, **known: object) -> None:
        self.__name = name
        self.__spec__ = None  # which imports look at
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        """What is not known here."""
        stop_standing_in()
        return getattr(importlib.import_module(self.__name), name)


def stop_standing_in() -> None:
    """Makes place for the modules themselves."""
    for name, module in [*sys.modules.items()]:
        if type(cast("object", module)) is StandIn:  # isinstance would load modules that load when they are looked at
            del sys.modules[name]


@contextmanager
def left_out_of_ddp() -> Iterator[None]:
    """Answers for the compiler, as long as nobody has imported it, what DDP's constructor asks it for.

    That is whether compiled code is to add gradients up, which somebody has to ask for in the compiler's configuration.
    """
    answers = StandIn("torch._dynamo", utils=StandIn("torch._dynamo.utils", get_optimize_ddp_mode=lambda: DDP_MODE))
    if "torch._dynamo" not in sys.modules:
        torch._dynamo = answers  # type: ignore[assignment,attr-defined,unused-ignore]
    try:
        yield
    finally:
        if vars(torch).get("_dynamo") is answers:
            del torch._dynamo


def import_torchvision() -> None:
    """Imports it, as long as nobody has imported the compiler, without that.

    ``torchvision.ops.roi_align`` wants a function of the compiler's, which it calls for a detector on a GPU, at most.
    """
    if "torch._dynamo" not in sys.modules:
        utils = StandIn("torch._dynamo.utils", __path__=[], is_compile_supported=is_compile_supported)
        sys.modules["torch._dynamo.utils"] = cast("ModuleType", utils)
        sys.modules["torch._dynamo"] = cast("ModuleType", StandIn("torch._dynamo", utils=utils))
    try:
        import torchvision  # noqa: F401
    finally:
        stop_standing_in()


def is_compile_supported(device_type: str) -> bool:
    """``torch._dynamo.utils.is_compile_supported``, which is imported when it is called."""
    return bool(importlib.import_module("torch._dynamo.utils").is_compile_supported(device_type))


def step(optimizer: torch.optim.Optimizer) -> None:
    """``optimizer.step()`` without its wrappers, for profilers, hooks and the compiler."""
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(optimizer)
