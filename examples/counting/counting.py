"""Counting by regression: the number of grains on a photo, some of which overlap.

Run it with ``pyflyte run workflows/training.py training_wf --hp examples/counting/hp.json``.
"""

import numpy as np
from torch import nn

from flyte_ddp.datasets import SampleArrays, image_arrays

TRAIN, TEST, SIDE, MOST = 1600, 400, 32, 20


def load_grains(source: str) -> SampleArrays:  # noqa: ARG001 (the hyperparameter data_source, unused here)
    """Return 2000 photos uint8 [32, 32, 1] with 0 to 20 grains, and the numbers of grains as float."""
    random = np.random.default_rng(0)
    counts = random.integers(0, MOST + 1, TRAIN + TEST)
    images = random.normal(60, 10, (len(counts), SIDE, SIDE))
    rows, columns = np.mgrid[:SIDE, :SIDE]
    for number, count in enumerate(counts):
        for row, column in random.uniform(2, SIDE - 2, (count, 2)):
            images[number] += 100 * np.exp(-((rows - row) ** 2 + (columns - column) ** 2) / 3)
    images, targets = images.clip(0, 255).astype(np.uint8), counts.astype(np.float32)
    return image_arrays(images[:TRAIN], targets[:TRAIN], images[TRAIN:], targets[TRAIN:], classes=())


def make_counter(num_classes: int, input_shape: tuple[int, int, int], width: int = 16) -> nn.Module:
    """Return a model whose output is a sum over all places of the photo, like a count.

    ``num_classes`` is the number of values in a target, 1. The hyperparameter ``options`` sets ``width``.
    """
    return nn.Sequential(
        nn.Conv2d(input_shape[0], width, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, num_classes, 1),
        nn.AvgPool2d(input_shape[1] // 2, divisor_override=16),
        nn.Flatten(),
    )
