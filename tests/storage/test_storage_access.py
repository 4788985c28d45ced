"""What addresses mean, and how storage is asked: no server, wrong settings, credentials, and regions."""

import socket
from pathlib import Path

import pytest
from file_server import FileServer
from surroundings import object_stores, s3_environment, set_variables

from flyte_ddp import storage
from flyte_ddp.core.errors import UserError
from flyte_ddp.storage import (
    UnavailableError,
    clouds,
    find_local_path,
    join_address,
    parent_address,
    parse_scheme,
    resolve_address,
)
from flyte_ddp.storage import objects as objects_module


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as bound:  # bound and not listening: nobody else gets the port, and connections are refused
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        object_stores(url, monkeypatch)
        for address in (f"{url}/x", "s3://bucket/x", "gs://bucket/x", "az://container/x"):
            with pytest.raises(UnavailableError, match=rf"Connection refused|{url}/\S+ in .*HTTP error") as caught:
                storage.read_file(address)
            assert caught.value.transient


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"FLYTE_AWS_ENDPOINT": "minio"}, "Invalid endpoint: minio"),
        ({"AWS_PROFILE": "no-such-profile"}, "profile .no-such-profile. could not be found"),
        ({"AWS_ACCESS_KEY_ID": "only-half"}, "AWS_SECRET_ACCESS_KEY"),
        ({}, "bucket name 'a bucket'"),
    ],
)
def test_settings_of_s3_that_cannot_work(server: FileServer, monkeypatch, variables: dict[str, str], said: str) -> None:
    """They are errors at once, without a second try."""
    s3_environment(server.url, monkeypatch)
    set_variables(variables, monkeypatch)
    with pytest.raises(UnavailableError, match=said):
        storage.call_with_retries("s3://bucket/x" if variables else "s3://a bucket/x", storage.read_file)
    assert server.requests == []


class Credentials:
    """As google-auth's."""

    valid, token, expiry = False, "none", None

    def refresh(self, request: object) -> None:
        self.valid, self.token = True, "a-token"


def test_google_is_told_who_asks(server: FileServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import google.auth

    def asked_as() -> str | None:
        objects_module.make_bucket_store.cache_clear()
        storage.read_file("gs://bucket/x")
        return server.headers[-1].get("authorization")

    server.files["bucket/x"] = b"content"
    monkeypatch.setenv("GOOGLE_BASE_URL", server.url)  # obstore's own variable
    with monkeypatch.context() as patch:
        patch.setattr(google.auth, "default", lambda **_: (Credentials(), "project"))
        assert asked_as() == "Bearer a-token"
        patch.setenv("STORAGE_EMULATOR_HOST", server.url)
        assert asked_as() is None  # a token is for Google only
        patch.delenv("STORAGE_EMULATOR_HOST")

    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "")
    assert asked_as() is None
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(UnavailableError, match=r"none\.json"):
        asked_as()


def test_azure_is_told_who_asks(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files["container/x"] = b"content"
    with pytest.raises(UnavailableError, match=r"az:// cannot be used: .*Account must be specified"):
        storage.read_file("az://container/x")
    object_stores(server.url, monkeypatch)
    storage.read_file("az://container/x")
    assert server.headers[-1]["authorization"].startswith("SharedKey account:")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    for name, value in {"STORAGE_SAS_TOKEN": "sv=2023-11-03&sig=abc", "SKIP_SIGNATURE": "true"}.items():
        with monkeypatch.context() as patch:
            patch.setenv(f"AZURE_{name}", value)
            assert storage.read_file("az://container/x") == b"content"
    assert ["sig=abc" in query for query in server.queries[-2:]] == [True, False]
    assert "authorization" not in server.headers[-1]


def test_a_bucket_in_another_region_is_asked_there(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clouds, "AWS_ENDPOINT", f"{server.url}/{{region}}")
    server.files["eu-west-3/bucket/x"] = b"content"
    server.answers["x-amz-bucket-region"] = "eu-west-3"
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-2"}
    set_variables(keys, monkeypatch)
    assert [storage.read_file("s3://bucket/x") for _ in range(2)] == [b"content"] * 2
    assert server.requests == ["us-east-2/bucket", *["eu-west-3/bucket/x"] * 2]
    assert "/eu-west-3/s3/aws4_request" in server.headers[-1]["authorization"]


@pytest.mark.parametrize(
    ("address", "folder"),
    [
        ("/a/b/x.json", "/a/b"),
        ("http://h:1/a/x.json?b/c#d", "http://h:1/a"),
        ("https://h/x.json", "https://h"),
        ("s3://bucket/a//b#c?d/x.json", "s3://bucket/a//b#c?d"),
        ("s3://bucket/x.json", "s3://bucket"),
    ],
)
def test_the_folder_of_a_file(address: str, folder: str) -> None:
    assert parent_address(address) == folder
    assert join_address(folder, "x.json") in (address.partition("?b")[0], f"{folder}/x.json")


@pytest.mark.parametrize(
    ("base", "address", "expected"),
    [
        ("/a/b", "x", "/a/b/x"),
        ("/a/b", "../x", "/a/x"),
        ("/a/b", "/x", "/x"),
        ("file:///a/b%20c", "x y", "/a/b c/x y"),
        ("http://h/a/b", "x", "http://h/a/b/x"),
        ("http://h/a/b", "/x", "http://h/x"),
        ("http://h/a%20b?c#d", "x#1?y=%20 é.tar", "http://h/a%20b/x%231%3Fy%3D%2520%20%C3%A9.tar"),
        ("http://h/a", "file:/x", "http://h/a/file%3A/x"),
        ("s3://bucket/a//b/", "x", "s3://bucket/a//b/x"),
        ("s3://bucket/a//b", "../x//y", "s3://bucket/a//x//y"),
        ("s3://bucket/a", "../../../x", "s3://bucket/x"),
    ],
)
def test_what_an_address_means_in_a_folder(base: str, address: str, expected: str) -> None:
    assert resolve_address(base, address) == expected


def test_paths_are_absolute_and_know_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/somebody")
    found = [find_local_path(address) for address in ("a/b", "~/b", "~no-such-user-1/b", "FILE:///a%20b", "S3://a/b")]
    home = [tmp_path / "a/b", Path("/somebody/b"), tmp_path / "~no-such-user-1/b"]
    assert found == [*home, Path("/a b"), None]


ONE, TWO = "0" * 64, "ab" * 32


def test_addresses_of_no_known_kind() -> None:
    for address in ("ftp://h/x", "pipe:cat http://h/x", "://x", "s3://", "http:///x"):
        with pytest.raises(UserError, match=rf"^address '{address}': must (be a path, or start with|name a server)"):
            parse_scheme(address)
