"""Published data sets: files with known digests, fetched from public addresses or from a team's mirror."""

import gzip
import importlib.util
import pickle
import shutil
import struct
import tarfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flyte_ddp import storage
from flyte_ddp.datasets.downloading import download_verified
from flyte_ddp.datasets.identity import digest_lines
from flyte_ddp.datasets.images import image_arrays
from flyte_ddp.datasets.sample_arrays import SampleArrays
from flyte_ddp.errors import UserError
from flyte_ddp.progress import Progress
from flyte_ddp.storage.digest_list import SUMS, DigestListError, parse_digest_list

Arrays = tuple[Any, Any, Any, Any]  # train images, train labels, test images, test labels
RENEW = f"sha256sum * > {SUMS}"  # the command that errors advise


@dataclass(frozen=True)
class PublishedSet:
    """A published data set: its files with their digests, where to find them, and how to read them."""

    name: str
    files: Mapping[str, tuple[str, ...]]  # by name: allowed MD5 digests (hex), one for each compression in use
    addresses: tuple[str, ...]  # directories that hold the files, tried in order after ``system_folder``
    classes: tuple[str, ...]
    read_arrays: Callable[[Path], Arrays]  # reads the verified files in a folder
    system_folder: str = ""  # where a system or Python package installs the files

    def fingerprint(self, source: str) -> str:
        """Return the set's name with a hash of the digests that its files must have."""
        sums = self.read_mirror_digests(source, Progress())
        lines = (f"{name} {sums.get(name, known[0])}" for name, known in self.files.items())
        return f"{self.name}-{digest_lines(lines)[:16]}"

    def load(self, source: str, workspace: Path, progress: Progress) -> tuple[SampleArrays, str]:
        """Download and verify the files; return checked arrays, and the addresses that served them as text."""
        sums = self.read_mirror_digests(source, progress)
        raw = workspace / "raw"
        raw.mkdir()
        used = [self.download_file(name, source, sums, raw, progress) for name in self.files]
        try:
            arrays = image_arrays(*self.read_arrays(raw), classes=self.classes, name=self.name)
        except UserError as error:
            raise UserError(f"{source or used[0]}: {error.message}") from error
        shutil.rmtree(raw)
        return arrays, " and ".join(dict.fromkeys(used))

    def download_file(self, name: str, source: str, sums: dict[str, str], folder: Path, progress: Progress) -> str:
        """Download a file from ``source``, else a system copy or public addresses; verify it; return where it was."""
        algorithm, digests = ("sha256", (sums[name],)) if sums else ("md5", self.files[name])
        system = [self.system_folder] if self.system_folder and Path(self.system_folder).is_dir() else []
        usual = [storage.join(place, name) for place in (*system, *self.addresses)]
        addresses = storage.join(source, name) if source else usual
        try:
            with (folder / name).open("wb") as file:
                download = partial(
                    download_verified, name=name, file=file, algorithm=algorithm, digests=digests, progress=progress
                )
                return storage.retry(addresses, download, progress.print_note)
        except storage.UnavailableError as failure:
            if source:
                raise self.mirror_error(name, source, failure) from None
            raise failure.to_user_error(
                f"{self.name}: cannot get {name} ({failure}); check the network, or set data_source to a "
                "directory or mirror that holds it"
            ) from None

    def read_mirror_digests(self, source: str, progress: Progress) -> dict[str, str]:
        """Return the SHA-256 by file name from ``SHA256SUMS`` in ``source``, with retries; {} without a source or list.

        Raises UserError if that list is unreadable or lacks a file of the data set.
        """
        if not source:
            return {}
        where = f"data_source={source!r}"
        try:
            digests = parse_digest_list(
                storage.retry(storage.join(source, SUMS), storage.read_file, progress.print_note)
            )
        except (storage.MissingError, storage.ForbiddenError):  # web servers answer 403 for missing files, too
            path = storage.local_path(source)
            if path is not None and not path.is_dir():
                raise UserError(f"{where}: no such directory; give one that holds {', '.join(self.files)}") from None
            return {}
        except storage.UnavailableError as failure:
            raise self.mirror_error(SUMS, source, failure) from None
        except DigestListError as error:
            raise UserError(f"{where}: {SUMS} there is not understood: {error}; renew it: {RENEW}") from None
        for name in self.files:
            if name not in digests:
                raise UserError(f"{where}: {SUMS} there has no SHA-256 of {name}; renew it: {RENEW}")
        return digests

    def mirror_error(self, name: str, source: str, failure: storage.UnavailableError) -> UserError:
        where = f"data_source={source!r}"
        if isinstance(failure, storage.MissingError):
            return UserError(f"{where}: has no {name} ({failure}); it must hold {', '.join(self.files)}")
        if isinstance(failure, storage.AlteredError):
            return UserError(
                f"{where}: {name} is damaged or altered: {failure}; copy it again, or, if your data are meant to "
                f"differ, publish their digests beside them: {RENEW}"
            )
        return failure.to_user_error(f"{where}: cannot read {name}: {failure}; check the address and the server")


