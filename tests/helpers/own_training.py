"""Optimisers, schedules and orders such as users bring, named in tests as ``own_training:...``."""

from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import nn

from flyte_ddp.config import Hyperparameters


def two_groups(model: nn.Module, hp: Hyperparameters) -> torch.optim.Optimizer:
    """The first layer at a tenth of the rate; the others decay."""
    first, *others = model.children()
    rest = [parameter for layer in others for parameter in layer.parameters()]
    slow = {"params": [*first.parameters()], "lr": hp.learning_rate / 10, "weight_decay": 0.0}
    return torch.optim.AdamW([slow, {"params": rest}], lr=hp.learning_rate, weight_decay=0.1)


class Precise(torch.optim.Optimizer):
    """SGD on a copy of the weights in fp64: the state has another type than the parameters."""

    def __init__(self, parameters: Any, lr: float, note: object = "a note") -> None:
        super().__init__(parameters, {"lr": lr})
        self.note = note

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        count = torch.zeros(1, dtype=torch.int64, device=parameter.device)
                        state |= {"precise": parameter.double(), "count": count, "note": self.note}
                    state["count"] += 1
                    state["precise"] -= group["lr"] * parameter.grad.double() / (1 + state["count"] % 3)
                    parameter.copy_(state["precise"])


def precise(model: nn.Module, hp: Hyperparameters) -> torch.optim.Optimizer:
    first, *others = [*model.parameters()]
    return Precise([{"params": [first], "lr": hp.learning_rate / 3}, {"params": others}], hp.learning_rate)


class Noisy(torch.optim.SGD):
    """Adds noise to the weights."""

    def step(self, closure: None = None) -> None:
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(torch.randn_like(parameter), alpha=0.01)


def noisy(model: nn.Module, hp: Hyperparameters) -> torch.optim.Optimizer:
    return Noisy(model.parameters(), hp.learning_rate)


def not_saved(model: nn.Module, hp: Hyperparameters) -> torch.optim.Optimizer:
    return Precise(model.parameters(), hp.learning_rate, note=Fraction(1, 3))


def forgetful(model: nn.Module, hp: Hyperparameters) -> torch.optim.Optimizer:
    return torch.optim.SGD([*model.parameters()][:-1], hp.learning_rate)


def square(step: int, total_steps: int) -> float:
    return (1 - step / total_steps) ** 2


def nan_in_step_7(step: int, total_steps: int) -> float:
    return float("nan") if step == 7 else 1.0


def counting(step: int, total_steps: int) -> float:
    """Not pure: it depends on how often it was called."""
    counting.calls = getattr(counting, "calls", 0) + 1  # type: ignore[attr-defined]
    return 1 / counting.calls  # type: ignore[attr-defined,no-any-return]


def every_third(samples: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """A third of the samples, mixed."""
    return np.random.default_rng([seed, epoch]).permutation(samples)[::3]


def sorted_in_place(samples: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    samples[::2] = samples[0]
    return samples


def shrinking(samples: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    return samples[epoch:]


def drawing(samples: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Not pure."""
    return np.random.permutation(samples)  # noqa: NPY002


def outside(samples: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    return np.arange(len(samples) + 500)


def fractions(samples: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    return samples / 2


def nothing(samples: np.ndarray, seed: int, epoch: int) -> list[int]:
    return []
