"""Photos with several labels each, some of which are unknown: a disc, a square, stripes and a frame.

Run it with ``pyflyte run workflows/training.py training_wf --hp examples/multilabel_photos/hp.json``.
"""

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.datasets import SampleArrays, image_arrays

LABELS = ("disc", "square", "stripes", "frame")
TRAIN, TEST, SIDE = 1600, 400, 24
UNKNOWN = 0.2  # share of the training labels that are unknown


def load_photos(source: str) -> SampleArrays:  # noqa: ARG001 (the hyperparameter data_source, unused here)
    """Return 2000 photos uint8 [24, 24, 3] with their labels: 1 present, 0 absent, NaN unknown."""
    random = np.random.default_rng(0)
    labels = (random.random((TRAIN + TEST, len(LABELS))) < 0.4).astype(np.float32)
    images = np.stack([draw_photo(random, present) for present in labels.astype(bool)])
    labels[:TRAIN][random.random((TRAIN, len(LABELS))) < UNKNOWN] = np.nan
    return image_arrays(images[:TRAIN], labels[:TRAIN], images[TRAIN:], labels[TRAIN:], classes=LABELS)


def draw_photo(random: np.random.Generator, present: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return a noisy photo uint8 [24, 24, 3] with the objects for which ``present`` is true."""
    photo = random.normal(90, 30, (SIDE, SIDE, 3))
    rows, columns = np.mgrid[:SIDE, :SIDE]
    disc, square, stripes, frame = present
    if stripes:
        photo[rows % 6 < 2] += 12
    if disc:
        row, column = random.integers(6, SIDE - 6, 2)
        photo[(rows - row) ** 2 + (columns - column) ** 2 < 16] += (50, 10, 10)
    if square:
        row, column = random.integers(2, SIDE - 8, 2)
        photo[row : row + 6, column : column + 6] += (10, 10, 50)
    if frame:
        photo[(rows % (SIDE - 1)) * (columns % (SIDE - 1)) == 0] += 25
    return photo.clip(0, 255).astype(np.uint8)
