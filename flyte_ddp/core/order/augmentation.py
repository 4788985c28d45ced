"""Random numbers, random shifts of uint8 images, and mixup: pure functions of (seed, epoch, sample) on any rank."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flyte_ddp.core.machine.device_copy import copy_to_device
from flyte_ddp.core.order.sampling import MIXING, Indices, make_generator

INCREMENT, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64
WORD = 2**64 - 1
MIXUP_SEED = 2**34  # added to the seed, makes the shares of mixup independent of other draws


def mix_bits(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 64 hashed bits of each number, by SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(SECOND)
    return x ^ (x >> np.uint64(31))


def draw_sample_bits(seed: int, epoch: int, samples: Indices) -> NDArray[np.uint64]:
    """Return 64 random bits for each sample: a hash of the sample's number, seed and epoch."""
    x = samples.astype(np.uint64)
    for word in (seed, epoch):
        x = mix_bits(x + np.uint64((word + 1) * INCREMENT % 2**64))
    return x


def draw_bits_of_one_sample(seed: int, epoch: int, sample: int) -> int:
    """Return the bits of :func:`draw_sample_bits` for a single sample, faster because without NumPy."""
    x = sample
    for word in (seed, epoch):
        x = (x + (word + 1) * INCREMENT) & WORD
        x = ((x ^ (x >> 30)) * FIRST) & WORD
        x = ((x ^ (x >> 27)) * SECOND) & WORD
        x ^= x >> 31
    return x


def draw_uniform(seed: int, epoch: int, samples: Indices, draws: int) -> NDArray[np.float64]:
    """Return ``draws`` random numbers in 0 <= x < 1 for each sample, [N, draws].

    A sample's random numbers depend only on ``seed``, ``epoch`` and the sample's number.
    """
    steps = np.arange(1, draws + 1, dtype=np.uint64) * np.uint64(INCREMENT)
    bits = mix_bits(draw_sample_bits(seed, epoch, samples)[:, None] + steps)
    return np.asarray((bits >> np.uint64(11)) * 2.0**-53)


def augment_images(images: Tensor, kind: str, *, seed: int, epoch: int, samples: Indices, fill: int = 0) -> Tensor:
    """Return images [N, H, W, C] shifted at random by up to 1/8 of their sides, and perhaps mirrored.

    Args:
        images: The images. If ``kind`` is "none", the same tensor is returned.
        kind: "crop" shifts, "crop_flip" also mirrors half of the images, and "none" changes nothing.
        samples: Numbers of the samples [N]. The shift of an image depends on ``seed``, ``epoch`` and this number.
        fill: Value of the pixels that a shift uncovers.
    """
    if kind == "none":
        return images
    count, height, width, _ = images.shape
    bits = draw_sample_bits(seed, epoch, samples)
    margins = (height // 8, width // 8)
    # The bits from 0 on choose the vertical shift, the bits from 16 on the horizontal shift, and bit 32 the mirroring.
    shift_y, shift_x = (
        torch.from_numpy(((bits >> np.uint64(start)) % np.uint64(2 * margin + 1)).astype(np.int64))
        for start, margin in zip((0, 16), margins, strict=True)
    )
    rows = shift_y[:, None] + torch.arange(height)
    columns = shift_x[:, None] + torch.arange(width)
    if kind == "crop_flip":
        mirrored = torch.from_numpy(((bits >> np.uint64(32)) & np.uint64(1)).astype(bool))
        columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    padded = torch.nn.functional.pad(images, (0, 0, margins[1], margins[1], margins[0], margins[0]), value=fill)
    rows, columns = copy_to_device(rows, images.device), copy_to_device(columns, images.device)
    return padded[torch.arange(count, device=images.device)[:, None, None], rows[:, :, None], columns[:, None, :]]


def choose_mixup_partners(batch: Indices, seed: int, step: int) -> Indices:
    """Return the partner with which mixup mixes each sample of a global batch, [B].

    The partners are the batch in random order, so a sample's partner may be the sample itself.
    """
    # Zhang et al., "mixup", ICLR 2018, permute each process's part instead, and use one share for the whole batch.
    return make_generator(MIXING, seed, step).permutation(batch)


def draw_mixup_shares(samples: Indices, alpha: float, seed: int, step: int) -> NDArray[np.float64]:
    """Return each sample's share in its mixture with a partner, [n], drawn from the distribution Beta(alpha, alpha).

    The partner has the rest. A share depends only on ``alpha``, ``seed``, ``step`` and the sample's number.
    """
    from scipy import special  # late, because this takes as long as all other imports of a rank

    uniform = draw_uniform(seed + MIXUP_SEED, step, samples, 1)[:, 0]
    return np.asarray(special.betaincinv(alpha, alpha, uniform))
