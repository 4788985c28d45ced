"""BatchNorm with statistics of the global batch, on CPUs and GPUs: several ranks compute the result of one rank.

Unlike torch's ``SyncBatchNorm``, this module supports CPU tensors. Each rank's statistics are weighted by the rank's
number of samples, which may be 0.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.parallel.distributed import gather_numbers, sum_over_ranks
from flyte_ddp.core.parallel.node_memory import NodeGather
from flyte_ddp.core.parallel.training_pass import TrainingPass

KNOWN_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)

Gather = Callable[[Tensor], Tensor]  # maps this rank's numbers, fp64 [n], to all ranks', [ranks, n]


class Exchange(NamedTuple):
    """A BatchNorm layer's exchange of numbers with the same layer on the other ranks."""

    gather: Gather
    this_pass: TrainingPass
    number: int  # of the layer among the model's BatchNorm layers, from 0

    def gather_from_ranks(self, numbers: Tensor, *, backward: bool = False) -> Tensor:
        """Return all ranks' ``numbers`` (fp64 [n]) as a tensor [ranks, n]. Collective.

        ``backward`` is True in a backward pass. If ranks call this method for different layers, ranks on GPUs hang.

        Raises:
            UserError: Ranks on CPUs call this method for different layers.
        """
        # The layer's number, negative in the backward pass, shows whether all ranks are at the same layer.
        place = numbers.new_full((1,), -1 - self.number if backward else 1 + self.number)
        of_ranks = self.gather(torch.cat([place, numbers]))
        if numbers.device.type == "cpu" and bool((of_ranks[:, 0] != place).any()):
            raise UserError(
                "ranks are at different BatchNorm layers, as with a model that skips layers at random: all ranks must "
                "run the same layers; run each layer and ignore its result instead, or set sync_batchnorm=false"
            )
        return of_ranks[:, 1:]


def synchronise_batch_norm(model: nn.Module, this_pass: TrainingPass, *, on_one_machine: bool) -> None:
    """Replace the ``forward`` of a model's BatchNorm layers by a function that uses the statistics of all ranks.

    Changes ``model`` in place: A SyncBatchNorm becomes a RankedBatchNorm. Scripted layers and layers whose ``forward``
    was set by the user are not changed. This function, and later each forward pass in training mode, are collective.

    Args:
        this_pass: Tells in each pass whether this rank's samples count.
        on_one_machine: Whether the ranks exchange numbers by shared memory. Only for CPU ranks of one machine.
    """
    # The forward of a scripted module, or a forward that a user has set, is no method of these classes, and stays.
    norms = [
        layer
        for layer in model.modules()
        if can_be_synchronised(layer)
        and getattr(getattr(layer, "forward", None), "__func__", None) is type(layer).forward
    ]
    if not norms:
        return
    # Two numbers for each channel, the count of samples, and the layer's place, which gather_from_ranks adds.
    most = max(2 * cast("int", layer.num_features) + 2 for layer in norms)
    gather: Gather = NodeGather(most) if on_one_machine else gather_numbers
    for number, layer in enumerate(norms):
        if isinstance(layer, nn.SyncBatchNorm):  # with torch's own forward
            layer.__class__ = RankedBatchNorm  # type: ignore[assignment]
        forward = make_synchronised_forward(Exchange(gather, this_pass, number))
        layer.forward = MethodType(forward, layer)


def can_be_synchronised(layer: nn.Module) -> bool:
    """Return whether :func:`synchronise_batch_norm` can replace the ``forward`` of a layer's class.

    Only the code is inspected. The ``forward`` must be torch's, or a subclass's that mentions ``batch_norm`` or calls
    ``super().forward``.
    """
    forward = type(layer).forward
    if forward in KNOWN_FORWARDS:
        return True
    names = {*getattr(getattr(forward, "__code__", None), "co_names", ())}
    normalises = "batch_norm" in names or {"super", "forward"} <= names
    return normalises and isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)


