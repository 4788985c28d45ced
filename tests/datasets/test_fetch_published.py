"""Published data sets: the table, FashionMNIST itself, and every way in which a source can be bad."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from file_server import FileServer
from mnist_files import DEBIAN, NAMES, Tiny, assert_tiny, leftovers, sums, tiny_files

from flyte_ddp import catalog
from flyte_ddp.datasets import DATASETS, fetch, fingerprint, open_arrays
from flyte_ddp.datasets.published_sets import CIFAR10, FASHION_MNIST, MNIST
from flyte_ddp.errors import UserError


def test_every_name_of_the_catalogue_is_in_the_table() -> None:
    assert tuple(DATASETS) == tuple(catalog.DATASETS)


def test_the_tables_are_torchvisions() -> None:
    from torchvision import datasets

    for ours, theirs in ((MNIST, datasets.MNIST), (FASHION_MNIST, datasets.FashionMNIST)):
        assert [(file.name, file.md5) for file in ours.files] == theirs.resources
        assert [f"{address}/" for address in ours.addresses] == theirs.mirrors
        assert list(ours.classes) == theirs.classes
    assert [(file.name, file.md5) for file in CIFAR10.files] == [(datasets.CIFAR10.filename, datasets.CIFAR10.tgz_md5)]
    assert f"{CIFAR10.addresses[0]}/{CIFAR10.files[0].name}" == datasets.CIFAR10.url


@pytest.mark.slow
def test_debians_files_are_the_published_ones_compressed_again(published_fashion: dict[str, bytes]) -> None:
    for file in FASHION_MNIST.files:
        published, debian = published_fashion[file.name], (DEBIAN / file.name).read_bytes()
        assert hashlib.md5(published).hexdigest() == file.md5
        assert (hashlib.md5(debian).hexdigest(),) == file.repacked
        assert gzip.decompress(published) == gzip.decompress(debian)


@pytest.mark.slow
def test_fashion_mnist_from_the_system_copy_is_what_torchvision_reads(tmp_path: Path) -> None:
    if not DEBIAN.is_dir():
        pytest.skip("needs Debian's package dataset-fashion-mnist")
    import torch
    from torchvision.datasets import FashionMNIST

    ours = open_arrays(fetch("fashion_mnist", "", tmp_path / "data", progress="off"))
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for path in DEBIAN.iterdir():
        (raw / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    train, test = FashionMNIST(str(tmp_path), train=True), FashionMNIST(str(tmp_path), train=False)

    np.testing.assert_array_equal(ours.train_images[..., 0], train.data.numpy())
    np.testing.assert_array_equal(ours.train_labels, train.targets.numpy())
    np.testing.assert_array_equal(ours.test_images[..., 0], test.data.numpy())
    np.testing.assert_array_equal(ours.test_labels, test.targets.numpy())
    assert list(ours.classes) == train.classes
    scaled = train.data.to(torch.float64) / 255
    assert ours.mean[0] == pytest.approx(scaled.mean().item(), rel=1e-12)
    # In two passes: torch's own std takes one, and is off by 1e-10 here.
    assert ours.std[0] == pytest.approx((scaled - scaled.mean()).square().mean().sqrt().item(), rel=1e-12)


@pytest.mark.slow
def test_fashion_mnist_from_its_public_address(
    tmp_path: Path, server: FileServer, published_fashion: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The published digests are the real ones; only the address is on loopback."""
    dataset = dataclasses.replace(FASHION_MNIST, addresses=(server.url,), system_folder="/no/such/folder")
    monkeypatch.setitem(DATASETS, "fashion_mnist", dataset)
    server.files = published_fashion
    downloaded = fetch("fashion_mnist", "", tmp_path / "downloaded", progress="off")
    from_system = fetch("fashion_mnist", str(DEBIAN), tmp_path / "system", progress="off")
    assert open_arrays(downloaded).digest == open_arrays(from_system).digest
    assert json.loads((downloaded / "dataset.json").read_text())["source"] == server.url
    assert leftovers(tmp_path) == ["downloaded", "system"]
    assert leftovers(downloaded) == sorted(
        ["dataset.json", "test_images.npy", "test_labels.npy", "train_images.npy", "train_labels.npy"]
    )


