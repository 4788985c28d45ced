"""MNIST and FashionMNIST: each 70,000 grey 28x28 images, of handwritten digits or of kinds of clothing, in IDX files.

IDX is described in "THE IDX FILE FORMAT" on the MNIST database's page (LeCun, Cortes, Burges): two zero bytes, the type
of the values (8: unsigned bytes), the number of dimensions, each dimension as a big-endian uint32, then the values in C
order. FashionMNIST (Xiao, Rasul, Vollgraf: arXiv 1708.07747) has taken it over.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np

from flyte_ddp.datasets.arrays import Images
from flyte_ddp.datasets.published import PublishedFile, PublishedSet
from flyte_ddp.errors import UserError

FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
UNSIGNED_BYTES = b"\x00\x00\x08"
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def read_idx(path: Path) -> Images:
    """The uint8 array in a gzipped IDX file.

    Raises:
        UserError: not gzip, not IDX, or not as long as it says.
    """
    try:
        content = gzip.decompress(path.read_bytes())
        kind, dimensions = struct.unpack_from(">3sB", content)
        shape = struct.unpack_from(f">{dimensions}I", content, 4)
        array = np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    except (OSError, EOFError, zlib.error, struct.error, ValueError) as error:
        raise UserError(f"{path.name}: not a whole, gzipped IDX file of unsigned bytes ({error})") from error
    if kind != UNSIGNED_BYTES:
        raise UserError(f"{path.name}: not an IDX file of unsigned bytes, it begins with {kind.hex()}")
    return array


def read_mnist_files(folder: Path) -> tuple[Images, Images, Images, Images]:
    """Training images [N, H, W] and labels [N], then those of the test set."""
    train_images, train_labels, test_images, test_labels = (read_idx(folder / name) for name in FILES)
    return train_images, train_labels, test_images, test_labels


def files(*digests: tuple[str, ...]) -> tuple[PublishedFile, ...]:
    """The four files by their MD5, each with those of repacked copies."""
    return tuple(PublishedFile(name, md5, tuple(more)) for name, (md5, *more) in zip(FILES, digests, strict=True))


# Names, digests and addresses as in torchvision.datasets; a test compares them.
MNIST = PublishedSet(
    name="mnist",
    files=files(
        ("f68b3c2dcbeaaa9fbdd348bbdeb94873",),
        ("d53e105ee54ea40749a09fcbcd1e9432",),
        ("9fb629c4189551a2d022fa330f9573f3",),
        ("ec29112dd5afa0611ce80d1b7f02629c",),
    ),
    addresses=("https://ossci-datasets.s3.amazonaws.com/mnist", "http://yann.lecun.com/exdb/mnist"),
    classes=tuple(f"{digit} - {word}" for digit, word in enumerate(WORDS)),
    read=read_mnist_files,
)

# The second digest is that of Debian's copy, where the gzip header lacks name and time of the original while the
# compressed data are the same bytes; a test holds this too.
FASHION_MNIST = PublishedSet(
    name="fashion_mnist",
    files=files(
        ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "cf8536b0aa1a6ac5fa3f23001093305c"),
        ("25c81989df183df01b3e8a0aad5dffbe", "10bea18fdb374794d4bb42e356e600c9"),
        ("bef4ecab320f06d8554ea6380940ec79", "f78720b4224f21cce2f2ccf2d7a94c9a"),
        ("bb300cfdad3c16e7a12a480ee83cd310", "0d30e22e447f3c33dab9ed536400ac01"),
    ),
    addresses=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",),
    classes=("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    read=read_mnist_files,
    system_folder="/usr/share/datasets/fashion-mnist",  # Debian's package dataset-fashion-mnist
)