class RankedBatchNorm(_BatchNorm):
    """A BatchNorm for inputs of any dimensions, in place of SyncBatchNorm, which DDP rejects on a CPU."""

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        if input.dim() < 2:
            raise ValueError(f"BatchNorm got {input.dim()} dimension(s): must be [N, C] or [N, C, ...]")


class Statistics(NamedTuple):
    """The running statistics of a layer, if kept, and the layer's settings."""

    mean: Tensor | None
    variance: Tensor | None
    momentum: float
    eps: float


def make_synchronised_forward(exchange: Exchange) -> Callable[[_BatchNorm, Tensor], Tensor]:
    """Return a ``forward`` for a BatchNorm layer that normalises over all ranks' samples in training mode.

    ``exchange`` gathers the numbers of all ranks. The attribute ``over_ranks`` of the returned function is True. If a
    user-defined layer does not call ``functional.batch_norm`` on all samples, the attribute becomes False. From then
    on, the function only calls the ``forward`` of the layer's class.
    """

    # A pickled model has torch's layers, because pickle saves a bound method as its object and its name.
    def forward(layer: _BatchNorm, values: Tensor) -> Tensor:
        """Return the values [N, C, ...] normalised for each channel. N may differ between ranks.

        In training mode, updates the running statistics, and is collective. In evaluation mode, calls the ``forward``
        of the layer's class. If ranks are at different layers, ranks on GPUs hang.

        Raises:
            UserError: Ranks on CPUs are at different layers.
            ValueError: A channel has a single value on all ranks together.
        """
        class_forward = type(layer).forward
        if not layer.training or not forward.over_ranks:  # type: ignore[attr-defined]
            normalised: Tensor = class_forward(layer, values)
            return normalised
        if class_forward not in KNOWN_FORWARDS:
            with NormaliseOverRanks(len(values), exchange) as mode:
                normalised = class_forward(layer, values)
            forward.over_ranks = mode.has_normalised  # type: ignore[attr-defined]
            return normalised
        layer._check_input_dim(values)  # type: ignore[no-untyped-call]
        kept = Statistics(None, None, 0.0, layer.eps)
        if layer.track_running_stats:
            layer.num_batches_tracked += 1  # type: ignore[operator,assignment]
            momentum = layer.momentum if layer.momentum is not None else 1.0 / layer.num_batches_tracked.item()  # type: ignore[union-attr]
            kept = Statistics(layer.running_mean, layer.running_var, momentum, layer.eps)
        return GlobalNormalisation.apply(values, layer.weight, layer.bias, kept, exchange)  # type: ignore[no-any-return]

    forward.over_ranks = True  # type: ignore[attr-defined]
    return forward


class NormaliseOverRanks(TorchFunctionMode):
    """Makes ``functional.batch_norm`` use the statistics of all ranks in the block.

    Only calls in training mode count, on as many samples as the layer's input has. Afterwards ``has_normalised`` tells
    whether there was a call.
    """

    def __init__(self, samples: int, exchange: Exchange) -> None:
        super().__init__()
        self.samples, self.exchange, self.has_normalised = samples, exchange, False

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, or replace ``functional.batch_norm``."""
        del types
        kwargs = kwargs or {}
        if function is functional.batch_norm and kwargs["training"] and len(args[0]) == self.samples:
            self.has_normalised = True
            values, mean, variance = args
            kept = Statistics(mean, variance, kwargs["momentum"], kwargs["eps"])
            return GlobalNormalisation.apply(values, kwargs["weight"], kwargs["bias"], kept, self.exchange)
        return function(*args, **kwargs)


def is_synchronised(layer: nn.Module) -> bool:
    """Return whether a layer's ``forward`` normalises over all ranks, as set by :func:`synchronise_batch_norm`."""
    return getattr(getattr(layer, "forward", None), "over_ranks", False)


