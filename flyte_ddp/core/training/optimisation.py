"""The optimiser, the schedule of the learning rate, and the moving average of a model."""

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain
from numbers import Real
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.swa_utils import AveragedModel

from flyte_ddp.core.checks.fields import short_repr
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.training.plan import OptimizerSettings, Values
from flyte_ddp.core.user_code.callables import check_positional_arguments, load_callable

ONE_CYCLE_RISE = 0.25  # share of the run during which one_cycle rises
NORMALISATION = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)  # the first: BatchNorm and InstanceNorm
STEPS_CHECKED = 1000  # steps for which a user-defined schedule is called before training
DECORATED_METHODS = ("add_param_group", "state_dict", "load_state_dict", "step")

# Maps the share, 0 to 1, of the steps after the warm-up that are done to a factor of the learning rate.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "one_cycle": lambda progress: 1.0 - progress,
}

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)
Schedule = Callable[[float, int], float]  # maps an initial rate and an optimiser step, from 0, to the step's rate


def create_optimizers(
    model: nn.Module, settings: OptimizerSettings, hyperparameters: Values
) -> list[torch.optim.Optimizer]:
    """Return the optimisers of a model: torch's SGD, Adam or AdamW, or the result of a user's callable.

    The user's callable gets the model and ``hyperparameters``. Torch's optimisers are fused unless a parameter is
    complex. Without ``decay_norms``, normalisation layers, biases and other vectors get no weight decay.

    Raises:
        UserError: The user's optimisers are unfit.
    """
    if settings.is_user_defined:
        return make_user_optimizers(model, settings.optimizer, hyperparameters)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    undecayed = set() if settings.decay_norms else list_parameters_without_decay(model)
    fused = True if all(parameter.is_floating_point() for parameter in parameters) else None
    rate, decay = settings.learning_rate, settings.weight_decay
    decayed = {"params": [parameter for parameter in parameters if parameter not in undecayed]}
    others = {"params": [parameter for parameter in parameters if parameter in undecayed], "weight_decay": 0.0}
    groups = [group for group in (decayed, others) if group["params"]]
    if settings.optimizer != "sgd":
        adam = strip_compiler_decorators(torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam)
        return [adam(groups, rate, (settings.momentum, 0.999), weight_decay=decay, fused=fused)]
    sgd_class = strip_compiler_decorators(torch.optim.SGD)
    sgd = sgd_class(groups, rate, settings.momentum, weight_decay=decay, nesterov=settings.nesterov, fused=fused)
    if settings.momentum:  # without it, fused SGD fails on a parameter that gets its first gradient later than others
        for parameter in parameters:
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return [sgd]


