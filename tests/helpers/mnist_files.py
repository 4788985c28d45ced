"""A small data set in MNIST's format."""

import gzip
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from image_folders import write_files
from numpy.typing import NDArray

from flyte_ddp.datasets import open_arrays
from flyte_ddp.datasets.published import MNIST, PublishedSet

NAMES = tuple(MNIST.files)


@dataclass(frozen=True)
class Tiny:
    """A small data set in MNIST's format: the entry in the table, the arrays, and the files."""

    dataset: PublishedSet
    arrays: tuple[NDArray[np.uint8], ...]
    files: dict[str, bytes]

    def write(self, folder: Path) -> Path:
        """Write the files into a folder, and return the folder."""
        return write_files(folder, self.files)


def idx_bytes(array: NDArray[np.uint8]) -> bytes:
    """Return the content of an uncompressed IDX file."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def tiny_files(seed: int) -> tuple[tuple[NDArray[np.uint8], ...], dict[str, bytes]]:
    """Return arrays, and the four files with the arrays by name."""
    random = np.random.default_rng(seed)
    arrays = (
        random.integers(0, 256, (40, 5, 7), dtype=np.uint8),
        random.integers(0, 10, 40, dtype=np.uint8),
        random.integers(0, 256, (12, 5, 7), dtype=np.uint8),
        random.integers(0, 10, 12, dtype=np.uint8),
    )
    contents = (gzip.compress(idx_bytes(array), mtime=0) for array in arrays)
    return arrays, dict(zip(NAMES, contents, strict=True))


def leftovers(folder: Path) -> list[str]:
    """Return the names of all files in a folder, including hidden files."""
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def assert_tiny(folder: Path, tiny: Tiny) -> None:
    """Assert that a prepared folder contains the arrays of the files."""
    ours = open_arrays(folder)
    found = ours.train_inputs[..., 0], ours.train_targets, ours.test_inputs[..., 0], ours.test_targets
    for array, expected in zip(found, tiny.arrays, strict=True):
        np.testing.assert_array_equal(array, expected)
