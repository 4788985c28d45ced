"""Check the training loss, and find the origin of a loss that is not finite."""

import functools
import itertools
import math
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.parallel.distributed import gather_objects, rank


class LossWatch:
    """Checks every step's loss before the step's gradients change the weights.

    With ``a_step_later``, the host reads each loss one step later if the optimiser is fused. Until then, torch's fused
    optimisers skip all updates on the device after a loss that is not finite. In all other cases the host waits for the
    loss in every step.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, learning_rate: float, *, a_step_later: bool
    ) -> None:
        """Watch the losses of ``model``, which ``optimizer`` trains. ``learning_rate`` is for the error.

        ``a_step_later`` has an effect only if the optimiser is fused.
        """
        self.model, self.optimizer, self.learning_rate = model, optimizer, learning_rate
        self.a_step_later = a_step_later and bool(optimizer.defaults.get("fused"))
        device = next(model.parameters()).device
        self.sum_of_zeros = torch.zeros((), dtype=torch.float64, device=device)  # of 0 * loss: NaN after a bad loss
        self.saw_non_finite = torch.zeros((), device=device)  # 0 or 1
        self.pending: Callable[[], None] | None = None

    def check_loss(self, epoch: int, step: int, loss_sum: Tensor, forward: Callable[[], object]) -> None:
        """Raise UserError if the loss of this step or, with ``a_step_later``, of the step before is not finite.

        Call this method on all ranks, before the optimiser's step. Without ``a_step_later``, waits for the loss. With
        ``a_step_later``, the next call checks this step's loss. Until then, the optimiser's ``found_inf`` is set, so
        that the optimiser skips updates after a bad loss.

        Args:
            epoch: Number of the epoch, from 0.
            step: Number of the step, from 1.
            loss_sum: Sum of the losses over all ranks.
            forward: Repeats this step's forward passes. Called on all ranks, only if the loss is not finite.

        Raises:
            UserError: The loss is not finite. The error names where this began.
        """
        # With blocking=True the host sleeps in the wait, and leaves its core to the threads that load data.
        arrived = torch.cuda.Event(blocking=True) if loss_sum.is_cuda else None  # type: ignore[no-untyped-call]
        on_host = loss_sum.to("cpu", non_blocking=True)
        if arrived is not None:
            arrived.record()

        def raise_if_not_finite() -> None:
            """Wait for the loss. If the loss is not finite, repeat all ranks' forward passes and raise UserError."""
            if arrived is not None:
                arrived.synchronize()
            if not math.isfinite(loss := on_host.item()):
                at = {"epoch": epoch, "step": step, "update_step": step - 1}
                where = find_non_finite_activation(self.model, forward)
                raise make_non_finite_loss_error(self.model, self.learning_rate, loss, **at, activation=where)

        if self.a_step_later:
            self.sum_of_zeros.add_(loss_sum, alpha=0)  # two kernels in all, where isfinite() alone takes four
            torch.ne(self.sum_of_zeros, 0, out=self.saw_non_finite)
            self.optimizer.found_inf = self.saw_non_finite  # type: ignore[attr-defined]  # as torch's GradScaler
            self.check_pending_loss()
            self.pending = raise_if_not_finite
        else:
            raise_if_not_finite()

    def check_pending_loss(self) -> None:
        """Wait for the loss that :meth:`check_loss` has not checked yet, if any, and check the loss.

        Raises:
            UserError: The loss is not finite.
        """
        pending, self.pending = self.pending, None
        if pending is not None:
            pending()


def find_non_finite_activation(model: nn.Module, forward: Callable[[], object]) -> str:
    """Run ``forward`` without gradients, and return the first module whose output is not finite, as text. Collective.

    Only outputs that are tensors are checked. ``forward`` must run ``model`` in this process.

    Returns:
        A phrase with the module's name and the rank, or "" if all outputs are finite.
    """
    found: list[tuple[int, int, str]] = []  # at most one: count of modules that finished before, rank, module's name
    finished = itertools.count()

    def note_output(name: str, _module: nn.Module, _inputs: object, output: object) -> None:
        before = next(finished)
        if not found and isinstance(output, Tensor) and not bool(output.isfinite().all()):
            found.append((before, rank(), name))

    with torch.no_grad(), ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(functools.partial(note_output, name)))
        forward()
    of_all_ranks = [*itertools.chain.from_iterable(gather_objects(found))]
    if not of_all_ranks:
        return ""
    _, its_rank, name = min(of_all_ranks)
    return f"the output of {name} on rank {its_rank}" if name else f"the model's output on rank {its_rank}"


def make_non_finite_loss_error(
    model: nn.Module, learning_rate: float, loss: float, *, epoch: int, step: int, update_step: int, activation: str
) -> UserError:
    """Return the UserError for a loss that is not finite at ``epoch`` and ``step``.

    If trained weights are not finite either, the error names the weight nearest to the output, and ``update_step``, the
    step that changed the weights last. Otherwise the error names ``activation``, the result of
    :func:`find_non_finite_activation`.
    """
    # The weight nearest to the output is named, because its gradient was computed first.
    trained = ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
    broken = [name for name, weight in trained if not bool(weight.isfinite().all())]
    where = f" (first non-finite activation: {activation})" if activation else ""
    if broken:
        where = f" (first non-finite gradient: {broken[-1]}, in step {update_step})"
    return UserError(
        f"the loss is {loss} at epoch {epoch}, step {step}{where}: must be finite; lower learning_rate (now "
        f"{learning_rate:g}), set grad_clip_norm or warmup_steps, or use precision='fp32'"
    )
