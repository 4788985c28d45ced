"""Published data sets: the table, FashionMNIST and CIFAR-10, mirrors, also on S3, and what can be wrong with them."""

import gzip
import hashlib
import os
import pickle
import socket
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from image_folders import write_files
from mnist_files import Tiny, assert_tiny
from s3_server import AT_ONCE, S3Server, s3_server
from surroundings import set_variables
from tars import header_of, tar_bytes

from flyte_ddp import catalog
from flyte_ddp.core.errors import UserError
from flyte_ddp.datasets import DATASETS, fetch, fingerprint, open_arrays
from flyte_ddp.datasets.published import CIFAR10, CIFAR10_FILE, FASHION_MNIST, MNIST, TEST_BATCH, TRAIN_BATCHES
from flyte_ddp.storage.identity import hash_address_content


def test_the_tables_are_torchvisions() -> None:
    from torchvision import datasets

    assert tuple(DATASETS) == tuple(catalog.DATASETS)
    for ours, theirs in ((MNIST, datasets.MNIST), (FASHION_MNIST, datasets.FashionMNIST)):
        assert [(name, known[0]) for name, known in ours.files.items()] == theirs.resources
        assert [f"{address}/" for address in ours.addresses] == theirs.mirrors
        assert list(ours.classes) == theirs.classes
    assert CIFAR10.files == {datasets.CIFAR10.filename: (datasets.CIFAR10.tgz_md5,)}
    assert f"{CIFAR10.addresses[0]}/{datasets.CIFAR10.filename}" == datasets.CIFAR10.url


def test_a_directory_is_a_mirror(tiny: Tiny, tmp_path: Path) -> None:
    source = f"file://{tiny.write(tmp_path / 'the mirror')}".replace(" ", "%20")
    assert_tiny(fetch("mnist", source, tmp_path / "data", progress="off"), tiny)


@pytest.mark.usefixtures("tiny")
def test_a_missing_mirror_is_an_error(tmp_path: Path) -> None:
    with socket.socket() as bound:  # bound and not listening: nobody else gets the port, and connections are refused
        bound.bind(("127.0.0.1", 0))
        for source, said in (
            (f"http://127.0.0.1:{bound.getsockname()[1]}", r"127\.0\.0\.1.*Connection refused.*must be reachable"),
            ("file:///no/such/folder", "no such file"),
            ("ftp://host", "must"),
        ):
            with pytest.raises(UserError, match=said):
                fetch("mnist", source, tmp_path / "data", progress="off")


def test_an_unknown_name_lists_the_choices(tmp_path: Path) -> None:
    for call in (lambda: fingerprint("MNIST", ""), lambda: fetch("", "", tmp_path / "data")):
        with pytest.raises(UserError, match=r"unknown dataset.*cifar10, digits, fashion_mnist, image_folder:ADDRESS"):
            call()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3"), *AT_ONCE) as server:
        yield server


@pytest.mark.parametrize("variables", ["aws", "flyte"])
def test_a_prefix_is_a_mirror(variables: str, tiny: Tiny, served: S3Server, tmp_path: Path, monkeypatch) -> None:
    """By the standard variables, or by Flyte's beside standard ones that lead nowhere."""
    given = served.aws_environment()
    if variables == "flyte":
        elsewhere = {"AWS_ACCESS_KEY_ID": "of-something-else", "AWS_SECRET_ACCESS_KEY": "of-something-else"}
        given = served.flyte_environment() | elsewhere | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    set_variables(given, monkeypatch)
    tiny.write(served.folder / variables / "sets" / "tiny")
    source = f"s3://{variables}/sets/tiny/"
    assert_tiny(fetch("mnist", source, tmp_path / "data", progress="off"), tiny)
    assert fingerprint("mnist", source) == fingerprint("mnist", "")