DIGITS_FILE = "digits.csv.gz"
DIGITS_FOR_TRAINING = 1_500
SKLEARN = importlib.util.find_spec("sklearn")  # found but not imported: the import takes over a second


def read_digits_file(folder: Path) -> Arrays:
    """Read scikit-learn's digits; return train images [N, 8, 8] and labels, then test ones. Scales 0..16 to 0..255."""
    try:
        rows = np.loadtxt(folder / DIGITS_FILE, delimiter=",", ndmin=2)  # 64 pixels and the label
        images = np.rint(rows[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise UserError(f"{DIGITS_FILE}: not a whole, gzipped table of 64 pixels and a label each ({error})") from error
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
UNSIGNED_BYTES = b"\x00\x00\x08"
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def read_idx_files(folder: Path) -> Arrays:
    """Read a data set's four gzipped IDX files; return train images [N, H, W] and labels [N], then the test ones.

    IDX ("THE IDX FILE FORMAT", LeCun, Cortes, Burges): two zero bytes, the type of the values (8: unsigned bytes), the
    number of dimensions, each dimension as a big-endian uint32, then the values in C order.
    """
    arrays = []
    for name in IDX_FILES:
        try:
            content = gzip.decompress((folder / name).read_bytes())
            kind, dimensions = struct.unpack_from(">3sB", content)
            shape = struct.unpack_from(f">{dimensions}I", content, 4)
            arrays.append(np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * dimensions).reshape(shape))
        except (OSError, EOFError, zlib.error, struct.error, ValueError) as error:
            raise UserError(f"{name}: not a whole, gzipped IDX file of unsigned bytes ({error})") from error
        if kind != UNSIGNED_BYTES:
            raise UserError(f"{name}: not an IDX file of unsigned bytes, it begins with {kind.hex()}")
    return arrays[0], arrays[1], arrays[2], arrays[3]


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
    read_arrays=read_idx_files,
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
    read_arrays=read_idx_files,
    system_folder="/usr/share/datasets/fashion-mnist",  # Debian's package dataset-fashion-mnist
)

CIFAR10_FILE = "cifar-10-python.tar.gz"
TRAIN_BATCHES, TEST_BATCH = tuple(f"data_batch_{number}" for number in range(1, 6)), "test_batch"

# Classes and functions that a pickled batch of arrays needs, by their names in NumPy 1 and in NumPy 2.
ALLOWED_GLOBALS = {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}
ALLOWED_GLOBALS |= {(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")}


class BatchUnpickler(pickle.Unpickler):
    """Unpickler for arrays, lists and text only. A mirror with its own digests could otherwise run code here."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED_GLOBALS:
            raise UserError(f"{CIFAR10_FILE}: asks for {module}.{name}, which a batch of images does not need; refused")
        return super().find_class(module, name)


def read_cifar10_archive(folder: Path) -> Arrays:
    images, labels = {}, {}
    try:
        with tarfile.open(folder / CIFAR10_FILE, "r:gz") as archive:
            for member in archive:
                name, content = member.name.rpartition("/")[2], archive.extractfile(member)
                if content is not None and name in (*TRAIN_BATCHES, TEST_BATCH):
                    batch = BatchUnpickler(content, encoding="latin1").load()
                    rows = np.asarray(batch["data"])  # of 1,024 red, green and blue values each
                    images[name] = rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
                    labels[name] = list(batch["labels"])
        train_images = np.concatenate([images[name] for name in TRAIN_BATCHES])
        train_labels = [label for name in TRAIN_BATCHES for label in labels[name]]
        return train_images, train_labels, images[TEST_BATCH], labels[TEST_BATCH]
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"{CIFAR10_FILE}: has no {error}") from error
    except Exception as error:  # damaged archives and pickles raise many types
        raise UserError(f"{CIFAR10_FILE}: not a whole archive of CIFAR-10 ({error})") from error


# 60,000 colour 32x32 images of ten kinds of things (Krizhevsky, "Learning Multiple Layers of Features").
CIFAR10 = PublishedSet(
    name="cifar10",
    files={CIFAR10_FILE: ("c58f30108f718f92721af3b95e74349a",)},
    addresses=("https://www.cs.toronto.edu/~kriz",),
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    read_arrays=read_cifar10_archive,
)

DATASETS: dict[str, PublishedSet] = {each.name: each for each in (DIGITS, MNIST, FASHION_MNIST, CIFAR10)}
