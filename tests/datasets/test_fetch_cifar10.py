"""CIFAR-10's archive: the same format, made here, read by torchvision and by us."""

import hashlib
import io
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mnist_files import leftovers, sums

from flyte_ddp.datasets import fetch, open_arrays
from flyte_ddp.datasets.published import CIFAR10_FILE as ARCHIVE
from flyte_ddp.errors import UserError

FOLDER = "cifar-10-batches-py"


def archive(**replaced: bytes | None) -> bytes:
    """A small archive; ``replaced`` gives batches other content, or leaves them out."""
    random = np.random.default_rng(0)
    members = {"readme.html": b"text", "batches.meta": pickle.dumps({"label_names": list("abcdefghij")}, 2)}
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        data = random.integers(0, 256, (3, 3072), dtype=np.uint8)
        members[name] = pickle.dumps({"data": data, "labels": random.integers(0, 10, 3).tolist()}, 2)
    members.update({name: content for name, content in replaced.items() if content is not None})
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as tar:
        directory = tarfile.TarInfo(FOLDER)
        directory.type = tarfile.DIRTYPE
        tar.addfile(directory)
        for name, content in members.items():
            if name in replaced and replaced[name] is None:
                continue
            entry = tarfile.TarInfo(f"{FOLDER}/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return written.getvalue()


def mirror(folder: Path, content: bytes) -> str:
    folder.mkdir()
    (folder / ARCHIVE).write_bytes(content)
    (folder / "SHA256SUMS").write_bytes(sums({ARCHIVE: content}))
    return str(folder)


def test_it_is_read_as_torchvision_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import CIFAR10

    content = archive()
    ours = open_arrays(fetch("cifar10", mirror(tmp_path / "mirror", content), tmp_path / "data", progress="off"))
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        tar.extractall(tmp_path / "torchvision", filter="data")
    extracted = tmp_path / "torchvision" / FOLDER

    def md5(name: str) -> str:
        return hashlib.md5((extracted / name).read_bytes()).hexdigest()

    # The names stay torchvision's; only the digests that it insists on are those of this archive.
    monkeypatch.setattr(CIFAR10, "train_list", [[name, md5(name)] for name, _ in CIFAR10.train_list])
    monkeypatch.setattr(CIFAR10, "test_list", [[name, md5(name)] for name, _ in CIFAR10.test_list])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": md5("batches.meta")})
    for train, images, labels in (
        (True, ours.train_images, ours.train_labels),
        (False, ours.test_images, ours.test_labels),
    ):
        theirs = CIFAR10(str(tmp_path / "torchvision"), train=train)
        np.testing.assert_array_equal(images, theirs.data)
        np.testing.assert_array_equal(labels, theirs.targets)


class Touch:
    """Pickles to a call that leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_code_in_a_batch_is_not_run(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    source = mirror(tmp_path / "mirror", archive(data_batch_2=pickle.dumps(Touch(trap))))
    with pytest.raises(UserError, match=r"mirror: .*asks for posix.mkdir.*refused"):
        fetch("cifar10", source, tmp_path / "data", progress="off")
    assert not trap.exists()


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
        fetch("cifar10", mirror(tmp_path / "mirror", content), tmp_path / "data", progress="off")
    assert leftovers(tmp_path) == ["mirror"]
