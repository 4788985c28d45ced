"""User-defined optimisers, schedules and orders, named in tests as ``own_training:...``."""

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from flyte_ddp.config import Hyperparameters


def two_groups(model: nn.Module, hp: Hyperparameters) -> torch.optim.Optimizer:
    """Return AdamW with a tenth of the rate for the first layer, and weight decay for the others."""
    first, *others = model.children()
    rest = [parameter for layer in others for parameter in layer.parameters()]
    slow = {"params": [*first.parameters()], "lr": hp.learning_rate / 10, "weight_decay": 0.0}
    return torch.optim.AdamW([slow, {"params": rest}], lr=hp.learning_rate, weight_decay=0.1)


class Precise(torch.optim.Optimizer):
    """SGD on a copy of the weights in fp64. The state has other types than the parameters, also in a list."""

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
                        state |= {"precise": [parameter.double(), {"divide by": "1 + i % 3"}], "count": count}
                        state |= {"note": self.note}
                    state["count"] += 1
                    precise, how = state["precise"]
                    precise -= group["lr"] * parameter.grad.double() / eval(how["divide by"], {"i": state["count"]})
                    parameter.copy_(precise)


def precise(model: nn.Module, hp: Hyperparameters) -> torch.optim.Optimizer:
    first, *others = [*model.parameters()]
    return Precise([{"params": [first], "lr": hp.learning_rate / 3}, {"params": others}], hp.learning_rate)


class Counting(torch.optim.SGD):
    """Takes smaller steps from step to step, by numbers outside the state_dict."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.steps, self.factor = 0, torch.ones((), dtype=torch.float64)
        self.rank = dist.get_rank() if dist.is_initialized() else 0  # a resume must not change the rank

    def step(self, closure: None = None) -> None:
        assert self.rank == (dist.get_rank() if dist.is_initialized() else 0)
        self.steps, self.factor = self.steps + 1, self.factor * 0.9
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad *= self.factor.item() / self.steps
        super().step()


def counting_steps(model: nn.Module, hp: Hyperparameters) -> torch.optim.Optimizer:
    first, *others = [*model.parameters()]
    return Pair([Counting([first], hp.learning_rate), Counting(others, hp.learning_rate)], saves=True)


class Helped(torch.optim.SGD):
    """Keeps another optimiser in a helper object."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, lr)
        self.helper = SimpleNamespace(inner=torch.optim.AdamW(parameters, lr))

    def step(self, closure: None = None) -> None:
        self.helper.inner.step()


def helped(model: nn.Module, hp: Hyperparameters) -> torch.optim.Optimizer:
    return Helped([*model.parameters()], hp.learning_rate)


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


def joined(model: nn.Module, hp: Hyperparameters) -> list[torch.optim.Optimizer]:
    """Return Muon for matrices, and another optimiser for other parameters."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    return [torch.optim.Muon(matrices, lr=hp.learning_rate), torch.optim.AdamW(others, lr=hp.learning_rate / 10)]


def sgd_and_adamw(model: nn.Module, hp: Hyperparameters) -> tuple[torch.optim.Optimizer, ...]:
    first, *others = [*model.parameters()]
    return torch.optim.SGD([first], lr=0.02, momentum=0.9), torch.optim.AdamW(others, lr=0.01)


class Pair(torch.optim.Optimizer):
    """Two optimisers in one. Their state is saved only if requested."""

    def __init__(self, pair: list[torch.optim.Optimizer], *, saves: bool = False) -> None:
        super().__init__([group for each in pair for group in each.param_groups], {})
        self.pair, self.saves = {"of": pair}, saves

    def step(self, closure: None = None) -> None:
        for each in self.pair["of"]:
            each.step()

    def state_dict(self) -> dict[str, Any]:
        return {"of": [each.state_dict() for each in self.pair["of"]]} if self.saves else super().state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for each, values in zip(self.pair["of"], saved["of"], strict=True):
            each.load_state_dict(values)
        self.param_groups = [group for each in self.pair["of"] for group in each.param_groups]


def pair(model: nn.Module, hp: Hyperparameters) -> torch.optim.Optimizer:
    return Pair(joined(model, hp))


def saved_pair(model: nn.Module, hp: Hyperparameters) -> torch.optim.Optimizer:
    first, *others = [*model.parameters()]
    return Pair([Precise([first], hp.learning_rate), torch.optim.AdamW(others, hp.learning_rate)], saves=True)


class ScheduleFree(torch.optim.Optimizer):
    """SGD as schedulefree does it: trains at points between the average, which is evaluated, and plain SGD's."""

    def __init__(self, parameters: Any, lr: float, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "training": False, "count": 0})

    def train(self) -> None:
        self.set_mode(training=True)

    def eval(self) -> None:
        self.set_mode(training=False)

    @torch.no_grad()
    def set_mode(self, *, training: bool) -> None:
        for group in self.param_groups:
            if group["training"] != training:
                group["training"] = training
                for parameter in group["params"]:
                    if parameter in self.state:
                        weight = 1 - group["beta"] if training else 1 - 1 / group["beta"]
                        parameter.lerp_(self.state[parameter]["z"], weight)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            assert group["training"]
            group["count"] += 1
            for parameter in group["params"]:
                if parameter not in self.state:
                    self.state[parameter]["z"] = parameter.clone()
                z = self.state[parameter]["z"]
                parameter.lerp_(z, 1 - 1 / group["beta"])
                z -= group["lr"] * parameter.grad
                parameter.lerp_(z, 1 / group["count"])
                parameter.lerp_(z, 1 - group["beta"])