@pytest.mark.parametrize("form", ["{}", "{}/", "file://{}"])
def test_a_directory_is_a_mirror(tiny: Tiny, tmp_path: Path, form: str) -> None:
    source = form.format(tiny.write(tmp_path / "the mirror")).replace(" ", "%20" if "://" in form else " ")
    assert_tiny(fetch("mnist", source, tmp_path / "data", progress="off"), tiny)


@pytest.mark.parametrize("source", ["no/such/folder", "file:///no/such/folder", __file__])
def test_a_missing_directory_is_an_error_already_at_the_fingerprint(source: str) -> None:
    with pytest.raises(UserError, match="no such directory"):
        fingerprint("mnist", source)


@pytest.mark.parametrize("source", ["abfs://bucket/data", "ftp://host/data", "s3://", "http://", "s3:///key"])
def test_an_address_of_another_kind_is_refused(source: str) -> None:
    with pytest.raises(UserError, match="must"):
        fingerprint("mnist", source)


def test_a_mirror_may_publish_digests_of_data_of_its_own(tiny: Tiny, server: FileServer, tmp_path: Path) -> None:
    arrays, files = tiny_files(seed=1)
    server.files = {**files, "SHA256SUMS": sums(files)}
    assert_tiny(fetch("mnist", server.url, tmp_path / "data", progress="off"), Tiny(tiny.dataset, arrays, files))


def test_a_file_that_differs_from_its_mirrors_digest_is_an_error(tiny: Tiny, tmp_path: Path) -> None:
    mirror = tiny.write(tmp_path / "mirror")
    (mirror / "SHA256SUMS").write_bytes(sums(tiny_files(seed=1)[1]))
    with pytest.raises(
        UserError, match=r"damaged or altered: sha256 .*if your data are meant to differ, .*sha256sum \* > SHA256SUMS"
    ):
        fetch("mnist", str(mirror), tmp_path / "data", progress="off")


def test_digests_that_leave_a_file_out_are_an_error(tiny: Tiny, tmp_path: Path) -> None:
    mirror = tiny.write(tmp_path / "mirror")
    (mirror / "SHA256SUMS").write_bytes(sums({NAMES[0]: b""}))
    with pytest.raises(UserError, match=f"no SHA-256 of {NAMES[1]}"):
        fingerprint("mnist", str(mirror))


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


def test_labels_without_a_class_are_named(tiny: Tiny, tmp_path: Path) -> None:
    files = {**tiny.files, NAMES[1]: gzip.compress(b"\x00\x00\x08\x01\x00\x00\x00\x28" + bytes(39) + b"\x0a", mtime=0)}
    mirror = Tiny(tiny.dataset, tiny.arrays, {**files, "SHA256SUMS": sums(files)}).write(tmp_path / "mirror")
    with pytest.raises(UserError, match=r"mirror: train_labels: label 10 of sample 39"):
        fetch("mnist", str(mirror), tmp_path / "data", progress="off")


def test_a_missing_file_is_named_with_all_that_a_mirror_holds(tiny: Tiny, tmp_path: Path) -> None:
    mirror = tiny.write(tmp_path / "mirror")
    (mirror / NAMES[2]).unlink()
    with pytest.raises(UserError, match=f"has no {NAMES[2]} .*must hold {', '.join(NAMES)}"):
        fetch("mnist", str(mirror), tmp_path / "data", progress="off")


@pytest.mark.parametrize("dataset", ["minst", "", "MNIST"])
def test_an_unknown_name_lists_the_choices(dataset: str, tmp_path: Path) -> None:
    for call in (lambda: fingerprint(dataset, ""), lambda: fetch(dataset, "", tmp_path / "data")):
        with pytest.raises(
            UserError, match=r"unknown dataset.*cifar10, digits, fashion_mnist, image_folder:ADDRESS, mnist"
        ):
            call()
