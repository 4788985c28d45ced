"""The IDX format of MNIST and of the data sets that took it over.

Source: "THE IDX FILE FORMAT" on the MNIST database's page: two zero bytes, the type of the values (8: unsigned bytes),
the number of dimensions, each dimension as a big-endian uint32, then the values in C order.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from flyte_ddp.datasets.arrays import Images
from flyte_ddp.errors import UserError

FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


def read_idx(path: Path) -> Images:
    """The uint8 array in a gzipped IDX file.

    Raises:
        UserError: not gzip, not IDX, or not as long as it says.
    """
    try:
        content = gzip.decompress(path.read_bytes())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path.name}: not a whole gzip file ({error})") from error
    dimensions = content[3] if content[:3] == b"\x00\x00\x08" and len(content) > 3 else 0
    start = 4 + 4 * dimensions
    if dimensions == 0 or len(content) < start:
        raise UserError(
            f"{path.name}: not an IDX file of unsigned bytes, it begins with {content[:4].hex() or 'nothing'}"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise UserError(
            f"{path.name}: has {len(content) - start:,} values, but its header says {' x '.join(map(str, shape))}"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def read_mnist_files(folder: Path) -> tuple[Images, Images, Images, Images]:
    """Training images [N, H, W] and labels [N], then those of the test set."""
    train_images, train_labels, test_images, test_labels = (read_idx(folder / name) for name in FILES)
    return train_images, train_labels, test_images, test_labels
