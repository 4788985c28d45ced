"""What addresses mean."""

from pathlib import Path

import pytest

from flyte_ddp.errors import UserError
from flyte_ddp.storage import join, local_path, parent, resolve, scheme


@pytest.mark.parametrize(
    ("address", "folder"),
    [
        ("/a/b/x.json", "/a/b"),
        ("file:///a/b%20c/x.json", "/a/b c"),
        ("http://h:1/a/x.json?b/c#d", "http://h:1/a"),
        ("https://h/x.json", "https://h"),
        ("s3://bucket/a//b#c?d/x.json", "s3://bucket/a//b#c?d"),
        ("s3://bucket/x.json", "s3://bucket"),
        ("gs://bucket/a/x.json", "gs://bucket/a"),
        ("az://container/a/x.json", "az://container/a"),
    ],
)
def test_the_folder_of_a_file(address: str, folder: str) -> None:
    assert parent(address) == folder
    name = "x.json"
    assert join(folder, name) in (address, address.partition("?b")[0], f"{folder}/{name}")


@pytest.mark.parametrize(
    ("base", "address", "expected"),
    [
        ("/a/b", "x", "/a/b/x"),
        ("/a/b", "../x", "/a/x"),
        ("/a/b", "/x", "/x"),
        ("/a/b", "s3://c/x", "s3://c/x"),
        ("file:///a/b%20c", "x y", "/a/b c/x y"),
        ("http://h/a/b", "x", "http://h/a/b/x"),
        ("http://h/a/b/", "../x", "http://h/a/x"),
        ("http://h/a/b", "/x", "http://h/x"),
        ("http://h/a%20b?c#d", "x#1?y=%20 é.tar", "http://h/a%20b/x%231%3Fy%3D%2520%20%C3%A9.tar"),
        ("http://h", "x", "http://h/x"),
        ("http://h/a", "../../../x", "http://h/x"),
        ("http://h/a", "file:/x", "http://h/a/file%3A/x"),
        ("s3://bucket/a//b/", "x", "s3://bucket/a//b/x"),
        ("s3://bucket/a//b", "../x//y", "s3://bucket/a//x//y"),
        ("s3://bucket/a", "../../../x", "s3://bucket/x"),
        ("s3://bucket/a", "./x/./y", "s3://bucket/a/x/y"),
        ("s3://bucket", "x", "s3://bucket/x"),
        ("gs://bucket/a", "/x", "gs://bucket/x"),
    ],
)
def test_what_an_address_means_in_a_folder(base: str, address: str, expected: str) -> None:
    assert resolve(base, address) == expected


def test_paths_are_absolute_and_know_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/somebody")
    assert local_path("a/b") == tmp_path / "a" / "b"
    assert local_path("~/b") == Path("/somebody/b")
    assert local_path("~no-such-user-1/b") == tmp_path / "~no-such-user-1" / "b"
    assert local_path("FILE:///a%20b") == Path("/a b")
    assert local_path("S3://a/b") is None


@pytest.mark.parametrize(
    "address", ["ftp://h/x", "pipe:cat http://h/x", "s3://", "gs:///x", "az:///x", "http:///x", "://x"]
)
def test_addresses_of_no_known_kind(address: str) -> None:
    with pytest.raises(UserError, match=r"^address '"):
        scheme(address)
