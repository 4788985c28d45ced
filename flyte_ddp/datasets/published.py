"""Published data sets: files with known digests, fetched from public addresses or from a team's mirror."""

import gzip
import importlib.util
import pickle
import shutil
import struct
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flyte_ddp import storage
from flyte_ddp.core.files import file_digest
from flyte_ddp.core.progress import Progress
from flyte_ddp.datasets.images import image_arrays
from flyte_ddp.datasets.sample_arrays import SampleArrays
from flyte_ddp.storage.identity import digest_lines

Arrays = tuple[Any, Any, Any, Any]  # train images, train labels, test images, test labels


@dataclass(frozen=True)
class PublishedSet:
    """A published data set: files with digests, addresses, and a function that reads the files."""

    name: str
    files: Mapping[str, tuple[str, ...]]  # by name: allowed MD5 digests (hex), one for each compression in use
    addresses: tuple[str, ...]  # directories that hold the files, tried in order after ``system_folder``
    classes: tuple[str, ...]
    read_arrays: Callable[[Path], Arrays]  # reads the verified files in a folder
    system_folder: str = ""  # where a system or Python package installs the files
    sha256: Mapping[str, str] = field(default_factory=dict)  # by name: SHA-256 (hex) of files that may run code

    def fingerprint(self, source: str) -> str:
        """Return the set's name with a hash of the files' published digests. ``source`` makes no difference."""
        del source
        lines = (f"{name} {digests[0]}" for name, digests in self.files.items())
        return f"{self.name}-{digest_lines(lines)[:16]}"

    def load(self, source: str, workspace: Path, progress: Progress) -> tuple[SampleArrays, str]:
        """Download, verify and read the files.

        Files are written to ``workspace/raw``, a new folder that is deleted at the end.

        Each file is tried up to 4 times, and pauses are printed.

        Args:
            source: A directory or web address with the files, or "" for the system's copy and the public addresses.
            workspace: An existing folder.
            progress: Shows the downloads.

        Returns:
            The arrays, and the addresses that the files came from.

        Raises:
            UserError: No address has a file with the right digest.
        """
        raw = workspace / "raw"
        raw.mkdir()
        used = [self.download_file(name, source, raw, progress) for name in self.files]
        arrays = image_arrays(*self.read_arrays(raw), classes=self.classes, name=self.name)
        shutil.rmtree(raw)
        return arrays, " and ".join(dict.fromkeys(used))

    def download_file(self, name: str, source: str, folder: Path, progress: Progress) -> str:
        """Download a file into ``folder``, verify the content, and return the directory that the file came from.

        If ``source`` is empty, tries ``system_folder`` and then the public addresses. Makes up to 4 rounds, with
        printed pauses.

        Raises:
            UserError: All addresses failed, or have a file with another digest.
        """
        system = [self.system_folder] if self.system_folder and Path(self.system_folder).is_dir() else []
        addresses = [
            storage.join_address(place, name) for place in ([source] if source else [*system, *self.addresses])
        ]
        try:
            with (folder / name).open("wb") as file:

                def download_from(address: str) -> str:
                    """Download the file from one address, and return the address of the directory."""
                    storage.download_file(address, file, digests=self.files[name], kind="md5", progress=progress)
                    file.flush()
                    if name in self.sha256 and (found := file_digest(folder / name)) != self.sha256[name]:
                        raise storage.AlteredError(f"sha256 {found} instead of {self.sha256[name]}")
                    return storage.parent_address(address)

                return storage.call_with_retries(addresses, download_from, progress.print_note)
        except storage.UnavailableError as failure:
            what = f"data_source={source!r}: cannot get {name}" if source else f"{self.name}: cannot get {name}"
            fix = "check the network, or set data_source to a directory or mirror with this file"
            if source:
                fix = f"the source must be reachable and contain the published {', '.join(self.files)}"
            raise failure.to_user_error(f"{what} ({failure}); {fix}") from None


DIGITS_FILE = "digits.csv.gz"
DIGITS_FOR_TRAINING = 1_500
SKLEARN = importlib.util.find_spec("sklearn")  # found but not imported: the import takes over a second