def list_parameters_without_decay(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of normalisation layers, and all parameters with fewer than two dimensions."""
    norms = [module for module in model.modules() if isinstance(module, NORMALISATION)]
    flat = {parameter for parameter in model.parameters() if parameter.dim() < 2}
    return flat.union(*(norm.parameters(recurse=False) for norm in norms))


def strip_compiler_decorators(optimizer_class: type[Kind]) -> type[Kind]:
    """Return a subclass of a torch optimiser whose methods do not import torch's compiler, which takes a second.

    The subclass computes the same.
    """
    methods = {name: inspect.unwrap(getattr(optimizer_class, name)) for name in DECORATED_METHODS}
    methods["step"] = torch.no_grad()(methods["step"])
    methods["zero_grad"] = remove_gradients
    return cast("type[Kind]", type(optimizer_class.__name__, (optimizer_class,), methods))


def remove_gradients(optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:  # noqa: ARG001
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def make_user_optimizers(model: nn.Module, spec: str, hyperparameters: Values) -> list[torch.optim.Optimizer]:
    """Import the user's callable ``spec``, call the callable with model and hyperparameters, and return the optimisers.

    Exceptions of the callable pass through.

    Raises:
        UserError: The callable cannot be imported, a result is no optimiser, or an optimiser needs a closure. Also
            raised if a trainable parameter is in no optimiser, or a parameter is in two.
    """
    function = load_callable(spec)
    check_positional_arguments(f"optimizer={spec!r}", function, "model", "hp")
    made = function(model, hyperparameters)
    optimizers = [*made] if isinstance(made, (list, tuple)) else [made]
    known: set[nn.Parameter] = set()
    for optimizer in optimizers:
        # Not isinstance, because optimisers of some libraries wrap an optimiser of torch without its base class.
        if any("lr" not in group for group in getattr(optimizer, "param_groups", [{}])):
            raise UserError(
                f"optimizer={spec!r}: returned {type(optimizer).__name__}: must be an optimiser with lr in "
                "each parameter group, or a list of such optimisers"
            )
        check_step_needs_no_closure(optimizer, spec)
        parameters = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in model.named_parameters():
            if parameter in known & parameters:
                raise UserError(
                    f"optimizer={spec!r}: parameter {name} is in two optimisers; remove the parameter from one"
                )
        known |= parameters
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in known:
            raise UserError(
                f"optimizer={spec!r}: parameter {name} is in no parameter group, and would never be trained; "
                f"add the parameter to a group, or set freeze={name!r}"
            )
    return optimizers


def check_step_needs_no_closure(optimizer: torch.optim.Optimizer, spec: str) -> None:
    """Raise UserError if the optimiser's ``step`` cannot be called without arguments. ``spec`` names the optimiser."""
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError as error:
        raise make_closure_error(spec, str(error)) from None


def make_closure_error(spec: str, reason: str) -> UserError:
    return UserError(
        f"optimizer={spec!r}: step() must work without arguments, after one backward pass without create_graph "
        f"({reason}); use another optimiser, or train in your own loop (docs/own-loop.md)"
    )


def do_first_user_optimizer_step(optimizer: torch.optim.Optimizer, spec: str) -> None:
    """Call ``step()`` of a user-defined optimiser, which updates the weights. ``spec`` names the optimiser in errors.

    Other exceptions than those below pass through.

    Raises:
        UserError: The step needs a closure, or gradients that have a graph.
    """
    try:
        optimizer.step()
    except Exception as error:  # libraries raise different classes for this
        if any(word in str(error) for word in ("closure", "create_graph", "grad_fn")):
            raise make_closure_error(spec, str(error)) from error
        raise


def make_schedule(kind: str, warmup_steps: int, total_steps: int) -> Schedule:
    """Return the schedule: a function of an initial learning rate and a step (from 0) that returns the step's rate.

    Built-in schedules rise for ``warmup_steps``. If ``warmup_steps`` is 0, one_cycle rises for a quarter of the steps.
    A user's function is imported, and is called up to 2,000 times as a check.

    Args:
        kind: "constant", "cosine", "one_cycle", or the name of a user's function of step and total_steps.
        warmup_steps: Steps of the rise. A user's function does not use them.
        total_steps: Steps of the whole run.

    Raises:
        UserError: The user's function cannot be imported, or its factor is negative, not finite, or differs between two
            calls. The returned function raises this error, too.
    """
    if ":" in kind:
        factor = load_callable(kind)
        check_positional_arguments(f"schedule={kind!r}", factor, "step", "total_steps")
        for step in np.unique(np.linspace(0, total_steps - 1, STEPS_CHECKED, dtype=int)).tolist():
            first, again = (require_valid_factor(kind, factor(step, total_steps), step, total_steps) for _ in range(2))
            if first != again:
                raise UserError(
                    f"schedule={kind!r}: returned {first} and then {again} for step {step} of {total_steps}: must "
                    "depend on step and total_steps only; do not count calls, and do not draw random numbers"
                )
        return lambda rate, step: rate * require_valid_factor(kind, factor(step, total_steps), step, total_steps)
    rise = warmup_steps
    if kind == "one_cycle" and not rise:
        rise = int(total_steps * ONE_CYCLE_RISE)

    def scheduled_rate(rate: float, step: int) -> float:
        if step < rise:
            return rate * (step + 1) / (rise + 1)
        return rate * SCHEDULES[kind]((step - rise) / max(1, total_steps - rise))

    return scheduled_rate


def require_valid_factor(spec: str, value: Any, step: int, total_steps: int) -> float:
    """Return ``value``, a user-defined schedule's factor for a step, as a float.

    Raises:
        UserError: The value is no number, not finite or negative.
    """
    if isinstance(value, Real) and math.isfinite(value) and float(value) >= 0:
        return float(value)
    raise UserError(
        f"schedule={spec!r}: returned {short_repr(value)} for step {step} of {total_steps}: the factor of the learning "
        "rate must be a finite number, at least 0"
    )


class MovingAverage(AveragedModel):
    """A copy of a model that averages weights and buffers. Integers are only copied.

    ``decay`` is the share of the old average that each update keeps.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model, use_buffers=True)
        self.decay = decay

    @torch.no_grad()  # torch's own method copies its count to the device, for which the host waits in each step
    def update_parameters(self, model: nn.Module) -> None:
        """Update the averages in place with the model's weights and buffers. The first call copies the values."""
        newest = dict(iterate_parameters_and_buffers(model, remove_duplicate=False))
        by_type: defaultdict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for name, average in iterate_parameters_and_buffers(self.module):
            if name not in newest:  # a removed buffer, which is rejected at the end of the epoch
                continue
            if not self.n_averaged:
                average.copy_(newest[name])
                continue
            means, values = by_type[average.dtype]
            means.append(average)
            values.append(newest[name].to(average.device))  # a model may have made a buffer anew, on the CPU
        for dtype, (means, values) in by_type.items():
            if dtype.is_floating_point or dtype.is_complex:
                torch._foreach_lerp_(means, values, 1 - self.decay)
            else:
                torch._foreach_copy_(means, values)
        self.n_averaged += 1


def iterate_parameters_and_buffers(module: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Iterate over names and tensors: first the parameters, then the buffers.

    Without ``remove_duplicate``, a tensor with several names is repeated under each name.
    """
    parameters = module.named_parameters(remove_duplicate=remove_duplicate)
    return chain(parameters, module.named_buffers(remove_duplicate=remove_duplicate))
