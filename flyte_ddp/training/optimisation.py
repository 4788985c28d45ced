"""The optimiser, gradient clipping, and the schedule of the learning rate."""

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
from torch import nn

from flyte_ddp import catalog
from flyte_ddp.config import Hyperparameters

ONE_CYCLE_RISE = 0.25  # share of the run during which one_cycle rises
PHOTO_CLIP_NORM = 1.0
DECORATED_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict", "step")

# Maps the share of the run that is done, 0 to 1, to a factor of the learning rate.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "one_cycle": lambda progress: 1.0 - progress,
}

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)


def make_optimizer(
    parameters: Iterable[nn.Parameter], kind: str, rate: float, momentum: float, *, nesterov: bool, decay: float
) -> torch.optim.Optimizer:
    """Return the optimiser ``kind`` (sgd, adam, adamw) of parameters with ``requires_grad``; fused if none is complex.

    ``rate`` is the learning rate, ``momentum`` the first beta of Adam and AdamW, ``decay`` the weight decay.
    """
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    fused = True if all(parameter.is_floating_point() for parameter in parameters) else None
    options: dict[str, Any] = {"lr": rate, "weight_decay": decay, "fused": fused}
    if kind != "sgd":
        adam = strip_compiler_decorators(torch.optim.AdamW if kind == "adamw" else torch.optim.Adam)
        return adam(parameters, betas=(momentum, 0.999), **options)
    sgd = strip_compiler_decorators(torch.optim.SGD)(parameters, momentum=momentum, nesterov=nesterov, **options)
    if momentum:  # without it, fused SGD fails on a parameter that gets its first gradient later than others
        for parameter in parameters:
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return sgd


def strip_compiler_decorators(optimizer_class: type[Kind]) -> type[Kind]:
    """Return a subclass of torch's optimiser whose methods do not import torch's compiler: the import takes a second.

    Removes the decorators of DECORATED_METHODS; ``step`` gets ``torch.no_grad`` again.
    """
    methods = {name: inspect.unwrap(getattr(optimizer_class, name)) for name in DECORATED_METHODS}
    methods["step"] = torch.no_grad()(methods["step"])
    return cast("type[Kind]", type(optimizer_class.__name__, (optimizer_class,), methods))


def gradient_clip_norm(hp: Hyperparameters) -> float:
    """Return the norm that gradients are clipped to: ``grad_clip_norm``, or a default if that is negative; 0: no limit.

    The default is PHOTO_CLIP_NORM (1) for small_cnn and tutorial on image_folder:, shards: or stream: data sets, else
    0. These models have no normalisation between layers: on photos, at the default learning rate, their loss explodes,
    or they learn nothing.
    """
    if hp.grad_clip_norm >= 0:
        return hp.grad_clip_norm
    return PHOTO_CLIP_NORM if hp.model in catalog.SMALL_MODELS and catalog.encoded_kind(hp.dataset) else 0.0


def learning_rate(hp: Hyperparameters, step: int, total_steps: int) -> float:
    """Return the learning rate of optimiser step ``step`` (counted from 0) of ``total_steps``.

    Rises linearly for ``warmup_steps`` (one_cycle: for a quarter of the steps if that is 0), then follows ``schedule``.
    """
    warmup = hp.warmup_steps
    if hp.schedule == "one_cycle" and not warmup:
        warmup = int(total_steps * ONE_CYCLE_RISE)
    if step < warmup:
        return hp.learning_rate * (step + 1) / (warmup + 1)
    return hp.learning_rate * SCHEDULES[hp.schedule]((step - warmup) / max(1, total_steps - warmup))
