"""Segmentation: a class for each pixel of photos of a disc and a square, without the border pixels.

Run it with ``pyflyte run workflows/training.py training_wf --hp examples/segmentation/hp.json``.
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, cat, nn

from flyte_ddp.datasets import SampleArrays, image_arrays

CLASSES = ("background", "disc", "square")
IGNORED = 255
TRAIN, TEST, SIDE = 400, 100, 32


def load_shapes(source: str) -> SampleArrays:  # noqa: ARG001 (the hyperparameter data_source, unused here)
    """Return 500 photos uint8 [32, 32, 3], and their masks uint8 [32, 32].

    Each pixel of a mask is a class number, or 255 for ignored pixels.
    """
    random = np.random.default_rng(0)
    masks = np.stack([draw_mask(random) for _ in range(TRAIN + TEST)])
    images = random.normal(110, 30, (*masks.shape, 3))
    images[masks != 0] += 60  # of the border, too: both shapes have the same grey
    images = images.clip(0, 255).astype(np.uint8)
    return image_arrays(images[:TRAIN], masks[:TRAIN], images[TRAIN:], masks[TRAIN:], classes=CLASSES)


def draw_mask(random: np.random.Generator) -> NDArray[np.uint8]:
    """Return a mask with a disc and a square, whose border pixels are ignored."""
    rows, columns = np.mgrid[:SIDE, :SIDE]
    mask = np.zeros((SIDE, SIDE), np.uint8)
    for number, distance in ((1, np.hypot), (2, np.maximum)):
        row, column = random.integers(6, SIDE - 6, 2)
        away = distance(abs(rows - row), abs(columns - column))
        mask[away < 6] = IGNORED
        mask[away < 5] = number
    return mask


class SmallUNet(nn.Module):
    """Maps photos [N, C, H, W] to logits [N, classes, H, W].

    Combines features at the full and at half the resolution.
    """

    def __init__(self, num_classes: int, input_shape: tuple[int, int, int], width: int = 16) -> None:
        super().__init__()
        self.fine = nn.Sequential(nn.Conv2d(input_shape[0], width, 3, padding=1), nn.ReLU())
        layers = [nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=2, dilation=2)]
        self.coarse = nn.Sequential(nn.MaxPool2d(2), *layers, nn.ReLU(), nn.Upsample(scale_factor=2))
        self.head = nn.Conv2d(2 * width, num_classes, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of each pixel."""
        fine = self.fine(images)
        logits: Tensor = self.head(cat((fine, self.coarse(fine)), 1))
        return logits
