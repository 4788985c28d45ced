"""Augment uint8 images for training: a pure function of (seed, epoch, sample), whichever rank computes it."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flyte_ddp.device_copy import copy_to_device
from flyte_ddp.order.sampling import Indices

STEP = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment


def mix_bits(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the SplitMix64 finaliser (Steele, Lea and Flood, OOPSLA 2014) of each number."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return x


def sample_bits(seed: int, epoch: int, samples: Indices) -> NDArray[np.uint64]:
    """Return 64 random bits for each sample, a hash of sample, seed and epoch."""
    x = samples.astype(np.uint64)
    with np.errstate(over="ignore"):
        for word in (seed, epoch):
            x = mix_bits(x + np.uint64(word + 1) * STEP)
    return x


def uniform_draws(seed: int, epoch: int, samples: Indices, draws: int) -> NDArray[np.float64]:
    """Return ``draws`` random numbers in 0 <= x < 1 for each sample, [N, draws]: a hash of sample, seed and epoch."""
    with np.errstate(over="ignore"):
        x = sample_bits(seed, epoch, samples)[:, None] + np.arange(1, draws + 1, dtype=np.uint64) * STEP
    values: NDArray[np.float64] = (mix_bits(x) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return values


def augment_images(images: Tensor, kind: str, *, seed: int, epoch: int, samples: Indices) -> Tensor:
    """Return images shifted by up to 1/8 of their sides and filled with 0; "crop_flip" also mirrors half of them.

    Args:
        images: uint8 [N, H, W, C]. The result has this shape, type and device.
        kind: none (returns ``images``), crop (shifts only) or crop_flip.
        seed: seed of the random numbers.
        epoch: epoch of training, from 0.
        samples: [N] positions in the training set, from which the random numbers are derived.
    """
    if kind == "none":
        return images
    count, height, width, _ = images.shape
    bits = sample_bits(seed, epoch, samples)
    margins = (height // 8, width // 8)
    # A sample's bits, shifted right by 0 and by 16, choose its vertical and its horizontal shift; bit 32 the mirroring.
    shift_y, shift_x = (
        torch.from_numpy(((bits >> np.uint64(start)) % np.uint64(2 * margin + 1)).astype(np.int64))
        for start, margin in zip((0, 16), margins, strict=True)
    )
    rows = shift_y[:, None] + torch.arange(height)
    columns = shift_x[:, None] + torch.arange(width)
    if kind == "crop_flip":
        mirrored = torch.from_numpy(((bits >> np.uint64(32)) & np.uint64(1)).astype(bool))
        columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    padded = torch.nn.functional.pad(images, (0, 0, margins[1], margins[1], margins[0], margins[0]))
    rows, columns = copy_to_device(rows, images.device), copy_to_device(columns, images.device)
    return padded[torch.arange(count, device=images.device)[:, None, None], rows[:, :, None], columns[:, None, :]]
