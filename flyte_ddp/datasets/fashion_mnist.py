"""FashionMNIST: 70,000 grey 28x28 images of ten kinds of clothing (Xiao, Rasul, Vollgraf: arXiv 1708.07747)."""

from __future__ import annotations

from flyte_ddp.datasets import idx
from flyte_ddp.datasets.published import PublishedFile, PublishedSet

# Names, digests and addresses as in torchvision.datasets.FashionMNIST; a test compares them. The second digest is that
# of Debian's copy, where the gzip header lacks name and time of the original while the compressed data are the same
# bytes; a test holds this too.
FASHION_MNIST = PublishedSet(
    name="fashion_mnist",
    files=(
        PublishedFile(
            "train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d", ("cf8536b0aa1a6ac5fa3f23001093305c",)
        ),
        PublishedFile(
            "train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe", ("10bea18fdb374794d4bb42e356e600c9",)
        ),
        PublishedFile(
            "t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79", ("f78720b4224f21cce2f2ccf2d7a94c9a",)
        ),
        PublishedFile(
            "t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310", ("0d30e22e447f3c33dab9ed536400ac01",)
        ),
    ),
    addresses=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",),
    classes=(
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    read=idx.read_mnist_files,
    needed_bytes=70_000 * (28 * 28 + 8),
    system_folder="/usr/share/datasets/fashion-mnist",  # Debian's package dataset-fashion-mnist
)
