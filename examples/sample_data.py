"""Data for the examples, without a network: scikit-learn's 1,797 digits, in the formats that the documents use."""

import gzip
import struct
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

TEST_SHARE = 6  # one digit in six is for tests


def make_digits(size: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return grey images, uint8 [N, size, size], and labels of "train" and "t10k", MNIST's name for test."""
    digits = load_digits()
    pixels = (digits.images * (255 / 16)).astype(np.uint8)
    images = np.stack([np.asarray(Image.fromarray(image).resize((size, size))) for image in pixels])
    labels, is_test = digits.target.astype(np.uint8), np.arange(len(images)) % TEST_SHARE == 0
    return {"train": (images[~is_test], labels[~is_test]), "t10k": (images[is_test], labels[is_test])}


def unpack_mnist_files(name: str, source: str | None, folder: Path, count: int = 0) -> Path:
    """Write MNIST's four files for ``torchvision.datasets.NAME(folder)``, and return ``folder``.

    Unpacks the files in the folder ``source``. Without ``source``, writes the digits as images of 28x28 pixels. A
    ``count`` limits the digits of each part.
    """
    raw = folder / name / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for path in Path(source).glob("*-ubyte.gz") if source else ():
        (raw / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    for part, arrays in make_digits(28).items() if not source else ():
        for kind, array in zip(("images-idx3", "labels-idx1"), arrays, strict=True):
            taken = array[: count or None]
            header = struct.pack(f">BBBB{taken.ndim}I", 0, 0, 8, taken.ndim, *taken.shape)
            (raw / f"{part}-{kind}-ubyte").write_bytes(header + taken.tobytes())
    return folder


def write_image_folder(folder: Path, count: int = 0) -> Path:
    """Write training digits of 32x32 pixels as files ``class/number.png``, and return the folder.

    A ``count`` limits the number of digits.
    """
    images, labels = make_digits(32)["train"]
    for number, (image, label) in enumerate(zip(images[: count or None], labels, strict=False)):
        path = folder / str(label) / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    return folder
