"""From stored images to a model's input: one function for training, evaluation and prediction."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

EVALUATION_SHARE = 224 / 256  # usual share of an encoded image's shorter side that evaluations see, as on ImageNet


@dataclass(frozen=True)
class InputSpec:
    """A model's input: channels x height x width, and mean and std of values in 0..1, one number for each channel.

    Of encoded images evaluations see the square in the middle whose side is ``crop_share`` of the shorter side.
    """

    channels: int
    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_share: float = EVALUATION_SHARE


def prepare_images(
    images: Tensor,
    spec: InputSpec,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Tensor:
    """Return uint8 images [N, H, W, C] scaled, normalised, and as RGB if needed: a new tensor [N, C, height, width]."""
    scale, shift = normalisation(spec, images.device, dtype)
    batch = images.to(dtype, memory_format=torch.contiguous_format)
    if batch.shape[1:] == (spec.height, spec.width, spec.channels):
        rows = batch.flatten(2)  # a vector operation a row of pixels is faster than an inner loop over three channels
        torch.addcmul(shift.repeat(spec.width), rows, scale.repeat(spec.width), out=rows)
        batch = batch.permute(0, 3, 1, 2)
    else:
        batch = batch.permute(0, 3, 1, 2)
        if batch.shape[2:] != (spec.height, spec.width):
            batch = functional.interpolate(batch, (spec.height, spec.width), mode="bilinear", antialias=True)
        # Broadcasting a grey image against factors of three channels makes it RGB.
        batch = torch.addcmul(shift[:, None, None], batch, scale[:, None, None])
    batch = batch.contiguous(memory_format=memory_format)
    if memory_format == torch.contiguous_format:
        # A tensor of one channel is contiguous in both memory orders. By its strides torch would treat it, and all
        # later results, as channels-last, and `x.view(len(x), -1)` in a model would fail.
        batch = batch.flatten(1).view(batch.shape)
    return batch


@functools.lru_cache(maxsize=8)
def normalisation(spec: InputSpec, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(values, dtype=torch.float64, device=device) for values in (spec.mean, spec.std))
    return (1.0 / (std * 255.0)).to(dtype), (-mean / std).to(dtype)
