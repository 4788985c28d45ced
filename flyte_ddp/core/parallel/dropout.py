"""Dropout from random numbers of (seed, epoch, sample), independent of the rank that computes a sample."""

import functools
import math
import sys
import warnings
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from flyte_ddp.core.parallel.training_pass import GOLDEN, TrainingPass, mix_bits_in_place

CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)  # which drop whole channels
TILE_WORDS = 2**15  # random words that a CPU thread makes at a time: 256 KiB, which stay in its cache
COMPILED: dict[tuple[Any, ...], Callable[..., Tensor]] = {}  # by device, dtype and layout
FAILED: set[str] = set()  # types of devices for which torch's compiler does not work
# Reasons, in this order: a kernel of two dimensions needs no division for each value; the threshold is computed in that
# kernel, and not stored by another kernel; one thread starts no processes to compile.
OPTIONS: dict[str, Any] = {"triton.prefer_nd_tiling": True, "realize_opcount_threshold": 100, "compile_threads": 1}


def make_dropout_rank_independent(model: nn.Module, this_pass: TrainingPass, *, fused_on: str = "cuda") -> None:
    """Replace the ``forward`` of a model's dropout layers, so that each sample is dropped by its own random numbers.

    Changes Dropout, Dropout1d, 2d and 3d, and torchvision's StochasticDepth in mode "row". Scripted layers and layers
    whose ``forward`` was set by the user are not changed. Sets ``has_dropout`` of ``this_pass`` if a layer was changed.

    Args:
        this_pass: Gives the random states of the samples.
        fused_on: The type of devices on which a compiled kernel computes dropout.
    """

    # A pickled model has torch's layers, because pickle saves a bound method as its object and its name.
    def forward(layer: nn.Module, values: Tensor) -> Tensor:
        """Return the values [N, ...] with dropout in training mode, else unchanged.

        If N is not the number of samples in the pass, calls the ``forward`` of the layer's class.
        """
        if not layer.training or layer.p == 0.0:
            return values
        if values.shape[:1] != this_pass.states.shape:
            drawn: Tensor = type(layer).forward(layer, values)
            return drawn
        fused = values.device.type == fused_on
        return drop_values(layer, values, this_pass.take_dropout_states(), this_pass.increment, fused=fused)

    replaced = {kind.forward for kind in (nn.Dropout, *CHANNELS)}
    # A model can hold torchvision's layer only if torchvision has been imported.
    if (torchvision_ops := sys.modules.get("torchvision.ops")) is not None:
        replaced.add(torchvision_ops.StochasticDepth.forward)
    for module in model.modules():
        # The forward of a scripted module, or a forward that a user has set, is no method of these classes.
        function = getattr(getattr(module, "forward", None), "__func__", None)
        if function in replaced and getattr(module, "mode", "row") == "row":
            module.forward = MethodType(forward, module)
            this_pass.has_dropout = True


def drop_values(layer: nn.Module, values: Tensor, states: Tensor, increment: Tensor, *, fused: bool) -> Tensor:
    """Return the values [N, ...] with the layer's dropout. If the layer is ``inplace``, changes and returns ``values``.

    Args:
        layer: The dropout layer. Its class decides whether single values, channels or samples are dropped.
        states: Random states of the samples, int64 [N], from which the mask is drawn.
        increment: SplitMix64's increment, an int64 scalar on the device.
        fused: Whether to use a compiled kernel, if the compiler works on this device.
    """
    p: float = layer.p  # type: ignore[assignment]
    inplace = getattr(layer, "inplace", False)
    if p == 1.0:
        return values.mul_(0.0) if inplace else values * 0.0
    # Each index of these leading dimensions has a separate random number. All values behind an index drop together.
    leading = values.dim() if isinstance(layer, nn.Dropout) else 2 if isinstance(layer, CHANNELS) else 1
    if values.dim() == (2 if isinstance(layer, nn.Dropout1d) else 4 if isinstance(layer, nn.Dropout3d) else 0):
        leading = 1  # Dropout1d and Dropout3d also take a batch without channels
    shape = values.shape[1:leading]
    compiling = torch.compiler.is_compiling()
    if values.is_floating_point() and (compiling or (fused and values.numel() and values.device.type not in FAILED)):
        dropped: Tensor = RedrawnDropout.apply(values, states, increment, len(shape), p)
        return values.copy_(dropped) if inplace else dropped
    kept = draw_mask_compiled(states, increment, shape, round(p * 2**40)) if compiling else draw_mask(states, shape, p)
    return apply_mask(values, kept, 1.0 / (1.0 - p), inplace=inplace)


