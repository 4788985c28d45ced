"""From stored images to a model's input; the same function serves training, evaluation and prediction."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

EVALUATION_SHARE = 224 / 256  # of the shorter side: the middle square that encoded images are evaluated on


@dataclass(frozen=True)
class InputSpec:
    """A model's input: channels x height x width, and the normalisation of values in 0..1, one number a channel."""

    channels: int
    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def prepare(
    images: Tensor,
    spec: InputSpec,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Tensor:
    """Scale, resize and normalise images; make grey images RGB where the model needs it.

    Args:
        images: uint8 [N, H, W, C], on the device where the result is wanted.
        spec: the model's input; its ``channels`` are C, or 3 where C is 1.
        dtype: of the result, and of the arithmetic.

    Returns:
        [N, spec.channels, spec.height, spec.width].
    """
    scale, shift = normalisation(spec, images.device, dtype)
    batch = images.to(dtype, memory_format=torch.contiguous_format)
    if batch.shape[1:] == (spec.height, spec.width, spec.channels):
        rows = batch.flatten(2)  # whole rows of pixels at a time, and not with an inner loop over three channels
        torch.addcmul(shift.repeat(spec.width), rows, scale.repeat(spec.width), out=rows)
        batch = batch.permute(0, 3, 1, 2)
    else:
        batch = batch.permute(0, 3, 1, 2)
        if batch.shape[2:] != (spec.height, spec.width):
            batch = functional.interpolate(batch, (spec.height, spec.width), mode="bilinear", antialias=True)
        # A grey image broadcasts against a normalisation of three channels, which makes it RGB in the same pass.
        batch = torch.addcmul(shift[:, None, None], batch, scale[:, None, None])
    batch = batch.contiguous(memory_format=memory_format)
    if memory_format == torch.contiguous_format:
        # One channel is contiguous in both orders, and torch goes by the strides: it would take it for channels-last,
        # and so would all that follows, where `x.view(len(x), -1)` then fails.
        batch = batch.flatten(1).view(batch.shape)
    return batch


@functools.lru_cache(maxsize=8)
def normalisation(spec: InputSpec, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the factors and offsets, each [channels] on the device, that normalise values in 0..255."""
    mean, std = (torch.tensor(values, dtype=torch.float64, device=device) for values in (spec.mean, spec.std))
    return (1.0 / (std * 255.0)).to(dtype), (-mean / std).to(dtype)