def test_the_identity_of_a_prefix_changes_with_content_alone(served: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file of the same size and time too; a neighbour whose name begins alike is not part of it."""
    set_variables(served.aws_environment(), monkeypatch)
    inside = served.folder / "bucket" / "data" / "deeper"
    inside.mkdir(parents=True)
    (inside / "one").write_bytes(b"content")
    before, status = hash_address_content("s3://bucket/data"), (inside / "one").stat()
    (served.folder / "bucket" / "database").write_bytes(b"a neighbour")
    assert hash_address_content("s3://bucket/data") == hash_address_content("s3://bucket/data/") == before
    (inside / "one").write_bytes(b"CONTENT")
    os.utime(inside / "one", ns=(status.st_atime_ns, status.st_mtime_ns))
    changed = hash_address_content("s3://bucket/data")
    (inside / "two").write_bytes(b"")
    assert len({before, changed, hash_address_content("s3://bucket/data")}) == 3
    with pytest.raises(UserError, match="cannot be read: no such file"):
        hash_address_content("s3://bucket/dat")


FOLDER = "cifar-10-batches-py"


def archive() -> bytes:
    random = np.random.default_rng(0)
    members = {"readme.html": b"text", "batches.meta": pickle.dumps({"label_names": list("abcdefghij")}, 2)}
    for name in (*TRAIN_BATCHES, TEST_BATCH):
        data = random.integers(0, 256, (3, 3072), dtype=np.uint8)
        members[name] = pickle.dumps({"data": data, "labels": random.integers(0, 10, 3).tolist()}, 2)
    files = [(f"{FOLDER}/{name}", content) for name, content in members.items()]
    return gzip.compress(tar_bytes([(header_of(FOLDER, tarfile.DIRTYPE), b""), *files]))


def test_it_is_read_as_torchvision_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision import datasets

    content = archive()
    digests = {CIFAR10_FILE: hashlib.sha256(content).hexdigest()}
    published = replace(CIFAR10, files={CIFAR10_FILE: (hashlib.md5(content).hexdigest(),)}, sha256=digests)
    monkeypatch.setitem(DATASETS, "cifar10", published)
    mirror = write_files(tmp_path / "mirror", {CIFAR10_FILE: content})
    ours = open_arrays(fetch("cifar10", str(mirror), tmp_path / "data", progress="off"))
    (tmp_path / "torchvision").mkdir()
    subprocess.run(["tar", "--extract", "--gzip"], input=content, cwd=tmp_path / "torchvision", check=True)

    def with_md5(name: str) -> list[str]:
        return [name, hashlib.md5((tmp_path / "torchvision" / FOLDER / name).read_bytes()).hexdigest()]

    # The names stay torchvision's; only the digests that it insists on are those of this archive.
    monkeypatch.setattr(datasets.CIFAR10, "train_list", [with_md5(name) for name, _ in datasets.CIFAR10.train_list])
    monkeypatch.setattr(datasets.CIFAR10, "test_list", [with_md5(name) for name, _ in datasets.CIFAR10.test_list])
    monkeypatch.setattr(datasets.CIFAR10, "meta", {**datasets.CIFAR10.meta, "md5": with_md5("batches.meta")[1]})
    for part in ("train", "test"):
        theirs = datasets.CIFAR10(str(tmp_path / "torchvision"), train=part == "train")
        np.testing.assert_array_equal(getattr(ours, f"{part}_inputs"), theirs.data)
        np.testing.assert_array_equal(getattr(ours, f"{part}_targets"), theirs.targets)


def test_what_is_unpickled_has_the_right_sha256_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others can be made that have the same MD5."""
    content = archive()
    files = {CIFAR10_FILE: (hashlib.md5(content).hexdigest(),)}
    monkeypatch.setitem(DATASETS, "cifar10", replace(CIFAR10, files=files))
    mirror = write_files(tmp_path / "mirror", {CIFAR10_FILE: content})
    monkeypatch.setattr("pickle.load", None)
    with pytest.raises(UserError, match=rf"sha256 {hashlib.sha256(content).hexdigest()} instead of 6d958be07457"):
        fetch("cifar10", str(mirror), tmp_path / "data", progress="off")