def read_digits_file(folder: Path) -> Arrays:
    """Return images [n, 8, 8] and labels of the first 1,500 rows (training), then of the rest (test)."""
    rows = np.loadtxt(folder / DIGITS_FILE, delimiter=",", ndmin=2)  # 64 pixels and the label
    images = np.rint(rows[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8)
    labels, first_test = rows[:, -1].astype(np.int64), DIGITS_FOR_TRAINING
    return images[:first_test], labels[:first_test], images[first_test:], labels[first_test:]


# 1,797 grey 8x8 images of handwritten digits (Alpaydin, Kaynak: UCI, 1998).
DIGITS = PublishedSet(
    name="digits",
    files={DIGITS_FILE: ("9b335364a7bfd63947c7480a5bd51f2d",)},
    addresses=(),
    classes=tuple("0123456789"),
    read_arrays=read_digits_file,
    system_folder=str(Path(SKLEARN.origin).parent / "datasets/data") if SKLEARN and SKLEARN.origin else "",
)

IDX_FILES = tuple(f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def read_idx_files(folder: Path) -> Arrays:
    """Read four gzipped IDX files, and return images [N, H, W] and labels [N] of training, then of test.

    The arrays are uint8 and read-only. Whether a file holds values of this type is not checked.

    A file holds two zero bytes, the type of the values (8: unsigned bytes), and the number of dimensions. The
    dimensions (big-endian uint32) and the values (C order) follow. Source: "THE IDX FILE FORMAT", LeCun, Cortes,
    Burges.
    """
    arrays = []
    for name in IDX_FILES:
        content = gzip.decompress((folder / name).read_bytes())
        shape = struct.unpack_from(f">{content[3]}I", content, 4)
        arrays.append(np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * len(shape)).reshape(shape))
    return arrays[0], arrays[1], arrays[2], arrays[3]


# 60,000 and 10,000 grey 28x28 images of handwritten digits. This set and the next two have the names, digests and
# addresses of torchvision.datasets. A test compares them.
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
    read_arrays=read_idx_files,
)

# Images of clothing in MNIST's format (Xiao, Rasul, Vollgraf: arXiv 1708.07747). The second digest is of Debian's copy:
# its gzip header lacks the original's name and time, and the compressed data are the same bytes.
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
    read_arrays=read_idx_files,
    system_folder="/usr/share/datasets/fashion-mnist",  # Debian's package dataset-fashion-mnist
)

CIFAR10_FILE = "cifar-10-python.tar.gz"
TRAIN_BATCHES, TEST_BATCH = tuple(f"data_batch_{number}" for number in range(1, 6)), "test_batch"


def read_cifar10_archive(folder: Path) -> Arrays:
    """Return images [n, 32, 32, 3] and labels of training, then of test, from the pickles in the archive.

    Pickles can run code, so the SHA-256 of the archive must be verified before.
    """
    images, labels = {}, {}
    with tarfile.open(folder / CIFAR10_FILE, "r:gz") as archive:
        for member in archive:
            name, content = member.name.rpartition("/")[2], archive.extractfile(member)
            if content is not None and name in (*TRAIN_BATCHES, TEST_BATCH):
                batch = pickle.load(content, encoding="latin1")  # safe, because the file's SHA-256 was verified
                rows = np.asarray(batch["data"])  # each row has 1,024 red, then green, then blue values
                images[name] = rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
                labels[name] = list(batch["labels"])
    train_images = np.concatenate([images[name] for name in TRAIN_BATCHES])
    train_labels = [label for name in TRAIN_BATCHES for label in labels[name]]
    return train_images, train_labels, images[TEST_BATCH], labels[TEST_BATCH]


# 60,000 colour 32x32 images of ten kinds of things (Krizhevsky, "Learning Multiple Layers of Features").
CIFAR10 = PublishedSet(
    name="cifar10",
    files={CIFAR10_FILE: ("c58f30108f718f92721af3b95e74349a",)},
    # The authors publish only the MD5. This is the SHA-256 in Keras, and of files that others downloaded.
    sha256={CIFAR10_FILE: "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"},
    addresses=("https://www.cs.toronto.edu/~kriz",),
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    read_arrays=read_cifar10_archive,
)

DATASETS: dict[str, PublishedSet] = {each.name: each for each in (DIGITS, MNIST, FASHION_MNIST, CIFAR10)}
