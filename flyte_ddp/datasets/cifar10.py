"""CIFAR-10: 60,000 colour 32x32 images of ten kinds of things (Krizhevsky, "Learning Multiple Layers of Features")."""

from __future__ import annotations

import pickle
import tarfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from flyte_ddp.datasets.arrays import Images
from flyte_ddp.datasets.published import PublishedFile, PublishedSet
from flyte_ddp.errors import UserError

ARCHIVE = "cifar-10-python.tar.gz"
TRAIN_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_BATCH = "test_batch"

# What a pickled batch of arrays needs, under the names that numpy had in different versions.
ALLOWED_GLOBALS = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


class BatchUnpickler(pickle.Unpickler):
    """Reads arrays, lists and text only: a mirror with digests of its own could otherwise run code here."""

    def find_class(self, module: str, name: str) -> Any:
        """A class or function that a batch may refer to."""
        if (module, name) not in ALLOWED_GLOBALS:
            raise UserError(f"{ARCHIVE}: asks for {module}.{name}, which a batch of images does not need; refused")
        return super().find_class(module, name)


def read_archive(folder: Path) -> tuple[Images, list[int], Images, list[int]]:
    """Training images [N, 32, 32, 3] and labels, then those of the test set.

    Raises:
        UserError: not such an archive.
    """
    batches = {}
    try:
        with tarfile.open(folder / ARCHIVE, "r:gz") as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                content = archive.extractfile(member)
                if content is not None and name in (*TRAIN_BATCHES, TEST_BATCH):
                    batches[name] = read_batch(content)
        train = [batches[name] for name in TRAIN_BATCHES]
        test_images, test_labels = batches[TEST_BATCH]
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"{ARCHIVE}: has no {error}") from error
    except Exception as error:  # of a damaged archive, or a damaged or foreign pickle: there are many kinds
        raise UserError(f"{ARCHIVE}: not a whole archive of CIFAR-10 ({error})") from error
    images = np.concatenate([images for images, _ in train])
    return images, [label for _, labels in train for label in labels], test_images, test_labels


def read_batch(file: IO[bytes]) -> tuple[Images, list[int]]:
    """Images [N, 32, 32, 3] and labels; stored are rows of 3,072 values, red, green and blue one after another."""
    batch = BatchUnpickler(file, encoding="latin1").load()
    return np.asarray(batch["data"]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), list(batch["labels"])


# Name, digest and address as in torchvision.datasets.CIFAR10; a test compares them.
CIFAR10 = PublishedSet(
    name="cifar10",
    files=(PublishedFile(ARCHIVE, "c58f30108f718f92721af3b95e74349a"),),
    addresses=("https://www.cs.toronto.edu/~kriz",),
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    read=read_archive,
)
