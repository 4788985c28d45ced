"""Checks of the training loss: where one that is not finite began, and whether anything was learned."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UserError
from flyte_ddp.parallel.distributed import objects_of_all_ranks
from flyte_ddp.training.optimisation import clip_norm

LEARNED = 0.97  # of the loss of random predictions: a model that has learned anything is below


class LossWatch:
    """Checks every step's loss, before its gradients change the weights.

    On a GPU that would make the host wait for the device in every step. There the device itself stops changing weights
    from the first loss on that is not finite, and the host checks the loss a step later, or at the end of the epoch.
    Only torch's fused optimisers can do that; with another one, that of complex weights, the host waits in every step.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, hp: Hyperparameters, *, a_step_later: bool
    ) -> None:
        self.model, self.optimizer, self.hp = model, optimizer, hp
        self.a_step_later = a_step_later and bool(optimizer.defaults["fused"])
        self.saw_non_finite = torch.zeros((), dtype=torch.bool, device=next(model.parameters()).device)
        self.pending: Callable[[], None] | None = None

    def check_loss(self, epoch: int, step: int, loss_sum: Tensor, forward: Callable[[], object]) -> None:
        """Check the sum of all ranks' losses of a step whose gradients have not been applied, now or a step later.

        Args:
            epoch: counts from 0.
            step: counts from 1.
            loss_sum: the same on all ranks.
            forward: does the step's forward passes again, on all ranks alike.

        Raises:
            UserError: the loss is not finite; names the first weight or activation that is not.
        """
        # Blocking: a host that spins would take a core from the threads that load data.
        arrived = torch.cuda.Event(blocking=True) if loss_sum.is_cuda else None  # type: ignore[no-untyped-call]
        on_host = loss_sum.to("cpu", non_blocking=True)
        if arrived is not None:
            arrived.record()

        def check() -> None:
            if arrived is not None:
                arrived.synchronize()
            if not math.isfinite(loss := on_host.item()):
                activation = first_non_finite_activation(self.model, forward)
                raise non_finite_loss_error(
                    self.model, self.hp, loss, epoch, step, weights_of=step - 1, activation=activation
                )

        if not self.a_step_later:
            check()
            return
        self.saw_non_finite = self.saw_non_finite | ~loss_sum.isfinite()
        self.optimizer.found_inf = self.saw_non_finite.float()  # type: ignore[attr-defined]  # as torch's GradScaler does
        self.check_pending()
        self.pending = check

    def check_pending(self) -> None:
        """Check the loss that no later step has checked; raises as :meth:`check_loss` does."""
        check, self.pending = self.pending, None
        if check is not None:
            check()


def non_finite_loss_error(
    model: nn.Module, hp: Hyperparameters, loss: float, epoch: int, step: int, *, weights_of: int, activation: str = ""
) -> UserError:
    """Return the error for a loss that is NaN or infinite; ``weights_of`` is the step that made the loss's weights."""
    # The weight nearest to the output is named, because its gradient was computed first.
    broken = [name for name, parameter in model.named_parameters() if not bool(parameter.isfinite().all())]
    where = ""
    if broken:
        where = f" (the first gradient that was not finite is that of {broken[-1]}, in step {weights_of})"
    elif activation:
        where = f" (the first activation that was not finite is {activation})"
    return UserError(
        f"the loss is {loss} at epoch {epoch}, step {step}{where}: it must be finite; lower learning_rate "
        f"(now {hp.learning_rate:g}), set grad_clip_norm or warmup_steps, or use precision='fp32'"
    )


def nothing_learned_warning(loss: float, labels: Tensor, hp: Hyperparameters) -> str:
    """Return a warning if a training that ended with such a loss has learned nothing; else an empty text.

    The loss of random predictions is the entropy of the classes' shares of ``labels`` [N].
    """
    shares = labels.bincount().double() / len(labels)
    random_loss = -torch.special.xlogy(shares, shares).sum().item()
    if loss < LEARNED * random_loss or not random_loss:
        return ""
    clip = f"grad_clip_norm (now {clip_norm(hp):g})" if clip_norm(hp) else "set grad_clip_norm, as to 1"
    return (
        f"The training loss ended at {loss:.3f}, and random predictions have {random_loss:.3f}: nothing was learned. "
        f"Lower learning_rate (now {hp.learning_rate:g}) or {clip}, or train for longer."
    )


def first_non_finite_activation(model: nn.Module, forward: Callable[[], object]) -> str:
    """Do a forward pass again, on all ranks together, and name the first module with a non-finite output on any."""
    found: list[tuple[int, str]] = []  # how many modules were done before, and its name
    done = 0

    def check_output(name: str, output: object) -> None:
        nonlocal done
        if not found and isinstance(output, Tensor) and not bool(output.isfinite().all()):
            found.append((done, name))
        done += 1

    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output, name=name: check_output(name, output))
        for name, module in model.named_modules()
    ]
    try:
        with torch.no_grad():
            forward()
    finally:
        for hook in hooks:
            hook.remove()
    of_ranks = [(*first, rank) for rank, ranks_first in enumerate(objects_of_all_ranks(found)) for first in ranks_first]
    if not of_ranks:
        return ""
    _, name, rank = min(of_ranks, key=lambda first: (first[0], first[2]))
    return f"the output of {name}, on rank {rank}" if name else f"the model's own output, on rank {rank}"