def schedule_free(model: nn.Module, hp: Hyperparameters) -> torch.optim.Optimizer:
    return ScheduleFree(model.parameters(), hp.learning_rate)


class Shared(torch.optim.SGD):
    """Distributes the state over ranks, as ZeroRedundancyOptimizer does."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("Optimizer state has not been consolidated on this rank.")


def shared(model: nn.Module, hp: Hyperparameters) -> torch.optim.Optimizer:
    return Shared(model.parameters(), hp.learning_rate)


def lbfgs(model: nn.Module, hp: Hyperparameters) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), hp.learning_rate)


class Sharp(torch.optim.SGD):
    """Requires a closure, as SAM does."""

    def step(self, closure: Any = None) -> None:
        if closure is None:
            raise AssertionError("Sharpness Aware Minimization requires closure, but it was not provided")


def sharp(model: nn.Module, hp: Hyperparameters) -> torch.optim.Optimizer:
    return Sharp(model.parameters(), hp.learning_rate)


class Hessian(torch.optim.SGD):
    """Differentiates the gradients, as AdaHessian does."""

    def step(self, closure: Any = None) -> None:
        (parameter, *_) = self.param_groups[0]["params"]
        torch.autograd.grad(parameter.grad, parameter, torch.ones_like(parameter))


def hessian(model: nn.Module, hp: Hyperparameters) -> torch.optim.Optimizer:
    return Hessian(model.parameters(), hp.learning_rate)


def twice(model: nn.Module, hp: Hyperparameters) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD([*model.parameters()][-1:], 0.1)]


def named(model: nn.Module, hp: Hyperparameters) -> dict[str, torch.optim.Optimizer]:
    return {"sgd": torch.optim.SGD(model.parameters(), 0.1)}


def not_saved(model: nn.Module, hp: Hyperparameters) -> torch.optim.Optimizer:
    return Precise(model.parameters(), hp.learning_rate, note=Fraction(1, 3))


def forgetful(model: nn.Module, hp: Hyperparameters) -> torch.optim.Optimizer:
    return torch.optim.SGD([*model.parameters()][:-1], hp.learning_rate)


def square(step: int, total_steps: int) -> float:
    return (1 - step / total_steps) ** 2


def nan_in_step_7(step: int, total_steps: int) -> float:
    return float("nan") if step == 7 else 1.0


def counting(step: int, total_steps: int) -> float:
    """Return a factor that depends on the number of calls. The function is not pure."""
    counting.calls = getattr(counting, "calls", 0) + 1  # type: ignore[attr-defined]
    return 1 / counting.calls  # type: ignore[attr-defined,no-any-return]


def every_third(samples: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Return a third of the samples, shuffled."""
    return np.random.default_rng([seed, epoch]).permutation(samples)[::3]


def sorted_in_place(samples: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    samples[::2] = samples[0]
    return samples


def shrinking(samples: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    return samples[epoch:]


def drawing(samples: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Return an order that is not a pure function of the arguments."""
    return np.random.permutation(samples)  # noqa: NPY002


def outside(samples: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    return np.arange(len(samples) + 500)


def fractions(samples: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    return samples / 2


def nothing(samples: np.ndarray, seed: int, epoch: int) -> list[int]:
    return []
