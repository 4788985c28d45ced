"""Published data sets: the table, FashionMNIST itself, mirrors, also on S3, and all that can be wrong with a source."""

import gzip
import hashlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from file_server import FileServer
from image_folders import write_files
from mnist_files import DEBIAN, NAMES, Tiny, assert_tiny, leftovers, rebuilt_fashion_mnist, sums, tiny_files
from s3_server import S3Server, s3_server

from flyte_ddp import catalog
from flyte_ddp.datasets import DATASETS, fetch, fingerprint, open_arrays
from flyte_ddp.datasets.identity import content_identity
from flyte_ddp.datasets.published import CIFAR10, FASHION_MNIST, MNIST
from flyte_ddp.errors import UserError


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


ROW = b"0," * 64 + b"1\n"  # of the digits: 64 pixels and the label
NO_IDX, NO_TABLE = f"{NAMES[0]}: not an? .*", "digits.csv.gz: not a whole, gzipped table"


@pytest.mark.parametrize(
    ("dataset", "content", "said"),
    [
        ("mnist", b"no gzip at all", f"{NO_IDX}Not a gzipped file"),
        ("mnist", gzip.compress(b"\x00\x00\x08\x03" + bytes(12) + b"x"), f"{NO_IDX}cannot reshape array"),
        ("mnist", gzip.compress(b"\x00\x00\x0d\x01\x00\x00\x00\x04text"), f"{NO_IDX}IDX file of .* begins with 00000d"),
        ("mnist", gzip.compress(b""), f"{NO_IDX}requires a buffer of at least 4 bytes"),
        ("digits", b"no gzip at all", f"{NO_TABLE} .*Not a gzipped file"),
        ("digits", gzip.compress(ROW)[:-12], NO_TABLE),
        ("digits", gzip.compress(b"image,label\n"), f"{NO_TABLE} .*could not convert"),
        ("digits", gzip.compress(ROW[2:] * 2), f"{NO_TABLE} .*cannot reshape"),
        ("digits", gzip.compress(ROW), "test_images: must be .* at least one sample"),
    ],
)
def test_a_file_of_another_format_is_named(tiny: Tiny, tmp_path: Path, dataset: str, content: bytes, said: str) -> None:
    """Only a mirror with digests of its own can get so far."""
    files = tiny.files | {NAMES[0]: content} if dataset == "mnist" else {"digits.csv.gz": content}
    mirror = write_files(tmp_path / "mirror", files | {"SHA256SUMS": sums(files)})
    with pytest.raises(UserError, match=f"mirror.*: {said}"):
        fetch(dataset, str(mirror), tmp_path / "data", progress="off")
    assert leftovers(tmp_path) == ["mirror"]


def test_an_unknown_name_lists_the_choices(tmp_path: Path) -> None:
    for call in (lambda: fingerprint("MNIST", ""), lambda: fetch("", "", tmp_path / "data")):
        with pytest.raises(UserError, match=r"unknown dataset.*cifar10, digits, fashion_mnist, image_folder:ADDRESS"):
            call()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.mark.parametrize("variables", ["aws", "flyte"])
def test_a_prefix_is_a_mirror(variables: str, tiny: Tiny, served: S3Server, tmp_path: Path, monkeypatch) -> None:
    """By the standard variables, or by Flyte's beside standard ones that lead nowhere."""
    given = served.aws_environment()
    if variables == "flyte":
        elsewhere = {"AWS_ACCESS_KEY_ID": "of-something-else", "AWS_SECRET_ACCESS_KEY": "of-something-else"}
        given = served.flyte_environment() | elsewhere | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    mirror = tiny.write(served.folder / variables / "sets" / "tiny")
    source = f"s3://{variables}/sets/tiny/"
    assert_tiny(fetch("mnist", source, tmp_path / "data", progress="off"), tiny)
    published = fingerprint("mnist", "")
    assert fingerprint("mnist", source) == published
    (mirror / "SHA256SUMS").write_bytes(sums(tiny.files))
    assert fingerprint("mnist", source) != published


def test_the_identity_of_a_prefix_changes_with_content_alone(served: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file of the same size and time too; a neighbour whose name begins alike is not part of it."""
    for name, value in served.aws_environment().items():
        monkeypatch.setenv(name, value)
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
