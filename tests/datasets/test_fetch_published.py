"""Published data sets: the table, FashionMNIST and CIFAR-10, mirrors, also on S3, and what can be wrong with them."""

import gzip
import hashlib
import os
import pickle
import socket
import subprocess
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from file_server import FileServer
from image_folders import write_files
from mnist_files import DEBIAN, NAMES, Tiny, assert_tiny, leftovers, rebuilt_fashion_mnist, sums, tiny_files
from s3_server import AT_ONCE, S3Server, s3_server
from surroundings import set_variables
from tars import header_of, tar_bytes
from traps import MakesFolder

from flyte_ddp import catalog
from flyte_ddp.datasets import DATASETS, fetch, fingerprint, open_arrays
from flyte_ddp.datasets.identity import content_identity
from flyte_ddp.datasets.published import CIFAR10, FASHION_MNIST, MNIST, TEST_BATCH, TRAIN_BATCHES
from flyte_ddp.datasets.published import CIFAR10_FILE as ARCHIVE
from flyte_ddp.errors import UserError

zipped = partial(gzip.compress, mtime=0)  # tests' names hold the bytes: the same in each worker


def test_the_tables_are_torchvisions() -> None:
    from torchvision import datasets

    assert tuple(DATASETS) == tuple(catalog.DATASETS)
    for ours, theirs in ((MNIST, datasets.MNIST), (FASHION_MNIST, datasets.FashionMNIST)):
        assert [(name, known[0]) for name, known in ours.files.items()] == theirs.resources
        assert [f"{address}/" for address in ours.addresses] == theirs.mirrors
        assert list(ours.classes) == theirs.classes
    assert CIFAR10.files == {datasets.CIFAR10.filename: (datasets.CIFAR10.tgz_md5,)}
    assert f"{CIFAR10.addresses[0]}/{datasets.CIFAR10.filename}" == datasets.CIFAR10.url


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.skipif(not DEBIAN.is_dir(), reason="needs Debian's package dataset-fashion-mnist")
def test_fashion_mnist_is_what_torchvision_reads(tmp_path: Path) -> None:
    """From the system's copy; the published digests are the real ones."""
    from torchvision.datasets import FashionMNIST

    ours = open_arrays(fetch("fashion_mnist", "", tmp_path / "system", progress="off"))
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    rebuilt = rebuilt_fashion_mnist()
    for name, known in FASHION_MNIST.files.items():  # Debian's are the published ones, compressed again
        published, debian = rebuilt[name], (DEBIAN / name).read_bytes()
        assert known == tuple(hashlib.md5(content).hexdigest() for content in (published, debian))
        assert gzip.decompress(published) == gzip.decompress(debian)
        (raw / name.removesuffix(".gz")).write_bytes(gzip.decompress(debian))
    train, test = FashionMNIST(str(tmp_path), train=True), FashionMNIST(str(tmp_path), train=False)
    arrays = tuple(part.numpy() for split in (train, test) for part in (split.data, split.targets))
    assert_tiny(tmp_path / "system", Tiny(FASHION_MNIST, arrays, {}))
    assert list(ours.classes) == train.classes


def test_a_directory_is_a_mirror(tiny: Tiny, tmp_path: Path) -> None:
    source = f"file://{tiny.write(tmp_path / 'the mirror')}".replace(" ", "%20")
    assert_tiny(fetch("mnist", source, tmp_path / "data", progress="off"), tiny)


@pytest.mark.usefixtures("tiny")
def test_a_missing_mirror_is_an_error_already_at_the_fingerprint() -> None:
    with socket.socket() as bound:  # bound and not listening: nobody else gets the port, and connections are refused
        bound.bind(("127.0.0.1", 0))
        for source, said in (
            (f"http://127.0.0.1:{bound.getsockname()[1]}", r"127\.0\.0\.1.*Connection refused.*check the address"),
            ("file:///no/such/folder", "no such directory"),
            (__file__, "no such"),
            ("ftp://host", "must"),
        ):
            with pytest.raises(UserError, match=said):
                fingerprint("mnist", source)


def test_a_mirror_may_publish_digests_of_data_of_its_own(tiny: Tiny, server: FileServer, tmp_path: Path) -> None:
    arrays, files = tiny_files(seed=1)
    server.files = {**files, "SHA256SUMS": sums(files)}
    assert_tiny(fetch("mnist", server.url, tmp_path / "data", progress="off"), Tiny(tiny.dataset, arrays, files))
    server.files |= {NAMES[0]: tiny.files[NAMES[0]]}
    with pytest.raises(UserError, match=r"damaged or altered: sha256 "):
        fetch("mnist", server.url, tmp_path / "other", progress="off")
    server.files["SHA256SUMS"] = sums({NAMES[0]: b""})
    with pytest.raises(UserError, match=f"no SHA-256 of {NAMES[1]}"):
        fingerprint("mnist", server.url)


def test_the_fingerprint_changes_exactly_with_the_mirrors_digests(tiny: Tiny, tmp_path: Path) -> None:
    mirror = tiny.write(tmp_path / "mirror")
    plain = fingerprint("mnist", str(mirror))
    assert plain == fingerprint("mnist", "")  # the published files, wherever they are
    listed = sums(tiny.files)
    (mirror / "SHA256SUMS").write_bytes(listed)
    own = fingerprint("mnist", str(mirror))
    backwards = b"\n".join(reversed(listed.replace(b"  ", b" *").splitlines()))
    (mirror / "SHA256SUMS").write_bytes(b"0" * 64 + b"  another-file\n" + backwards)
    assert fingerprint("mnist", str(mirror)) == own
    (mirror / "SHA256SUMS").write_bytes(sums({**tiny.files, NAMES[1]: b"other labels"}))
    assert fingerprint("mnist", str(mirror)) not in (own, plain)


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
    mirror = tiny.write(served.folder / variables / "sets" / "tiny")
    source = f"s3://{variables}/sets/tiny/"
    assert_tiny(fetch("mnist", source, tmp_path / "data", progress="off"), tiny)
    published = fingerprint("mnist", "")
    assert fingerprint("mnist", source) == published
    (mirror / "SHA256SUMS").write_bytes(sums(tiny.files))
    assert fingerprint("mnist", source) != published


