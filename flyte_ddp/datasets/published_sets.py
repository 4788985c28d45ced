"""The published data sets by name, and the readers of their files."""

import gzip
import importlib.util
import pickle
import struct
import tarfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np

from flyte_ddp.datasets.arrays import Images
from flyte_ddp.datasets.published import Arrays, PublishedSet
from flyte_ddp.errors import UserError

DIGITS_FILE = "digits.csv.gz"
DIGITS_FOR_TRAINING = 1_500
SKLEARN = importlib.util.find_spec("sklearn")  # found but not imported: the import takes over a second


def read_digits_file(folder: Path) -> Arrays:
    """Read scikit-learn's digits; return train images and labels, then test ones. Scales 0..16 to 0..255.

    The first 1,500 images are for training, the last 297 for testing. One writer's digits are neighbours in the file,
    so most writers of the test set are not in the training set.
    """
    rows = np.loadtxt(folder / DIGITS_FILE, delimiter=",")  # 64 pixels and the label
    images = np.rint(rows[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8)
    labels, first_test = rows[:, -1].astype(np.int64), DIGITS_FOR_TRAINING
    return images[:first_test], labels[:first_test], images[first_test:], labels[first_test:]


# 1,797 grey 8x8 images of handwritten digits (Alpaydin, Kaynak: UCI, 1998).
DIGITS = PublishedSet(
    name="digits",
    files={DIGITS_FILE: ("9b335364a7bfd63947c7480a5bd51f2d",)},
    addresses=(),
    classes=tuple("0123456789"),
    read=read_digits_file,
    system_folder=str(Path(SKLEARN.origin).parent / "datasets/data") if SKLEARN and SKLEARN.origin else "",
)

IDX_FILES = tuple(f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
UNSIGNED_BYTES = b"\x00\x00\x08"
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def read_idx_file(path: Path) -> Images:
    """Return the uint8 array in a gzipped IDX file. Raises a UserError if the file is of another kind or truncated.

    IDX ("THE IDX FILE FORMAT", LeCun, Cortes, Burges): two zero bytes, the type of the values (8: unsigned bytes), the
    number of dimensions, each dimension as a big-endian uint32, then the values in C order.
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


def read_idx_files(folder: Path) -> Arrays:
    """Read a data set's four IDX files; return train images [N, H, W] and labels [N], then the test ones."""
    train_images, train_labels, test_images, test_labels = (read_idx_file(folder / name) for name in IDX_FILES)
    return train_images, train_labels, test_images, test_labels


# 60,000 and 10,000 grey 28x28 images of handwritten digits. Names, digests and addresses of this set and of the next
# two are those of torchvision.datasets; a test compares them.
MNIST = PublishedSet(
    name="mnist",
    files={
        IDX_FILES[0]: ("f68b3c2dcbeaaa9fbdd348bbdeb94873",),
        IDX_FILES[1]: ("d53e105ee54ea40749a09fcbcd1e9432",),
        IDX_FILES[2]: ("9fb629c4189551a2d022fa330f9573f3",),
        IDX_FILES[3]: ("ec29112dd5afa0611ce80d1b7f02629c",),
    },
    addresses=("https://ossci-datasets.s3.amazonaws.com/mnist", "http://yann.lecun.com/exdb/mnist"),
    classes=tuple(f"{digit} - {word}" for digit, word in enumerate(WORDS)),
    read=read_idx_files,
)

# The same of clothing (Xiao, Rasul, Vollgraf: arXiv 1708.07747). The second digest is that of Debian's copy, where the
# gzip header lacks name and time of the original while the compressed data are the same bytes; a test holds this too.
FASHION_MNIST = PublishedSet(
    name="fashion_mnist",
    files={
        IDX_FILES[0]: ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "cf8536b0aa1a6ac5fa3f23001093305c"),
        IDX_FILES[1]: ("25c81989df183df01b3e8a0aad5dffbe", "10bea18fdb374794d4bb42e356e600c9"),
        IDX_FILES[2]: ("bef4ecab320f06d8554ea6380940ec79", "f78720b4224f21cce2f2ccf2d7a94c9a"),
        IDX_FILES[3]: ("bb300cfdad3c16e7a12a480ee83cd310", "0d30e22e447f3c33dab9ed536400ac01"),
    },
    addresses=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",),
    classes=("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    read=read_idx_files,
    system_folder="/usr/share/datasets/fashion-mnist",  # Debian's package dataset-fashion-mnist
)

CIFAR10_FILE = "cifar-10-python.tar.gz"
TRAIN_BATCHES, TEST_BATCH = tuple(f"data_batch_{number}" for number in range(1, 6)), "test_batch"

# Classes and functions that a pickled batch of arrays needs, by their names in NumPy 1 and in NumPy 2.
ALLOWED_GLOBALS = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


class BatchUnpickler(pickle.Unpickler):
    """Unpickler for arrays, lists and text only. A mirror with its own digests could otherwise run code here."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the named class or function if a batch of arrays needs it. Raises a UserError for any other."""
        if (module, name) not in ALLOWED_GLOBALS:
            raise UserError(f"{CIFAR10_FILE}: asks for {module}.{name}, which a batch of images does not need; refused")
        return super().find_class(module, name)


def read_cifar10_archive(folder: Path) -> Arrays:
    """Read CIFAR-10's archive; return train images [N, 32, 32, 3] and labels, then the test ones.

    Raises a UserError for a damaged archive or another file.
    """
    batches = {}
    try:
        with tarfile.open(folder / CIFAR10_FILE, "r:gz") as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                content = archive.extractfile(member)
                if content is not None and name in (*TRAIN_BATCHES, TEST_BATCH):
                    batches[name] = read_cifar10_batch(content)
        images, labels = zip(*(batches[name] for name in TRAIN_BATCHES), strict=True)
        return np.concatenate(images), [label for batch in labels for label in batch], *batches[TEST_BATCH]
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"{CIFAR10_FILE}: has no {error}") from error
    except Exception as error:  # damaged archives and pickles raise many types
        raise UserError(f"{CIFAR10_FILE}: not a whole archive of CIFAR-10 ({error})") from error


def read_cifar10_batch(file: IO[bytes]) -> tuple[Images, list[int]]:
    """Unpickle one batch; return images [N, 32, 32, 3] and labels. Stored rows are 1,024 red, green and blue values."""
    batch = BatchUnpickler(file, encoding="latin1").load()
    return np.asarray(batch["data"]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), list(batch["labels"])


# 60,000 colour 32x32 images of ten kinds of things (Krizhevsky, "Learning Multiple Layers of Features").
CIFAR10 = PublishedSet(
    name="cifar10",
    files={CIFAR10_FILE: ("c58f30108f718f92721af3b95e74349a",)},
    addresses=("https://www.cs.toronto.edu/~kriz",),
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    read=read_cifar10_archive,
)

DATASETS: dict[str, PublishedSet] = {each.name: each for each in (DIGITS, MNIST, FASHION_MNIST, CIFAR10)}
