"""The user's own optimiser: what makes it one that can be trained with, saved and loaded again."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UserError
from flyte_ddp.models.zoo import find_refused_value
from flyte_ddp.user_code.callables import load_callable


def make_own_optimizer(model: nn.Module, hp: Hyperparameters) -> torch.optim.Optimizer:
    """Return the optimiser of the user's callable that ``hp.optimizer`` names; UserError if it is unfit to train."""
    optimizer = load_callable(hp.optimizer)(model, hp)
    where = f"optimizer={hp.optimizer!r}"
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"{where}: returned a {type(optimizer).__name__}: must return a torch.optim.Optimizer")
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError as error:
        raise UserError(f"{where}: its step cannot be called alone ({error}), as of LBFGS; choose another") from None
    if any("lr" not in group for group in optimizer.param_groups):
        raise UserError(f"{where}: has a parameter group without 'lr', which the schedule sets; give it a rate")
    known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in known:
            raise UserError(
                f"{where}: parameter {name} is in none of its groups, and would never be trained; add it to one, or "
                f"set freeze={name!r}"
            )
    return optimizer


def check_optimizer_state(optimizer: torch.optim.Optimizer, spec: str) -> None:
    """Raise UserError if ``torch.load(weights_only=True)`` refuses a value of the optimiser's state after a step."""
    parts = {**optimizer.state_dict()}  # an optimiser may have other parts than torch's two
    for number, values in parts.pop("state", {}).items():
        items = values.items() if isinstance(values, Mapping) else [("", values)]
        parts |= {f"state[{number}][{key!r}]": value for key, value in items}
    for number, group in enumerate(parts.pop("param_groups", [])):
        parts |= {f"param_groups[{number}][{key!r}]": value for key, value in group.items()}
    if found := find_refused_value(parts):
        key, value = found
        raise UserError(
            f"optimizer={spec!r}: keeps a {type(value).__name__} in {key}: torch.load(weights_only=True) refuses it, "
            "and could read no checkpoint; keep only tensors, numbers, text, and dicts and lists of them there"
        )


def load_optimizer_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load a ``state_dict`` with the types that it was saved with; torch casts a parameter's state to its type."""
    optimizer.load_state_dict(saved)
    if not {"state", "param_groups"} <= saved.keys():  # the user's own form, which torch does not look into
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        state = optimizer.state.get(parameter, {})
        for key, value in saved["state"].get(number, {}).items():
            loaded = state.get(key)
            if isinstance(value, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                state[key] = value.to(loaded.device)
