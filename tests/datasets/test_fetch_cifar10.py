"""CIFAR-10's archive: the same format, made here, read by torchvision and by us."""

import gzip
import hashlib
import io
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_folders import write_files
from mnist_files import leftovers, sums
from tars import header_of, tar_bytes

from flyte_ddp.datasets import fetch, open_arrays
from flyte_ddp.datasets.published import CIFAR10_FILE as ARCHIVE
from flyte_ddp.datasets.published import TEST_BATCH, TRAIN_BATCHES
from flyte_ddp.errors import UserError

FOLDER = "cifar-10-batches-py"


def archive(**replaced: bytes | None) -> bytes:
    """A small archive; ``replaced`` gives batches other content, or leaves them out."""
    random = np.random.default_rng(0)
    members = {"readme.html": b"text", "batches.meta": pickle.dumps({"label_names": list("abcdefghij")}, 2)}
    for name in (*TRAIN_BATCHES, TEST_BATCH):
        data = random.integers(0, 256, (3, 3072), dtype=np.uint8)
        members[name] = pickle.dumps({"data": data, "labels": random.integers(0, 10, 3).tolist()}, 2)
    files = [(f"{FOLDER}/{name}", content) for name, content in {**members, **replaced}.items() if content is not None]
    return gzip.compress(tar_bytes([(header_of(FOLDER, tarfile.DIRTYPE), b""), *files]))


def fetch_archive(folder: Path, content: bytes) -> Path:
    """Fetch from a mirror that has this archive."""
    mirror = write_files(folder / "mirror", {ARCHIVE: content, "SHA256SUMS": sums({ARCHIVE: content})})
    return fetch("cifar10", str(mirror), folder / "data", progress="off")


def test_it_is_read_as_torchvision_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import CIFAR10

    content = archive()
    ours = open_arrays(fetch_archive(tmp_path, content))
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        tar.extractall(tmp_path / "torchvision", filter="data")

    def with_md5(name: str) -> list[str]:
        return [name, hashlib.md5((tmp_path / "torchvision" / FOLDER / name).read_bytes()).hexdigest()]

    # The names stay torchvision's; only the digests that it insists on are those of this archive.
    monkeypatch.setattr(CIFAR10, "train_list", [with_md5(name) for name, _ in CIFAR10.train_list])
    monkeypatch.setattr(CIFAR10, "test_list", [with_md5(name) for name, _ in CIFAR10.test_list])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": with_md5("batches.meta")[1]})
    for part in ("train", "test"):
        theirs = CIFAR10(str(tmp_path / "torchvision"), train=part == "train")
        np.testing.assert_array_equal(getattr(ours, f"{part}_images"), theirs.data)
        np.testing.assert_array_equal(getattr(ours, f"{part}_labels"), theirs.targets)


class MakesFolder:
    """Pickles to a call that leaves a folder behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_code_in_a_batch_is_not_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"mirror: .*asks for posix.mkdir.*refused"):
        fetch_archive(tmp_path, archive(data_batch_2=pickle.dumps(MakesFolder(tmp_path / "trap"))))
    assert leftovers(tmp_path) == ["mirror"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (archive(data_batch_4=None), "has no 'data_batch_4'"),
        (archive(test_batch=pickle.dumps({"data": []})), "has no 'labels'"),
        (archive(test_batch=b"no pickle"), "not a whole archive"),
        (archive()[:-400], "not a whole archive"),
        (b"no archive", "not a whole archive"),
    ],
)
def test_a_file_of_another_format_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(UserError, match=f"{ARCHIVE}: {said}"):
        fetch_archive(tmp_path, content)
    assert leftovers(tmp_path) == ["mirror"]
