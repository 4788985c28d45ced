"""Published data sets: files with known digests, fetched from public addresses or from a team's mirror."""

import gzip
import importlib.util
import pickle
import shutil
import struct
import tarfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flyte_ddp import storage
from flyte_ddp.datasets.identity import digest_lines
from flyte_ddp.datasets.images import image_arrays
from flyte_ddp.datasets.sample_arrays import SampleArrays
from flyte_ddp.progress import Progress

Arrays = tuple[Any, Any, Any, Any]  # train images, train labels, test images, test labels


@dataclass(frozen=True)
class PublishedSet:
    """A published data set: its files with their digests, where to find them, and how to read them."""

    name: str
    read_arrays: Callable[..., Arrays]  # reads the verified files, in the order of ``files``
    files: Mapping[str, Sequence[str]]  # by name: allowed MD5 digests (hex), one for each compression in use
    addresses: Sequence[str]  # directories that hold the files, tried in order after ``system_folder``
    classes: Sequence[str]
    system_folder: str = ""  # where a system or Python package installs the files

    def fingerprint(self, source: str) -> str:
        """Return the set's name with a hash of its files' published digests, whatever the ``source``."""
        del source
        lines = (f"{name} {digests[0]}" for name, digests in self.files.items())
        return f"{self.name}-{digest_lines(lines)[:16]}"

    def load(self, source: str, workspace: Path, progress: Progress) -> tuple[SampleArrays, str]:
        raw = workspace / "raw"
        raw.mkdir()
        used = [self.download_file(name, source, raw, progress) for name in self.files]
        read = self.read_arrays(*(raw / name for name in self.files))
        arrays = image_arrays(*read, classes=self.classes, name=self.name)
        shutil.rmtree(raw)
        return arrays, " and ".join(dict.fromkeys(used))

    def download_file(self, name: str, source: str, folder: Path, progress: Progress) -> str:
        """Download a file from ``source``, else a system copy or public addresses; verify it; return where it was."""
        system = [self.system_folder] if self.system_folder and Path(self.system_folder).is_dir() else []
        addresses = [storage.join(place, name) for place in ([source] if source else [*system, *self.addresses])]
        try:
            with (folder / name).open("wb") as file:

                def download_from(address: str) -> str:
                    storage.download_file(address, file, digests=self.files[name], kind="md5", progress=progress)
                    return storage.parent(address)

                return storage.retry(addresses, download_from, progress.print_note)
        except storage.UnavailableError as failure:
            what = f"data_source={source!r}: cannot get {name}" if source else f"{self.name}: cannot get {name}"
            fix = "check the network, or set data_source to a directory or mirror that holds it"
            if source:
                fix = f"it must be reachable, and hold the published {', '.join(self.files)}"
            raise failure.to_user_error(f"{what} ({failure}); {fix}") from None


DIGITS_FOR_TRAINING = 1_500


def read_digits_file(file: Path) -> Arrays:
    rows = np.loadtxt(file, delimiter=",", ndmin=2)  # 64 pixels and the label
    images = np.rint(rows[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8)
    labels, first_test = rows[:, -1].astype(np.int64), DIGITS_FOR_TRAINING
    return images[:first_test], labels[:first_test], images[first_test:], labels[first_test:]


def read_idx_files(*files: Path) -> Arrays:
    """Read a data set's four gzipped IDX files; return train images [N, H, W] and labels [N], then the test ones.

    IDX ("THE IDX FILE FORMAT", LeCun, Cortes, Burges): two zero bytes, the type of the values (8: unsigned bytes), the
    number of dimensions, each dimension as a big-endian uint32, then the values in C order.
    """
    arrays = []
    for file in files:
        content = gzip.decompress(file.read_bytes())
        shape = struct.unpack_from(f">{content[3]}I", content, 4)
        arrays.append(np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * len(shape)).reshape(shape))
    return arrays[0], arrays[1], arrays[2], arrays[3]


TRAIN_BATCHES, TEST_BATCH = tuple(f"data_batch_{number}" for number in range(1, 6)), "test_batch"


def read_cifar10_archive(file: Path) -> Arrays:
    images, labels = {}, {}
    with tarfile.open(file, "r:gz") as archive:
        for member in archive:
            name, content = member.name.rpartition("/")[2], archive.extractfile(member)
            if content is not None and name in (*TRAIN_BATCHES, TEST_BATCH):
                batch = pickle.load(content, encoding="latin1")  # of a file whose digest is the published one
                rows = np.asarray(batch["data"])  # of 1,024 red, green and blue values each
                images[name] = rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
                labels[name] = list(batch["labels"])
    train_images = np.concatenate([images[name] for name in TRAIN_BATCHES])
    train_labels = [label for name in TRAIN_BATCHES for label in labels[name]]
    return train_images, train_labels, images[TEST_BATCH], labels[TEST_BATCH]


READERS = {"digits": read_digits_file, "cifar10": read_cifar10_archive}
SKLEARN = importlib.util.find_spec("sklearn")  # found but not imported: the import takes over a second


def read_published_sets() -> dict[str, PublishedSet]:
    described = tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))
    if SKLEARN and SKLEARN.origin:
        described["digits"]["system_folder"] = str(Path(SKLEARN.origin).parent / "datasets/data")
    return {name: PublishedSet(name, READERS.get(name, read_idx_files), **each) for name, each in described.items()}


DATASETS = read_published_sets()
