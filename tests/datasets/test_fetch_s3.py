"""Mirrors on S3, against a real server."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from mnist_files import NAMES, Tiny, leftovers, sums
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
def s3_variables(request: pytest.FixtureRequest, served: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The standard variables, or Flyte's beside standard ones that lead nowhere."""
    if request.param == "flyte":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a-key-of-something-else")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-something-else")
    variables = served.flyte_environment() if request.param == "flyte" else served.aws_environment()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return str(request.param)


@pytest.mark.usefixtures("s3_variables")
def test_a_prefix_is_a_mirror(tiny: Tiny, bucket: Path, tmp_path: Path) -> None:
    tiny.write(bucket / "sets" / "tiny")
    source = f"s3://{bucket.name}/sets/tiny/"
    folder = fetch("mnist", source, tmp_path / "data", progress="off")
    np.testing.assert_array_equal(open_arrays(folder).train_images[..., 0], tiny.arrays[0])
    assert fingerprint("mnist", source) == fingerprint("mnist", "")


@pytest.fixture
def standard_variables(served: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in served.aws_environment().items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("standard_variables")
def test_the_mirrors_own_digests(tiny: Tiny, bucket: Path, tmp_path: Path) -> None:
    tiny.write(bucket)
    published = fingerprint("mnist", f"s3://{bucket.name}")
    (bucket / "SHA256SUMS").write_bytes(sums(tiny.files))
    assert fingerprint("mnist", f"s3://{bucket.name}") != published
    (bucket / NAMES[1]).write_bytes(tiny.files[NAMES[3]])
    with pytest.raises(UserError, match=f"{NAMES[1]} is damaged"):
        fetch("mnist", f"s3://{bucket.name}", tmp_path / "data", progress="off")
    assert leftovers(tmp_path) == []


@pytest.mark.usefixtures("standard_variables", "tiny")
@pytest.mark.parametrize("source", ["s3://no-such-bucket/x", "s3://{bucket}/empty"])
def test_a_missing_bucket_or_an_empty_prefix_is_an_error(bucket: Path, tmp_path: Path, source: str) -> None:
    with pytest.raises(UserError, match=f"has no {NAMES[0]} .HTTP 404 NoSuch"):
        fetch("mnist", source.format(bucket=bucket.name), tmp_path / "data", progress="off")


@pytest.mark.usefixtures("standard_variables")
def test_a_wrong_key_is_an_error(tiny: Tiny, bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write(bucket)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    with pytest.raises(UserError, match="HTTP 403 SignatureDoesNotMatch"):
        fetch("mnist", f"s3://{bucket.name}", tmp_path / "data", progress="off")


@pytest.mark.usefixtures("tiny")
def test_a_server_that_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "some-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "some-secret")
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{bound.getsockname()[1]}")
        with pytest.raises(UserError, match=r"s3://bucket.*Connection refused.*check the address"):
            fingerprint("mnist", "s3://bucket/x")


@pytest.mark.usefixtures("standard_variables")
def test_the_identity_of_a_prefix_changes_with_content_alone(bucket: Path) -> None:
    """Of a file of the same size and time too; a neighbour whose name begins alike is not part of it."""
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
