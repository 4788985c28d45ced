"""BatchNorm on several ranks: over the global batch, so that N ranks compute what one process would.

torch's ``SyncBatchNorm`` refuses CPU tensors; this one works on CPUs and GPUs, and weighs each rank by its samples, of
which it may have none that count.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from flyte_ddp.errors import UserError
from flyte_ddp.parallel import distributed
from flyte_ddp.parallel.distributed import sum_over_ranks
from flyte_ddp.parallel.node_memory import NodeGather
from flyte_ddp.parallel.training_pass import TrainingPass

KNOWN = (_BatchNorm.forward, nn.SyncBatchNorm.forward)  # a subclass with another one may compute anything

Gather = Callable[[Tensor], Tensor]  # takes this rank's fp64 [n], and returns those of all ranks as [ranks, n]


def synchronise_batch_norm(model: nn.Module, this_pass: TrainingPass, *, on_one_machine: bool) -> None:
    """Change the class of every BatchNorm of the model to one that normalises by the statistics of all ranks together.

    Parameters, buffers, hooks and ``state_dict`` stay what they are. The new class is a subclass of the old one with
    its name, because models ask what a layer is. Ranks that are ``on_one_machine`` exchange through shared memory.
    """
    # Modules that torch.jit has made have no forward of their class.
    norms = [module for module in model.modules() if getattr(type(module), "forward", None) in KNOWN]
    if not norms:
        return
    most = max(2 * cast("int", module.num_features) + 2 for module in norms)
    gather: Gather = NodeGather(most) if on_one_machine else distributed.gather
    for number, module in enumerate(norms):
        kind = type(module)
        # DDP refuses a SyncBatchNorm on a CPU.
        kinds = (GlobalBatchNorm,) if issubclass(kind, nn.SyncBatchNorm) else (GlobalBatchNorm, kind)
        module.__class__ = type(kind.__name__, kinds, {"__qualname__": kind.__qualname__})
        module.gather, module.this_pass, module.number = gather, this_pass, number  # type: ignore[assignment]


def has_separate_statistics(model: nn.Module, synchronised: bool) -> bool:
    """Return whether a BatchNorm layer uses each rank's own statistics: if not synchronised, or of an unknown kind."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return any(not synchronised or type(module).forward not in (*KNOWN, GlobalBatchNorm.forward) for module in norms)


class GlobalBatchNorm(_BatchNorm):
    """BatchNorm over the samples of all ranks, which all take part in each training pass."""

    gather: Gather
    this_pass: TrainingPass
    number: int  # among the model's

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        if input.dim() < 2:
            raise ValueError(f"BatchNorm got {input.dim()} dimension(s): it needs [N, C] or [N, C, ...]")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Return [N, C, ...] normalised for each channel; N may differ between ranks.

        Raises:
            ValueError: all ranks together have a single value for each channel.
        """
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        return Normalise.apply(input, self.weight, self.bias, self)  # type: ignore[no-any-return]

    def exchange(self, numbers: Tensor, *, backward: bool = False) -> Tensor:
        """Return the fp64 [n] of all ranks as [ranks, n]; waits until all are in this pass of this layer.

        Raises:
            UserError: ranks are at different layers. On a GPU they run into the time limit: the check would wait.
        """
        place = numbers.new_full((1,), -1 - self.number if backward else 1 + self.number)
        of_ranks = self.gather(torch.cat([place, numbers]))
        if numbers.device.type == "cpu" and bool((of_ranks[:, 0] != place).any()):
            raise UserError(
                "ranks are at different BatchNorm layers, as of a model that leaves out layers at random: all must run "
                "the same ones; leave out a layer's result only, or set sync_batchnorm=false"
            )
        return of_ranks[:, 1:]

    @torch.no_grad()
    def update_running_statistics(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running mean and variance by those of one global batch, as torch's BatchNorm does."""
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked.add_(1)
        weight = self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked.item()
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(variance.to(self.running_var.dtype), weight)


class Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) x weight + bias, with the mean and variance of all ranks' values.

    Ioffe and Szegedy, "Batch Normalization", 2015. Losses are divided by the global count and gradients added over
    ranks, so the sums of the backward pass are those of the global batch, too.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor | None, bias: Tensor | None, layer: GlobalBatchNorm) -> Tensor:
        """Return [N, C, ...] normalised; updates the layer's running statistics.

        They are updated before tensors are saved: torch.utils.checkpoint, when it runs a block again, leaves it as soon
        as its last tensor is saved, when torch's own layers have updated theirs.
        """
        ctx.counts = layer.this_pass.counts and values.numel() > 0
        mean, variance, count = global_statistics(values, layer.exchange, taking_part=ctx.counts)
        # The count is fetched only where it may be 1, because that makes the host wait for a GPU.
        if values.numel() <= values.shape[1] and count.item() <= 1:
            raise ValueError("Expected more than 1 value per channel when training, over all ranks")
        if layer.track_running_stats:
            layer.update_running_statistics(mean, variance * (count / (count - 1)))
        precision = torch.promote_types(values.dtype, torch.float32)
        moments = mean.to(precision), variance.to(precision)
        ctx.save_for_backward(values, weight, *moments, count)
        ctx.layer = layer
        if not values.numel():
            return values.clone()
        return functional.batch_norm(values, *moments, weight, bias, training=False, eps=layer.eps)

    @staticmethod
    @once_differentiable  # the returned gradients are computed without a graph
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        """Return the gradient of the values, and this rank's part of those of weight and bias."""
        values, weight, mean, variance, count = ctx.saved_tensors
        gradient = gradients[0]
        scale = weight if weight is not None else torch.ones_like(mean)
        if ctx.counts:
            # As if the statistics were constants: the gradients' sums and, for the values, gradient x scale / std.
            of_values, of_scale, of_shift = torch.ops.aten.native_batch_norm_backward(
                gradient, values, scale, mean, variance, None, None, False, ctx.layer.eps, [True, True, True]
            )
        else:
            of_values, of_scale, of_shift = torch.zeros_like(values), torch.zeros_like(mean), torch.zeros_like(mean)
        sums = ctx.layer.exchange(torch.cat([of_shift, of_scale]).double(), backward=True)
        sums = sums.sum(dim=0).view(2, -1) / count
        if ctx.counts:
            # What they add, because they follow the values: a share of the sums for each value.
            deviation = (variance.double() + ctx.layer.eps).rsqrt()
            slope = -(scale * deviation.square() * sums[1]).to(mean.dtype)
            offset = -(scale * deviation * sums[0]).to(mean.dtype)
            shape = (1, -1, *[1] * (values.dim() - 2))
            mean, slope, offset = (moment.view(shape) for moment in (mean, slope, offset))
            of_values = (of_values + offset).addcmul_(values - mean, slope).to(values.dtype)
        _, has_scale, has_shift, _ = ctx.needs_input_grad
        return (
            of_values,
            of_scale.to(scale.dtype) if has_scale else None,
            of_shift.to(scale.dtype) if has_shift else None,
            None,
        )


def global_statistics(values: Tensor, exchange: Gather, *, taking_part: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean [C], biased variance [C] and count [] of the values [N, C, ...] of all ranks that take part, in fp64.

    Each rank's mean and sum of squared deviations go to all in one exchange and are combined in the order of the ranks:
    Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983. Sums of squares would cancel.
    """
    channels = values.shape[1]
    own = torch.zeros(2 * channels + 1, dtype=torch.float64, device=values.device)
    if taking_part:
        count = values.numel() // channels
        precise = values.to(torch.promote_types(values.dtype, torch.float32))
        # What batch_norm itself uses: the biased variance, in two passes; var_mean takes four times as long on a CPU.
        mean, variance = torch.batch_norm_update_stats(precise, None, None, momentum=0.0)
        own[:channels], own[channels:-1], own[-1] = mean, variance.double() * count, count
    means, squares, counts = torch.split(exchange(own), [channels, channels, 1], dim=1)
    total = counts.sum()
    mean = (means * counts).sum(dim=0) / total
    variance = (squares + counts * (means - mean).square()).sum(dim=0) / total
    return mean, variance, total


def separate_layers(model: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorm layers whose running statistics are each rank's own."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return [norm for norm in norms if not isinstance(norm, GlobalBatchNorm)]


@contextmanager
def running_statistics_kept(model: nn.Module) -> Iterator[None]:
    """Undo at the end what the block changes in running statistics that are this rank's own."""
    statistics = [buffer for layer in separate_layers(model) for buffer in layer.buffers()]
    before = [statistic.clone() for statistic in statistics]
    yield
    for statistic, value in zip(statistics, before, strict=True):
        statistic.copy_(value)


@torch.no_grad()
def averaged_running_statistics(model: nn.Module, samples: int) -> list[tuple[Tensor, Tensor]]:
    """Return each rank's own running statistics with their means over all ranks, weighted by each rank's ``samples``.

    Synchronised statistics are left out: they are the same on all ranks. All ranks call this together.
    """
    statistics = [
        statistic
        for layer in separate_layers(model)
        for statistic in (layer.running_mean, layer.running_var)
        if statistic is not None
    ]
    if not statistics:
        return []
    total = sum_over_ranks(torch.tensor(float(samples), dtype=torch.float64, device=statistics[0].device))
    return [(statistic, sum_over_ranks(statistic.double() * (samples / total))) for statistic in statistics]
