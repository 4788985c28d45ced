"""Published data sets: the table, FashionMNIST itself, and every way in which a source can be bad."""

import dataclasses
import gzip
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from file_server import FileServer
from mnist_files import DEBIAN, NAMES, Tiny, assert_tiny, leftovers, rebuilt_fashion_mnist, sums, tiny_files

from flyte_ddp import catalog
from flyte_ddp.datasets import DATASETS, fetch, fingerprint, open_arrays
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
def test_fashion_mnist_is_what_torchvision_reads_from_the_system_copy_and_from_its_public_address(
    tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The published digests are the real ones; only the public address is on loopback."""
    from torchvision.datasets import FashionMNIST

    ours = open_arrays(fetch("fashion_mnist", "", tmp_path / "system", progress="off"))
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    server.files = rebuilt_fashion_mnist()
    for name, known in FASHION_MNIST.files.items():  # Debian's are the published ones, compressed again
        published, debian = server.files[name], (DEBIAN / name).read_bytes()
        assert known == tuple(hashlib.md5(content).hexdigest() for content in (published, debian))
        assert gzip.decompress(published) == gzip.decompress(debian)
        (raw / name.removesuffix(".gz")).write_bytes(gzip.decompress(debian))
    train, test = FashionMNIST(str(tmp_path), train=True), FashionMNIST(str(tmp_path), train=False)
    np.testing.assert_array_equal(ours.train_images[..., 0], train.data.numpy())
    np.testing.assert_array_equal(ours.train_labels, train.targets.numpy())
    np.testing.assert_array_equal(ours.test_images[..., 0], test.data.numpy())
    np.testing.assert_array_equal(ours.test_labels, test.targets.numpy())
    assert list(ours.classes) == train.classes
    assert ours.mean[0] == pytest.approx(train.data.double().mean().item() / 255, rel=1e-12)

    dataset = dataclasses.replace(FASHION_MNIST, addresses=(server.url,), system_folder="/no/such/folder")
    monkeypatch.setitem(DATASETS, "fashion_mnist", dataset)
    downloaded = fetch("fashion_mnist", "", tmp_path / "downloaded", progress="off")
    assert open_arrays(downloaded).digest == ours.digest
    assert json.loads((downloaded / "dataset.json").read_text())["source"] == server.url
    assert leftovers(tmp_path) == ["FashionMNIST", "downloaded", "system"]


def test_a_directory_is_a_mirror(tiny: Tiny, tmp_path: Path) -> None:
    source = f"file://{tiny.write(tmp_path / 'the mirror')}".replace(" ", "%20")
    assert_tiny(fetch("mnist", source, tmp_path / "data", progress="off"), tiny)


@pytest.mark.parametrize(
    ("source", "said"), [("file:///no/such/folder", "no such directory"), (__file__, "no such"), ("ftp://host", "must")]
)
def test_a_missing_directory_is_an_error_already_at_the_fingerprint(source: str, said: str) -> None:
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


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"no gzip at all", "Not a gzipped file"),
        (gzip.compress(b"\x00\x00\x08\x03" + bytes(12) + b"x", mtime=0), "cannot reshape array"),
        (gzip.compress(b"\x00\x00\x0d\x01\x00\x00\x00\x04text", mtime=0), "IDX file of .* begins with 00000d"),
        (gzip.compress(b"", mtime=0), "requires a buffer of at least 4 bytes"),
    ],
)
def test_a_file_of_another_format_is_named(tiny: Tiny, tmp_path: Path, content: bytes, said: str) -> None:
    """Only a mirror with digests of its own can get so far."""
    files = {**tiny.files, NAMES[0]: content}
    mirror = Tiny(tiny.dataset, tiny.arrays, {**files, "SHA256SUMS": sums(files)}).write(tmp_path / "mirror")
    with pytest.raises(UserError, match=f"{NAMES[0]}: not an? .*{said}"):
        fetch("mnist", str(mirror), tmp_path / "data", progress="off")
    assert leftovers(tmp_path) == ["mirror"]


ROW = b"0," * 64 + b"1\n"  # 64 pixels and the label


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"no gzip at all", "digits.csv.gz: not a whole, gzipped table .*Not a gzipped file"),
        (gzip.compress(ROW, mtime=0)[:-12], "digits.csv.gz: not a whole, gzipped table"),
        (gzip.compress(b"image,label\n", mtime=0), "digits.csv.gz: not a whole, gzipped table .*could not convert"),
        (gzip.compress(ROW[2:] * 2, mtime=0), "digits.csv.gz: not a whole, gzipped table .*cannot reshape"),
        (gzip.compress(ROW, mtime=0), "test_images: must be .* at least one sample"),
    ],
)
def test_digits_of_another_format_are_named(tmp_path: Path, content: bytes, said: str) -> None:
    """As above, of the set whose file is a table."""
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    files = {"digits.csv.gz": content}
    for name, stored in {**files, "SHA256SUMS": sums(files)}.items():
        (mirror / name).write_bytes(stored)
    with pytest.raises(UserError, match=f"mirror: {said}"):
        fetch("digits", str(mirror), tmp_path / "data", progress="off")
    assert leftovers(tmp_path) == ["mirror"]


def test_an_unknown_name_lists_the_choices(tmp_path: Path) -> None:
    for call in (lambda: fingerprint("MNIST", ""), lambda: fetch("", "", tmp_path / "data")):
        with pytest.raises(UserError, match=r"unknown dataset.*cifar10, digits, fashion_mnist, image_folder:ADDRESS"):
            call()
