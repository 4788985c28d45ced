"""Mirrors on S3, against a real server."""

import hashlib
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


@pytest.fixture
def bucket(served: S3Server, tmp_path: Path) -> Path:
    """A bucket of the test's own."""
    name = f"bucket-{hashlib.sha256(str(tmp_path).encode()).hexdigest()[:12]}"
    folder = served.folder / name
    folder.mkdir()
    return folder


@pytest.fixture(params=["aws", "flyte"])
def s3_variables(request: pytest.FixtureRequest, served: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The standard variables, or Flyte's beside standard ones that lead nowhere."""
    if request.param == "flyte":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a-key-of-something-else")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-something-else")
    variables = served.flyte_environment() if request.param == "flyte" else served.aws_environment()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("s3_variables")
def test_a_prefix_is_a_mirror(tiny: Tiny, bucket: Path, tmp_path: Path) -> None:
    tiny.write(bucket / "sets" / "tiny")
    source = f"s3://{bucket.name}/sets/tiny/"
    folder = fetch("mnist", source, tmp_path / "data", progress="off")
    np.testing.assert_array_equal(open_arrays(folder).train_images[..., 0], tiny.arrays[0])
    published = fingerprint("mnist", "")
    assert fingerprint("mnist", source) == published
    (bucket / "sets/tiny/SHA256SUMS").write_bytes(sums(tiny.files))
    assert fingerprint("mnist", source) != published


def test_the_identity_of_a_prefix_changes_with_content_alone(
    served: S3Server, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file of the same size and time too; a neighbour whose name begins alike is not part of it."""
    for name, value in served.aws_environment().items():
        monkeypatch.setenv(name, value)
    inside = bucket / "data" / "deeper"
    inside.mkdir(parents=True)
    (inside / "one").write_bytes(b"content")
    source = f"s3://{bucket.name}/data"
    before, status = content_identity(source), (inside / "one").stat()
    (bucket / "database").write_bytes(b"a neighbour")
    assert content_identity(source) == content_identity(f"{source}/") == before
    (inside / "one").write_bytes(b"CONTENT")
    os.utime(inside / "one", ns=(status.st_atime_ns, status.st_mtime_ns))
    changed = content_identity(source)
    (inside / "two").write_bytes(b"")
    assert len({before, changed, content_identity(source)}) == 3
    with pytest.raises(UserError, match="nothing there"):
        content_identity(f"s3://{bucket.name}/dat")