class GlobalNormalisation(torch.autograd.Function):
    """Computes (x - mean) / sqrt(variance + eps) * weight + bias, with the mean and variance of all ranks' values.

    Ioffe and Szegedy, "Batch Normalization", 2015. Callers divide the loss by the global batch size, and add up the
    gradients over the ranks. Therefore the backward pass also sums over the global batch.
    """

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, values: Tensor, weight: Tensor | None, bias: Tensor | None, kept: Statistics, exchange: Exchange
    ) -> Tensor:
        """Normalise by all ranks' statistics, and update the layer's running statistics. Collective.

        If this rank's samples do not count, the values are normalised, but add nothing to the statistics.

        Args:
            values: This rank's values [N, C, ...].
            weight: The layer's scale [C], or None.
            bias: The layer's shift [C], or None.
            kept: The running statistics, which are changed in place, and the settings.
            exchange: Gathers the numbers of all ranks.

        Raises:
            UserError: Ranks on CPUs are at different layers. Ranks on GPUs hang.
            ValueError: A channel has a single value on all ranks together.
        """
        ctx.has_values = exchange.this_pass.has_samples and values.numel() > 0
        mean, variance, count = compute_global_statistics(values, exchange.gather_from_ranks, has_values=ctx.has_values)
        # The count is read only where it may be 1, because reading it makes the host wait for a GPU.
        if values.numel() <= values.shape[1] and count.item() <= 1:
            raise ValueError(
                "Expected more than 1 value per channel when training, over all ranks; use another batch_size"
            )
        # Updated before save_for_backward, where torch.utils.checkpoint stops a block that runs again. So both runs
        # update the statistics, as with torch's layers.
        if kept.mean is not None and kept.variance is not None:
            kept.mean.lerp_(mean.to(kept.mean.dtype), kept.momentum)
            unbiased = variance * (count / (count - 1))
            kept.variance.lerp_(unbiased.to(kept.variance.dtype), kept.momentum)
        precision = torch.promote_types(values.dtype, torch.float32)
        moments = mean.to(precision), variance.to(precision)
        ctx.save_for_backward(values, weight, *moments, count)
        ctx.exchange, ctx.eps = exchange, kept.eps
        if not values.numel():
            return values.clone()
        return functional.batch_norm(values, *moments, weight, bias, training=False, eps=kept.eps)

    @staticmethod
    @once_differentiable  # the returned gradients are computed without a graph
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        """Return the gradients of values, weight and bias. Collective.

        The gradient of the values contains the path through the statistics of all ranks. The gradients of weight and
        bias are sums over this rank's values alone.

        Raises:
            UserError: Ranks on CPUs are at different layers. Ranks on GPUs hang.
        """
        values, weight, mean, variance, count = ctx.saved_tensors
        scale = weight if weight is not None else torch.ones_like(mean)
        if ctx.has_values:
            # The gradients with constant statistics: sums for weight and bias, and gradient * scale / std for values.
            of_values, of_scale, of_shift = torch.ops.aten.native_batch_norm_backward(
                gradients[0], values, scale, mean, variance, None, None, False, ctx.eps, [True, True, True]
            )
        else:
            of_values, of_scale, of_shift = torch.zeros_like(values), torch.zeros_like(mean), torch.zeros_like(mean)
        sums = ctx.exchange.gather_from_ranks(torch.cat([of_shift, of_scale]).double(), backward=True)
        sums = sums.sum(dim=0).view(2, -1) / count
        if ctx.has_values:
            # Mean and variance depend on each value, which adds a share of the two sums to each value's gradient.
            deviation = (variance.double() + ctx.eps).rsqrt()
            slope = -(scale * deviation.square() * sums[1]).to(mean.dtype)
            offset = -(scale * deviation * sums[0]).to(mean.dtype)
            shape = (1, -1, *[1] * (values.dim() - 2))
            mean, slope, offset = (moment.view(shape) for moment in (mean, slope, offset))
            of_values = (of_values + offset).addcmul_(values - mean, slope).to(values.dtype)
        _, has_scale, has_shift, _, _ = ctx.needs_input_grad
        of_weight = of_scale.to(scale.dtype) if has_scale else None
        of_bias = of_shift.to(scale.dtype) if has_shift else None
        return of_values, of_weight, of_bias, None, None