def apply_mask(values: Tensor, kept: Tensor, scale: float, *, inplace: bool = False) -> Tensor:
    """Return ``values`` multiplied by ``scale`` where ``kept`` is True, and 0 elsewhere.

    ``kept`` [N, ...] has the leading dimensions of ``values``. With ``inplace``, changes and returns ``values``.
    """
    kept = kept.view(*kept.shape, *[1] * (values.dim() - kept.dim()))
    return (values.mul_(kept) if inplace else values * kept).mul_(scale)


def draw_mask(states: Tensor, shape: torch.Size, p: float) -> Tensor:
    """Return a random mask, bool [N, *shape], that is False with probability ``p`` (rounded to 2**-40).

    ``states`` are the random states of N samples, int64 [N]. A sample's mask depends on the sample's state alone.
    """
    # Each 64-bit word of SplitMix64 gives four values 16 bits each.
    threshold = draw_rounded_thresholds(states, round(p * 2**40))
    count = math.prod(shape)
    steps = torch.arange(1, (count + 3) // 4 + 1, device=states.device) * GOLDEN
    kept = torch.empty(len(states), count, dtype=torch.bool, device=states.device)
    words_at_once = TILE_WORDS * torch.get_num_threads() if kept.is_cpu else max(1, len(states) * len(steps))
    samples_at_once = max(1, words_at_once // max(1, len(steps)))
    for sample in range(0, len(states), samples_at_once):
        samples = slice(sample, sample + samples_at_once)
        for step in range(0, len(steps), words_at_once):
            words = mix_bits_in_place(states[samples, None] + steps[step : step + words_at_once])
            result = kept[samples, 4 * step : 4 * (step + words_at_once)]
            torch.ge(words.view(torch.int16)[:, : result.shape[1]], threshold[samples], out=result)
    return kept.view(len(states), *shape)


def draw_rounded_thresholds(states: Tensor, probability: int | Tensor) -> Tensor:
    """Round ``probability`` (in units of 2**-40) to an int16 threshold for each sample, up or down at random.

    Returns:
        The thresholds [N, 1], which depend on ``states`` [N].
    """
    threshold = ((mix_bits_in_place(states.clone()) & (2**24 - 1)) + probability) >> 24
    return (threshold.clamp(max=2**16 - 1) - 2**15).to(torch.int16)[:, None]


def draw_mask_compiled(states: Tensor, increment: Tensor, shape: torch.Size, probability: int | Tensor) -> Tensor:
    """Return the mask of :func:`draw_mask`, bool [N, *shape], by operations that torch.compile fuses to one kernel.

    Args:
        states: Random states of N samples, int64 [N].
        increment: SplitMix64's increment, an int64 scalar on the device.
        shape: The shape of a sample's mask.
        probability: Probability of False, in units of 2**-40.
    """
    # Uses shifts, because compiled code that views int64 as int16 writes beyond the tensor's end (torch 2.15, CPU).
    positions = torch.arange(math.prod(shape), device=states.device)
    words = mix_bits_in_place(states[:, None] + ((positions >> 2) + 1) * increment)
    kept = (words >> ((positions & 3) * 16)).to(torch.int16) >= draw_rounded_thresholds(states, probability)
    return kept.view(len(states), *shape)


class RedrawnDropout(torch.autograd.Function):
    """Dropout whose backward pass draws the mask again. Only the samples' states are stored between the passes."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, states: Tensor, *others: Any
    ) -> Tensor:  # others: as of drop_by_compiled_kernel
        # Inverted, because torch's compiler would store the mask if it saw that both passes draw the same mask.
        ctx.save_for_backward(~states if torch.compiler.is_compiling() else states)
        ctx.others = others
        return drop_by_compiled_kernel(values, states, *others)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        [states] = ctx.saved_tensors
        states = ~states if torch.compiler.is_compiling() else states
        return RedrawnDropout.apply(gradient, states, *ctx.others), *[None] * 4


def drop_by_compiled_kernel(values: Tensor, states: Tensor, increment: Tensor, mask_dims: int, p: float) -> Tensor:
    """Return the values [N, ...] with dropout, computed by a compiled kernel.

    The first call with a memory layout compiles the kernel, and keeps it for later calls. If compiling fails, warns,
    and computes without compiled kernels on this type of device from then on.

    Args:
        states: Random states of the samples, int64 [N].
        increment: SplitMix64's increment, an int64 scalar on the device.
        mask_dims: The number of dimensions after N along which the mask varies.
        p: Probability that a value is dropped.
    """
    scale, shape, device = 1.0 / (1.0 - p), values.shape, values.device
    if torch.compiler.is_compiling():
        return compute_fused_dropout(values, states, increment, mask_dims, (round(p * 2**40), scale))
    if 0 in values.stride():  # as in the gradient of a mean
        values = values.contiguous()
    if values.is_contiguous():  # one kernel serves any number of dimensions
        values, mask_dims = values.view(len(values), shape[1 : 1 + mask_dims].numel(), -1), 1
    values = values.data  # no view: torch compiles again for each size of a view's base; needs no gradient
    probability = get_cached_scalar(round(p * 2**40), torch.int64, device)
    numbers = probability, get_cached_scalar(scale, torch.promote_types(values.dtype, torch.float32), device)
    order = sorted(range(values.dim()), key=values.stride().__getitem__)
    key = (device, values.dtype, mask_dims, *order, *(size == 1 for size in values.shape))
    if key in COMPILED:
        return COMPILED[key](values, states, increment, mask_dims, numbers).view(shape)
    try:
        compiled = compile_copy(compute_fused_dropout)
        result = compiled(values, states, increment, mask_dims, numbers).view(shape)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        FAILED.add(device.type)
        warnings.warn(
            f"Dropout takes more time and memory, because torch.compile made no kernel for {device.type}, which needs "
            f"Triton and a C compiler ({type(error).__name__}: {str(error).partition(chr(10))[0]})",
            stacklevel=2,
        )
        return apply_mask(values, draw_mask(states, values.shape[1 : 1 + mask_dims], p), scale).view(shape)
    COMPILED[key] = compiled
    return result


def compile_copy(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a copy of the function, compiled by torch.compile.

    Each copy has a separate code object, because torch rejects more than 8 variants of a code object.
    """
    copied = FunctionType(function.__code__.replace(), globals())
    return torch.compile(copied, fullgraph=True, dynamic=True, options=OPTIONS)


def compute_fused_dropout(
    values: Tensor, states: Tensor, increment: Tensor, mask_dims: int, numbers: tuple[Any, Any]
) -> Tensor:
    """Return the values [N, ...] with dropout. torch.compile makes a single kernel of this function.

    Args:
        states: Random states of the samples, int64 [N].
        increment: SplitMix64's increment, an int64 scalar on the device.
        mask_dims: The number of dimensions after N along which the mask varies.
        numbers: The probability of dropping, in units of 2**-40, and the factor of the values that stay.
    """
    probability, scale = numbers
    kept = draw_mask_compiled(states, increment, values.shape[1 : 1 + mask_dims], probability)
    kept = kept.view(*kept.shape, *[1] * (values.dim() - kept.dim()))
    product: Tensor = values.to(torch.promote_types(values.dtype, torch.float32)) * kept * scale
    return product.to(values.dtype)


@functools.lru_cache(1024)
def get_cached_scalar(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the number as a scalar tensor on the device. The tensor is cached, and must not be changed."""
    return torch.tensor(number, dtype=dtype, device=device)