def test_the_identity_of_a_prefix_changes_with_content_alone(served: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file of the same size and time too; a neighbour whose name begins alike is not part of it."""
    set_variables(served.aws_environment(), monkeypatch)
    inside = served.folder / "bucket" / "data" / "deeper"
    inside.mkdir(parents=True)
    (inside / "one").write_bytes(b"content")
    before, status = content_identity("s3://bucket/data"), (inside / "one").stat()
    (served.folder / "bucket" / "database").write_bytes(b"a neighbour")
    assert content_identity("s3://bucket/data") == content_identity("s3://bucket/data/") == before
    (inside / "one").write_bytes(b"CONTENT")
    os.utime(inside / "one", ns=(status.st_atime_ns, status.st_mtime_ns))
    changed = content_identity("s3://bucket/data")
    (inside / "two").write_bytes(b"")
    assert len({before, changed, content_identity("s3://bucket/data")}) == 3
    with pytest.raises(UserError, match="nothing there"):
        content_identity("s3://bucket/dat")


FOLDER = "cifar-10-batches-py"


def archive(**replaced: bytes | None) -> bytes:
    """A small archive; ``replaced`` gives batches other content, or leaves them out."""
    random = np.random.default_rng(0)
    members = {"readme.html": b"text", "batches.meta": pickle.dumps({"label_names": list("abcdefghij")}, 2)}
    for name in (*TRAIN_BATCHES, TEST_BATCH):
        data = random.integers(0, 256, (3, 3072), dtype=np.uint8)
        members[name] = pickle.dumps({"data": data, "labels": random.integers(0, 10, 3).tolist()}, 2)
    files = [(f"{FOLDER}/{name}", content) for name, content in {**members, **replaced}.items() if content is not None]
    return zipped(tar_bytes([(header_of(FOLDER, tarfile.DIRTYPE), b""), *files]))


def fetch_archive(folder: Path, content: bytes) -> Path:
    """Fetch from a mirror that has this archive."""
    mirror = write_files(folder / "mirror", {ARCHIVE: content, "SHA256SUMS": sums({ARCHIVE: content})})
    return fetch("cifar10", str(mirror), folder / "data", progress="off")


def test_it_is_read_as_torchvision_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import CIFAR10

    content = archive()
    ours = open_arrays(fetch_archive(tmp_path, content))
    (tmp_path / "torchvision").mkdir()
    subprocess.run(["tar", "--extract", "--gzip"], input=content, cwd=tmp_path / "torchvision", check=True)

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


def test_code_in_a_batch_is_not_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"mirror: .*asks for posix.mkdir.*refused"):
        fetch_archive(tmp_path, archive(data_batch_2=pickle.dumps(MakesFolder(tmp_path / "trap"))))
    assert leftovers(tmp_path) == ["mirror"]


ROW = b"0," * 64 + b"1\n"  # of the digits: 64 pixels and the label
FILE = {"mnist": NAMES[0], "digits": "digits.csv.gz", "cifar10": ARCHIVE}


@pytest.mark.parametrize(
    ("dataset", "content", "said"),
    [
        ("mnist", b"no gzip at all", "not a.*Not a gzipped file"),
        ("mnist", zipped(b"\x00\x00\x08\x03" + bytes(12) + b"x"), "not a.*cannot reshape array"),
        ("mnist", zipped(b"\x00\x00\x0d\x01\x00\x00\x00\x04text"), "not a.*IDX file of .* begins with 00000d"),
        ("mnist", zipped(b""), "not a.*requires a buffer of at least 4 bytes"),
        ("digits", zipped(ROW)[:-12], "not a whole, gzipped table"),
        ("digits", zipped(b"image,label\n"), "not a whole, gzipped table .*could not convert"),
        ("digits", zipped(ROW[2:] * 2), "not a whole, gzipped table .*cannot reshape"),
        ("digits", zipped(ROW), "test_images: must be .* at least one sample"),
        ("cifar10", archive(data_batch_4=None), "has no 'data_batch_4'"),
        ("cifar10", archive(test_batch=pickle.dumps({"data": []})), "has no 'labels'"),
        ("cifar10", archive()[:-400], "not a whole archive"),
        ("cifar10", b"no archive", "not a whole archive"),
    ],
)
def test_a_file_of_another_format_is_named(tiny: Tiny, tmp_path: Path, dataset: str, content: bytes, said: str) -> None:
    """Only a mirror with digests of its own can get so far."""
    files = (tiny.files if dataset == "mnist" else {}) | {FILE[dataset]: content}
    mirror = write_files(tmp_path / "mirror", files | {"SHA256SUMS": sums(files)})
    named = "" if said.startswith("test_images") else f"{FILE[dataset]}: "
    with pytest.raises(UserError, match=f"mirror.*: {named}{said}"):
        fetch(dataset, str(mirror), tmp_path / "data", progress="off")
    assert leftovers(tmp_path) == ["mirror"]