def compute_global_statistics(values: Tensor, gather: Gather, *, has_values: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean and variance of each channel over all ranks' values [N, C, ...]. Collective.

    If ``has_values`` is False, this rank's values do not count. ``gather`` is called once.

    Returns:
        Mean [C], biased variance [C], and the number of values in a channel (a scalar), all fp64.
    """
    # Each rank's mean and sum of squared deviations are gathered in one exchange, and combined in the order of the
    # ranks: Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983. Sums of plain squares would
    # lose digits.
    channels = values.shape[1]
    statistics = torch.zeros(2 * channels + 1, dtype=torch.float64, device=values.device)
    if has_values:
        count = values.numel() // channels
        precise = values.to(torch.promote_types(values.dtype, torch.float32))
        # torch's batch_norm uses this function, in two passes; var_mean takes four times as long on a CPU.
        mean, variance = torch.batch_norm_update_stats(precise, None, None, momentum=0.0)
        statistics[:channels], statistics[channels:-1], statistics[-1] = mean, variance.double() * count, count
    means, squares, counts = torch.split(gather(statistics), [channels, channels, 1], dim=1)
    total = counts.sum()
    mean = (means * counts).sum(dim=0) / total
    variance = (squares + counts * (means - mean).square()).sum(dim=0) / total
    return mean, variance, total


def list_unsynchronised_batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorm layers in training mode that :func:`synchronise_batch_norm` has not changed.

    These layers use the statistics of this rank's samples only.
    """
    norms = (module for module in model.modules() if isinstance(module, _BatchNorm) and module.training)
    return [norm for norm in norms if not is_synchronised(norm)]


def has_unsynchronised_batch_norm(model: nn.Module, synchronised: bool) -> bool:
    """Return whether a BatchNorm layer in training mode would use only its rank's samples on several ranks.

    ``synchronised`` is the hyperparameter ``sync_batchnorm``. The answer is the same on one rank and on several ranks.
    """
    layers = list_unsynchronised_batch_norms(model)  # on one rank no layer is replaced, so all are here
    return any(not synchronised or "forward" in vars(layer) or not can_be_synchronised(layer) for layer in layers)


@contextmanager
@torch.no_grad()  # not in the block
def preserve_running_statistics(model: nn.Module) -> Iterator[None]:
    """Restore the running statistics of unsynchronised BatchNorm layers after the block, also after an exception."""
    statistics = [buffer for layer in list_unsynchronised_batch_norms(model) for buffer in layer.buffers()]
    before = [statistic.clone() for statistic in statistics]
    try:
        yield
    finally:
        for statistic, value in zip(statistics, before, strict=True):
            statistic.copy_(value)


@torch.no_grad()
def compute_mean_running_statistics(model: nn.Module, samples: int) -> list[tuple[Tensor, Tensor]]:
    """Average the running statistics of unsynchronised BatchNorm layers over the ranks, without changing the model.

    Collective. Each rank's statistics are weighted by the rank's ``samples``, a number.

    Returns:
        Pairs of a layer's buffer (such as ``running_mean``) and the average, in fp64. Empty without such layers.
    """
    layers = list_unsynchronised_batch_norms(model)
    statistics = [value for layer in layers for value in (layer.running_mean, layer.running_var) if value is not None]
    if not statistics:
        return []
    total = sum_over_ranks(torch.tensor(float(samples), dtype=torch.float64, device=statistics[0].device))
    return [(statistic, sum_over_ranks(statistic.double() * (samples / total))) for statistic in statistics]
