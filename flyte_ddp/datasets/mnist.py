"""MNIST: 70,000 grey 28x28 images of handwritten digits (LeCun, Cortes, Burges)."""

from __future__ import annotations

from flyte_ddp.datasets import idx
from flyte_ddp.datasets.published import PublishedFile, PublishedSet

# Names, digests and addresses as in torchvision.datasets.MNIST; a test compares them.
MNIST = PublishedSet(
    name="mnist",
    files=(
        PublishedFile("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        PublishedFile("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
        PublishedFile("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
        PublishedFile("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
    ),
    addresses=("https://ossci-datasets.s3.amazonaws.com/mnist", "http://yann.lecun.com/exdb/mnist"),
    classes=(
        "0 - zero",
        "1 - one",
        "2 - two",
        "3 - three",
        "4 - four",
        "5 - five",
        "6 - six",
        "7 - seven",
        "8 - eight",
        "9 - nine",
    ),
    read=idx.read_mnist_files,
    needed_bytes=70_000 * (28 * 28 + 8),
)
