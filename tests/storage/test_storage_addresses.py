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
        ("az://container/a/x.json", "az://container/a"),
    ],
)
def test_the_folder_of_a_file(address: str, folder: str) -> None:
    assert parent(address) == folder
    assert join(folder, "x.json") in (address.partition("?b")[0], f"{folder}/x.json")


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
        ("http://h/a", "../../../x", "http://h/x"),
        ("http://h/a", "file:/x", "http://h/a/file%3A/x"),
        ("s3://bucket/a//b/", "x", "s3://bucket/a//b/x"),
        ("s3://bucket/a//b", "../x//y", "s3://bucket/a//x//y"),
        ("s3://bucket/a", "../../../x", "s3://bucket/x"),
        ("s3://bucket/a", "./x/./y", "s3://bucket/a/x/y"),
        ("gs://bucket/a", "/x", "gs://bucket/x"),
    ],
)
def test_what_an_address_means_in_a_folder(base: str, address: str, expected: str) -> None:
    assert resolve(base, address) == expected


def test_paths_are_absolute_and_know_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/somebody")
    found = [local_path(address) for address in ("a/b", "~/b", "~no-such-user-1/b", "FILE:///a%20b", "S3://a/b")]
    home = [tmp_path / "a/b", Path("/somebody/b"), tmp_path / "~no-such-user-1/b"]
    assert found == [*home, Path("/a b"), None]


UNKNOWN = dict.fromkeys(("ftp://h/x", "pipe:cat http://h/x", "://x"), "be a path, or start with file://, s3://")
NAMELESS = {"s3://": "bucket", "gs:///x": "bucket", "az:///x": "container", "http:///x": "server"}


@pytest.mark.parametrize(("address", "said"), [*UNKNOWN.items(), *NAMELESS.items()])
def test_addresses_of_no_known_kind(address: str, said: str) -> None:
    with pytest.raises(UserError, match=rf"^address '{address}': must .*{said}"):
        scheme(address)
