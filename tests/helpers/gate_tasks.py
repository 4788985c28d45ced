"""Data sets of 300 test samples for each objective, that a small model learns in seconds: where images are bright."""

import numpy as np

from flyte_ddp.datasets import ImageArrays, image_arrays

TRAIN, TEST, SIDE = 300, 300, 8
QUARTERS = ("north-west", "north-east", "south-west", "south-east")


def images_of_quarters() -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [N, 8, 8, 1], and the brightness of their quarters, [N, 4], 0 to 1."""
    random = np.random.default_rng(0)
    bright = random.random((TRAIN + TEST, 4))
    images = np.kron(bright.reshape(-1, 2, 2), np.ones((SIDE // 2, SIDE // 2)))
    noisy = 255 * images + random.normal(0, 40, images.shape)
    return noisy.clip(0, 255).astype(np.uint8)[..., None], bright


def arrays_of(targets: np.ndarray, classes: tuple[str, ...] = ()) -> ImageArrays:
    images, _ = images_of_quarters()
    return image_arrays(images[:TRAIN], targets[:TRAIN], images[TRAIN:], targets[TRAIN:], classes)


def labels(source: str) -> ImageArrays:
    return arrays_of((images_of_quarters()[1] > 0.6).astype(np.float32), QUARTERS)


def number(source: str) -> ImageArrays:
    return arrays_of(images_of_quarters()[1].sum(1).astype(np.float32))


def masks(source: str) -> ImageArrays:
    bright = images_of_quarters()[1].reshape(-1, 2, 2)
    return arrays_of(np.kron(bright > 0.5, np.ones((SIDE // 2, SIDE // 2))).astype(np.uint8), ("dark", "bright"))
