"""Crop and resize images of any size to squares: a random part for training, the middle for evaluation.

The random part is chosen as by torchvision's ``RandomResizedCrop`` with its defaults (Szegedy et al., arXiv 1409.4842).
Half of the parts are mirrored. The choice is a function of (seed, epoch, sample).
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from flyte_ddp.core.models.sidecar import EVALUATION_SHARE
from flyte_ddp.core.order.augmentation import draw_uniform
from flyte_ddp.core.order.sampling import Indices
from flyte_ddp.core.samples.pictures import Pixels

RESIZED_CROP = "resized_crop"  # value of the hyperparameter ``augment``
TRIES = 10  # proposals for a crop
SCALE = (0.08, 1.0)  # range of a crop's share of the image's area
RATIO = (3 / 4, 4 / 3)  # range of a crop's width to height
DRAWS = 2 * TRIES + 3  # random numbers for a crop: two for each proposal, then top, left and mirroring


class Crop(NamedTuple):
    """A part of an image, in pixels, and whether to mirror the part."""

    top: int
    left: int
    height: int
    width: int
    mirrored: bool = False


def draw_crops(seed: int, epoch: int, samples: Indices) -> NDArray[np.float64]:
    """Return 23 (DRAWS) random numbers in [0, 1) for each sample's crop in an epoch, [N, 23].

    The numbers depend only on ``seed``, ``epoch`` and the number of the sample.
    """
    return draw_uniform(seed, epoch, samples, DRAWS)


def random_crop(draws: NDArray[np.float64], height: int, width: int) -> Crop:
    """Return the box of a random crop, and whether to mirror the crop.

    Depends only on the image's size and on ``draws``, the 23 numbers in [0, 1) of one sample from :func:`draw_crops`.
    If none of ten proposals fits into the image, returns a middle crop.
    """
    *proposals, vertical, horizontal, mirror = draws.tolist()
    low, high = math.log(RATIO[0]), math.log(RATIO[1])
    for drawn_area, drawn_ratio in zip(proposals[::2], proposals[1::2], strict=True):
        area = height * width * (SCALE[0] + (SCALE[1] - SCALE[0]) * drawn_area)
        ratio = math.exp(low + (high - low) * drawn_ratio)
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            top, left = int(vertical * (height - down + 1)), int(horizontal * (width - across + 1))
            return Crop(top, left, down, across, mirror < 0.5)
    # No proposal fits, so use the middle, in the allowed ratio nearest to the image's ratio.
    across, down = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
    return Crop((height - down) // 2, (width - across) // 2, down, across, mirror < 0.5)


def middle_crop(height: int, width: int, share: float = EVALUATION_SHARE) -> Crop:
    """Return the square in the middle of an image. Its side is ``share`` of the image's shorter side."""
    side = max(1, round(min(height, width) * share))
    return Crop((height - side) // 2, (width - side) // 2, side, side)


def resize_crop(pixels: Pixels, crop: Crop, size: int) -> Pixels:
    """Crop an image, resize the crop to a square (bilinear, antialiased), and mirror the square if ``crop.mirrored``.

    ``size`` is the side of the square in pixels.

    Returns:
        uint8 [size, size, C].
    """
    part = np.ascontiguousarray(pixels[crop.top : crop.top + crop.height, crop.left : crop.left + crop.width])
    # unsqueeze by torch, not by NumPy: interpolate's result is channels-last only with torch's strides.
    channels_last = torch.from_numpy(part).unsqueeze(0).permute(0, 3, 1, 2)
    squares = functional.interpolate(channels_last, (size, size), mode="bilinear", antialias=True)
    square: Pixels = (squares.flip(-1) if crop.mirrored else squares)[0].permute(1, 2, 0).numpy()
    return square


def resize_mask(mask: NDArray[Any], crop: Crop, size: int) -> NDArray[Any]:
    """Crop a mask [H, W, ...], and resize the crop to [size, size, ...] by nearest pixels.

    Mirrors the result if ``crop.mirrored``. The type stays.
    """
    rows = crop.top + ((np.arange(size) + 0.5) * crop.height / size).astype(np.int64)
    columns = crop.left + ((np.arange(size) + 0.5) * crop.width / size).astype(np.int64)
    return mask[rows[:, None], columns[::-1] if crop.mirrored else columns]


def crop_to_square(
    pixels: Pixels, size: int, draws: NDArray[np.float64] | None = None, share: float = EVALUATION_SHARE
) -> Pixels:
    """Return a part of an image as a square, uint8 [size, size, C].

    If ``draws`` has a sample's numbers from :func:`draw_crops`, the part is random, stretched to the square, and
    mirrored half the time. ``share`` is then not used. If ``draws`` is None, the part is the middle square, whose side
    is ``share`` of the shorter side.
    """
    height, width, _ = pixels.shape
    crop = middle_crop(height, width, share) if draws is None else random_crop(draws, height, width)
    return resize_crop(pixels, crop, size)
