"""A loss that is not finite: where it began, so that the error can say it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from flyte_ddp.distributed import gather, wait_for_event
from flyte_ddp.errors import UserError
from flyte_ddp.optimisation import clip_norm

if TYPE_CHECKING:
    from flyte_ddp.config import Hyperparameters
    from flyte_ddp.training_state import TrainingState

LEARNED = 0.97  # of the loss of a guess: a model that has learned anything is below
NONE = float("inf")  # no activation that is not finite, among the places at which one was found


class LossWatch:
    """Looks at every step's loss, before its gradients change the weights.

    On a GPU that would mean to wait for the device in every step. There the device itself leaves the weights as they
    are from the first loss on that is not finite, and the loss is looked at a step later, or at the end of the epoch.
    """

    def __init__(self, state: TrainingState, *, a_step_later: bool) -> None:
        self.state, self.a_step_later = state, a_step_later
        self.spoiled = torch.zeros((), dtype=torch.bool, device=state.device)
        self.last: Looked | None = None

    def look(self, loss_sum: Tensor, forward: Callable[[], object]) -> None:
        """Takes in the loss of the step that is being done.

        Args:
            loss_sum: of all ranks, an fp64 scalar on the device.
            forward: does the step's forward passes again, on all ranks alike.

        Raises:
            UserError: the loss is not finite; with the first weight or activation that is not.

        """
        now = Looked(self.state.epoch, self.state.step + 1, loss_sum.to("cpu", non_blocking=True), forward)
        if not self.a_step_later:
            self.judge(now)
            return
        if loss_sum.is_cuda:
            now.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            now.arrived.record()
        self.spoiled = self.spoiled | ~loss_sum.isfinite()
        self.state.optimizer.found_inf = self.spoiled.float()  # type: ignore[attr-defined]  # as torch's GradScaler does
        last, self.last = self.last, now
        if last is not None:
            self.judge(last)

    def catch_up(self) -> None:
        """Looks at the loss that no later step has looked at; raises as :meth:`look` does."""
        last, self.last = self.last, None
        if last is not None:
            self.judge(last)

    def judge(self, step: Looked) -> None:
        """Raises UserError if the loss is not finite."""
        if step.arrived is not None:
            wait_for_event(step.arrived)
        if not math.isfinite(step.loss_sum.item()):
            activation = first_activation(self.state.model, step.forward)
            raise not_finite(
                self.state,
                step.loss_sum.item(),
                step.epoch,
                step.step,
                weights_of=step.step - 1,
                activation=activation,
            )


@dataclass
class Looked:
    """A step with its loss on its way to the host."""

    epoch: int  # counts from 0
    step: int  # counts from 1
    loss_sum: Tensor
    forward: Callable[[], object]
    arrived: torch.cuda.Event | None = None


def not_finite(
    state: TrainingState, loss: float, epoch: int, step: int, *, weights_of: int, activation: str = ""
) -> UserError:
    """The error for a loss that is NaN or infinite.

    Args:
        epoch: counted from 0, as in metrics.jsonl; ``step`` counts from 1.
        weights_of: the step that made the weights with which the loss was computed.
        activation: from :func:`first_activation`.

    """
    weight = first_weight(state.model)
    where = ""
    if weight:
        where = f" (the first gradient that was not finite is that of {weight}, in step {weights_of})"
    elif activation:
        where = f" (the first activation that was not finite is {activation})"
    return UserError(
        f"the loss is {loss} at epoch {epoch}, step {step}{where}: it must be finite; lower learning_rate "
        f"(now {state.hp.learning_rate:g}), set grad_clip_norm or warmup_steps, or use precision='fp32'"
    )


def no_better_than_guessing(loss: float, labels: Tensor, hp: Hyperparameters) -> str:
    """What to say of a training that has learned nothing; empty if it has.

    Args:
        loss: of training, at its end.
        labels: [N] of samples that stand for all; a guess by how common each class is has the entropy of that for loss.
    """
    shares = labels.bincount().double() / len(labels)
    guess = -torch.special.xlogy(shares, shares).sum().item()
    if loss < LEARNED * guess or not guess:
        return ""
    clip = f"grad_clip_norm (now {clip_norm(hp):g})" if clip_norm(hp) else "set grad_clip_norm, as to 1"
    return (
        f"The training loss ended at {loss:.3f}, and guessing has {guess:.3f}: nothing was learned. "
        f"Lower learning_rate (now {hp.learning_rate:g}) or {clip}, or train for longer."
    )


def first_weight(model: nn.Module) -> str:
    """The name of the weight nearest to the output that is not finite, as its gradient came first; empty if all are."""
    for name, parameter in reversed([*model.named_parameters()]):
        if not bool(parameter.isfinite().all()):
            return name
    return ""


def first_activation(model: nn.Module, forward: Callable[[], object]) -> str:
    """Does a forward pass again on all ranks, and names the first module whose output was not finite on any of them."""
    names = dict(enumerate(name for name, _ in model.named_modules()))
    found: list[tuple[int, int]] = []  # how many modules were done before, and which one it is
    done = 0

    def look(index: int, output: object) -> None:
        nonlocal done
        if not found and isinstance(output, Tensor) and not bool(output.isfinite().all()):
            found.append((done, index))
        done += 1

    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output, index=index: look(index, output))
        for index, module in enumerate(model.modules())
    ]
    try:
        with torch.no_grad():
            forward()
    finally:
        for hook in hooks:
            hook.remove()
    device = next(model.parameters()).device
    before, index = found[0] if found else (NONE, 0)
    of_ranks = gather(torch.tensor([before, index], dtype=torch.float64, device=device)).tolist()
    rank, (before, index) = min(enumerate(of_ranks), key=lambda item: item[1][0])
    if before == NONE:
        return ""
    name = names[int(index)]
    return f"the output of {name}, on rank {rank}" if name else f"the model's own output, on rank {rank}"
