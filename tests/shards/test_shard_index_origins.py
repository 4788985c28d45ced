"""An index from a web server names files of that server only, others if a setting says so; redirects likewise."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from file_server import FileServer, file_server
from tars import samples, shard_bytes

from flyte_ddp import storage
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.settings import ALLOWED
from flyte_ddp.shards.dataset import ShardDataset
from flyte_ddp.shards.index import read_index
from flyte_ddp.storage.origins import describe_redirect_problem, is_public_ip

FOREIGN = [
    "http://169.254.169.254/latest/meta-data/iam/security-credentials/",
    "s3://private/0.tar",
    "https://{host}/0.tar",  # another port, as the index came over http
    "http://{host}@169.254.169.254/0.tar",
    "http://169.254.169.254\\\\@{host}/0.tar",  # which requests asks 169.254.169.254 for, and urllib does not
    "HTTP://elsewhere.example/0.tar",
    "file:///secret/0.tar",
]
PLACES: dict[str, Any] = {
    "shard": lambda url: {"shardlist": [{"url": url, "nsamples": 3}]},
    "base": lambda url: {"base": url.rpartition("/")[0], "shardlist": [{"url": "0.tar", "nsamples": 3}]},
    "reference": lambda url: {"datasets": [{"source_url": url}]},
    "tables": lambda url: {"shardlist": [{"url": "0.tar", "nsamples": 3}], "flyte_ddp": {"tables": url}},
}


@pytest.mark.parametrize("place", PLACES)
def test_of_another_origin_it_names_nothing(place: str, server: FileServer, tmp_path: Path) -> None:
    """Nor where an index of this machine refers to it."""
    far, near = f"{server.url}/index.json", tmp_path / "near.json"
    near.write_text(json.dumps({"datasets": [{"source_url": far}]}))
    for url in FOREIGN:
        named = url.format(host=server.url.partition("://")[2]).replace("\\\\", "\\")
        server.files["index.json"] = json.dumps(PLACES[place](named)).encode()
        for index in (far, near):
            with pytest.raises(UserError, match=rf"index {far}: |which refers to other indexes") as caught:
                read_index(str(index))
            assert "@" not in caught.value.message.replace("***@", "")
    assert server.requests == ["index.json"] * 2 * len(FOREIGN)


@pytest.fixture
def other() -> Any:
    with file_server() as running:
        yield running


def test_a_setting_allows_others(server: FileServer, other: FileServer, tmp_path: Path, monkeypatch) -> None:
    """An index of this machine or of object storage may name what it likes: its writer may choose the data anyway."""

    def names(*urls: str) -> list[str]:
        server.files["index.json"] = json.dumps({"shardlist": [{"url": url, "nsamples": 3} for url in urls]}).encode()
        return [shard.url for shard in read_index(f"{server.url}/index.json").shards]

    own = f"{server.url}/a/../0.tar"
    upper = f"{server.url.upper()}/2.tar"
    assert names(own, "1.tar", upper) == [own, f"{server.url}/1.tar", upper]
    said = rf"names '{other.url}/data/0.tar', which is not on http://127.*; .*set {ALLOWED}={other.url}/,"
    with pytest.raises(UserError, match=said):
        names(f"{other.url}/data/0.tar")
    monkeypatch.setenv(ALLOWED, f"s3://bucket, {other.url}/data/")
    allowed = [f"{other.url}/data/0.tar", f"{other.url}/data/in/0.tar", "s3://bucket/0.tar"]
    assert names(*allowed) == allowed
    refused = [f"{other.url}/{name}" for name in ("data2/0.tar", "data/../0.tar", "data/%2e%2E/0.tar")]
    for url in (*refused, "s3://bucket2/0"):
        with pytest.raises(UserError, match="which is not on"):
            names(url)
    (tmp_path / "index.json").write_bytes(server.files["index.json"])
    assert [shard.url for shard in read_index(str(tmp_path / "index.json")).shards] == ["s3://bucket2/0"]


def test_which_addresses_are_public() -> None:
    private = ["127.0.0.1", "169.254.169.254", "10.1.2.3", "100.100.100.200", "0.0.0.0", "::1", "fe80::1%eth0"]
    private += ["::ffff:169.254.169.254", "fd00:ec2::254", "224.0.0.1", "ff02::1", "240.0.0.1", "192.0.0.192"]
    private += ["64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1", "::a9fe:a9fe", "2001:0:4136:e378:8000:63bf:5601:5601"]
    public = ["1.1.1.1", "2606:4700:4700::1111", "64:ff9b::101:101", "2002:101:101::1", "::ffff:1.1.1.1"]
    assert all(is_public_ip(host) for host in public)
    assert not any(is_public_ip(host) for host in private)


def test_a_redirect_does_not_leave_encryption() -> None:
    problem = "which is not encrypted, unlike the original address"
    assert describe_redirect_problem("https://1.1.1.1/a", "http://1.1.1.1/a") == problem
    assert describe_redirect_problem("https://1.1.1.1/a", "http://1.0.0.1/a") == problem
    assert describe_redirect_problem("http://1.1.1.1/a", "https://1.0.0.1/a") == ""


def test_redirects_to_private_addresses(server: FileServer, other: FileServer, tmp_path: Path, monkeypatch) -> None:
    """They are not followed, of any file of a web server, and the target is not asked. A setting allows them."""
    other.files["secret"] = other.files["0.tar"] = shard_bytes(samples(3))
    for origin in (f"{other.url}/", "http://169.254.169.254/", f"{other.url.replace('127.0.0.1', 'localhost')}/"):
        server.redirects["secret"] = f"{origin}secret"
        said = rf"redirected to {origin}, .*; .*set {ALLOWED}={origin}$"
        with pytest.raises(storage.UnavailableError, match=said) as caught:
            storage.call_with_retries(f"{server.url}/secret", storage.read_file)
        assert not caught.value.transient
    assert other.requests == []
    for target, problem in (
        ("file:///etc/hostname", "No connection adapters"),
        (f"{other.url.replace('://', '://user:hidden@')}/secret", r"rejected address: address='http://\*\*\*@127"),
        (f"{server.url}/secret", "more than 30 redirects"),
    ):
        server.redirects["secret"] = target
        with pytest.raises(storage.UnavailableError, match=problem):
            storage.read_file(f"{server.url}/secret")
    server.redirects["secret"] = "/plain"
    server.files["plain"] = b"content"
    assert storage.read_file(f"{server.url}/secret") == b"content", "on the same server"
    server.redirects["0.tar"] = f"{other.url}/0.tar"
    server.files["index.json"] = json.dumps({"shardlist": [{"url": "0.tar", "nsamples": 3}]}).encode()
    dataset = ShardDataset(f"{server.url}/index.json", tmp_path / "cache")
    with pytest.raises(UserError, match=rf"0\.tar: cannot be fetched \(redirected to {other.url}/,"):
        dataset[0]
    monkeypatch.setenv(ALLOWED, f"{other.url}/")
    assert dataset[0]["__key__"] == "00000"
    assert other.requests == ["0.tar"]


def test_what_a_redirected_request_takes_along(server: FileServer, other: FileServer, tmp_path, monkeypatch) -> None:
    """The range and the method; of credentials only those that ~/.netrc has for the host that is asked."""
    away = other.url.replace("127.0.0.1", "localhost")
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password first\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv(ALLOWED, f"{away}/")
    server.redirects["file"] = f"{away}/é".encode().decode("latin-1")  # as UTF-8 goes through http.server
    other.files["é"] = b"0123456789"
    assert storage.read_file(f"{server.url}/file", (2, 5)) == b"234"
    assert storage.stat_file(f"{server.url}/file").size == 10
    assert [headers["Authorization"] for headers in server.headers] == ["Basic bWU6Zmlyc3Q="] * 2
    assert [headers.get("Authorization") for headers in other.headers] == [None, None]
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password first machine localhost login you password no")
    assert storage.read_file(f"{server.url}/file") == b"0123456789"
    assert other.headers[-1]["Authorization"] == f"Basic {base64.b64encode(b'you:no').decode()}"
