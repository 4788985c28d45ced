"""The digits inside scikit-learn: 1,797 grey 8x8 images of handwritten digits (Alpaydin, Kaynak: UCI, 1998)."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.datasets.arrays import ImageArrays, image_arrays
from flyte_ddp.errors import UserError
from flyte_ddp.progress import Progress

TRAIN_SAMPLES = 1_500


@dataclass(frozen=True)
class Digits:
    """The first 1,500 images in scikit-learn's order are for training, the last 297 for testing.

    Neighbours in that order come from the same writer, so the test set is mostly in hands that training has not seen.
    The values 0..16 are scaled to 0..255.
    """

    needed_bytes: int = 1_797 * (8 * 8 + 8)

    def fingerprint(self, source: str) -> str:
        """Names the content of scikit-learn's data file."""
        refuse_source(source)
        data = data_file()
        content = data.read_bytes() if data else importlib.metadata.version("scikit-learn").encode()
        return f"digits-{hashlib.sha256(content).hexdigest()[:16]}"

    def load(self, source: str, workspace: Path, progress: Progress) -> tuple[ImageArrays, str]:
        """Reads the images from the installed package."""
        del workspace  # nothing is downloaded
        refuse_source(source)
        values, labels = table()
        images = np.rint(values * (255 / 16)).astype(np.uint8)
        progress.note(f"digits from scikit-learn ({len(images):,} images)")
        arrays = image_arrays(
            images[:TRAIN_SAMPLES],
            labels[:TRAIN_SAMPLES],
            images[TRAIN_SAMPLES:],
            labels[TRAIN_SAMPLES:],
            classes=[str(digit) for digit in range(10)],
            name="digits",
        )
        return arrays, f"scikit-learn {importlib.metadata.version('scikit-learn')}"


def data_file() -> Path | None:
    """Scikit-learn's own, found without importing scikit-learn, which takes over a second; None if it is elsewhere."""
    package = importlib.util.find_spec("sklearn")
    found = Path(package.origin).parent / "datasets/data/digits.csv.gz" if package and package.origin else Path()
    return found if found.is_file() else None


def table() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Images of 0..16, [1797, 8, 8], and labels, [1797]."""
    data = data_file()
    if data is None:
        import sklearn.datasets  # type: ignore[import-untyped,unused-ignore]

        bunch = sklearn.datasets.load_digits()
        return bunch.images, bunch.target
    rows = np.loadtxt(data, delimiter=",")  # 64 pixels and the label
    return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int64)


def refuse_source(source: str) -> None:
    """There is one place only where the digits are."""
    if source:
        raise UserError(f"data_source={source!r}: the digits come with scikit-learn; leave data_source empty")
