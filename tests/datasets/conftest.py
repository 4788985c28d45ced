"""Files in MNIST's format, servers that fail on purpose, and a short temper in place of long retries."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from faulty_server import FaultyServer, faulty_server

from flyte_ddp.datasets import DATASETS, download
from flyte_ddp.datasets.mnist import MNIST
from flyte_ddp.datasets.published import PublishedFile, PublishedSet

NAMES = tuple(file.name for file in MNIST.files)
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
# Times in the gzip headers of the published FashionMNIST files, which Debian's copies leave out.
PUBLISHED_TIMES = {"train": 1504176606, "t10k": 1504176627}


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy and no credentials of the machine's own, and pauses that nobody waits for."""
    for name in tuple(os.environ):
        if name.startswith(("AWS_", "FLYTE_AWS_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(download, "FIRST_DELAY", 0.001)


@pytest.fixture(scope="session")
def published_fashion() -> dict[str, bytes]:
    """The published FashionMNIST files, rebuilt from Debian's: the compressed data are the same bytes."""
    if not DEBIAN.is_dir():
        pytest.skip("needs Debian's package dataset-fashion-mnist")
    rebuilt = {}
    for path in sorted(DEBIAN.iterdir()):
        content = path.read_bytes()
        stem, _, part = path.name.removesuffix(".gz").partition("-")
        header = b"\x1f\x8b\x08\x08" + struct.pack("<I", PUBLISHED_TIMES[stem]) + b"\x00\x03"
        rebuilt[path.name] = header + f"{stem}-{part}".encode() + b"\0" + content[10:]
    return rebuilt


def idx_bytes(array: NDArray[np.uint8]) -> bytes:
    """An uncompressed IDX file."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A small data set in MNIST's format, its files in a folder, and its entry in the table, called mnist."""

    dataset: PublishedSet
    arrays: tuple[NDArray[np.uint8], ...]
    files: dict[str, bytes]

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        return folder


def tiny_files(seed: int) -> tuple[tuple[NDArray[np.uint8], ...], dict[str, bytes]]:
    random = np.random.default_rng(seed)
    arrays = (
        random.integers(0, 256, (40, 5, 7), dtype=np.uint8),
        random.integers(0, 10, 40, dtype=np.uint8),
        random.integers(0, 256, (12, 5, 7), dtype=np.uint8),
        random.integers(0, 10, 12, dtype=np.uint8),
    )
    contents = (gzip.compress(idx_bytes(array), mtime=0) for array in arrays)
    return arrays, dict(zip(NAMES, contents, strict=True))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """Published under the name mnist, with no public address."""
    arrays, contents = tiny_files(0)
    files = tuple(PublishedFile(name, hashlib.md5(content).hexdigest()) for name, content in contents.items())
    dataset = dataclasses.replace(MNIST, files=files, addresses=())
    monkeypatch.setitem(DATASETS, "mnist", dataset)
    return Tiny(dataset, arrays, contents)


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with faulty_server() as running:
        yield running


def sums(files: dict[str, bytes]) -> bytes:
    """What ``sha256sum *`` prints."""
    return "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in files.items()).encode()


def leftovers(folder: Path) -> list[str]:
    """Everything in a folder, hidden files too."""
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []
