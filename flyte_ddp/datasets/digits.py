"""The digits inside scikit-learn: 1,797 grey 8x8 images of handwritten digits (Alpaydin, Kaynak: UCI, 1998)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from flyte_ddp.datasets.published import Arrays, PublishedFile, PublishedSet

FILE = "digits.csv.gz"
TRAIN_SAMPLES = 1_500
PACKAGE = importlib.util.find_spec("sklearn")  # to import scikit-learn takes over a second


def read_digits(folder: Path) -> Arrays:
    """The first 1,500 images in scikit-learn's order are for training, the last 297 for testing.

    Neighbours in that order come from the same writer, so the test set is mostly in hands that training has not seen.
    The values 0..16 are scaled to 0..255.
    """
    rows = np.loadtxt(folder / FILE, delimiter=",")  # 64 pixels and the label
    images = np.rint(rows[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8)
    labels = rows[:, -1].astype(np.int64)
    return images[:TRAIN_SAMPLES], labels[:TRAIN_SAMPLES], images[TRAIN_SAMPLES:], labels[TRAIN_SAMPLES:]


DIGITS = PublishedSet(
    name="digits",
    files=(PublishedFile(FILE, "9b335364a7bfd63947c7480a5bd51f2d"),),
    addresses=(),
    classes=tuple("0123456789"),
    read=read_digits,
    system_folder=str(Path(PACKAGE.origin).parent / "datasets/data") if PACKAGE and PACKAGE.origin else "",
)
