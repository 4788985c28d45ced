"""Mirrors on S3, against a real server."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from mnist_files import Tiny, sums
from s3_server import S3Server, s3_server

from flyte_ddp.datasets import fetch, fingerprint, open_arrays
from flyte_ddp.datasets.identity import content_identity
from flyte_ddp.errors import UserError


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.mark.parametrize("variables", ["aws", "flyte"])
def test_a_prefix_is_a_mirror(
    variables: str, tiny: Tiny, served: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the standard variables, or by Flyte's beside standard ones that lead nowhere."""
    given = served.aws_environment()
    if variables == "flyte":
        elsewhere = {"AWS_ACCESS_KEY_ID": "of-something-else", "AWS_SECRET_ACCESS_KEY": "of-something-else"}
        given = served.flyte_environment() | elsewhere | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    mirror = tiny.write(served.folder / variables / "sets" / "tiny")
    source = f"s3://{variables}/sets/tiny/"
    folder = fetch("mnist", source, tmp_path / "data", progress="off")
    np.testing.assert_array_equal(open_arrays(folder).train_images[..., 0], tiny.arrays[0])
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
