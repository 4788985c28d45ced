"""A user-defined augmentation: few written digits, shifted and turned by a pipeline of torchvision.

Run it with ``pyflyte run workflows/training.py training_wf --hp examples/augmentation/hp.json``.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torchvision.transforms import v2

from flyte_ddp.datasets import SampleArrays, image_arrays

TRAIN, TEST = 150, 1000


def load_few_digits(source: str) -> SampleArrays:  # noqa: ARG001 (the hyperparameter data_source, unused here)
    """Return 150 of scikit-learn's digits for training and 1,000 for tests: uint8 [8, 8, 1], ten classes."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.images))
    images, labels = (found.images[order] * 255 / 16).astype(np.uint8), found.target[order]
    tests = slice(TRAIN, TRAIN + TEST)
    return image_arrays(images[:TRAIN], labels[:TRAIN], images[tests], labels[tests], classes=[*map(str, range(10))])


class ShiftAndTurn:
    """Shifts, turns and scales an image a little.

    Each loader process makes an instance. Random draws are seeded for each sample and epoch, independent of the
    process.
    """

    def __init__(self) -> None:
        self.pipeline = v2.RandomAffine(degrees=12, translate=(0.1, 0.1), scale=(0.9, 1.1))

    def __call__(self, image: NDArray[np.uint8], target: int) -> tuple[NDArray[np.uint8], int]:
        """Return the image [8, 8, 1] shifted, turned and scaled a little, and the unchanged target."""
        moved = self.pipeline(torch.from_numpy(image).permute(2, 0, 1))
        return moved.permute(1, 2, 0).numpy(), target
