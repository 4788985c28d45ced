"""Passwords in addresses: refused wherever an address comes in, and shown nowhere."""

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from file_server import FileServer
from surroundings import s3_environment
from tars import samples, shard_bytes

from flyte_ddp import storage
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.text.credentials import check_no_credentials
from flyte_ddp.datasets import fetch
from flyte_ddp.release.policy import Policy
from flyte_ddp.release.registry import Registry
from flyte_ddp.shards.__main__ import shards
from flyte_ddp.shards.index import read_index
from flyte_ddp.shards.scanning import create_index
from flyte_ddp.storage.result_store import mirror_results

URL = "https://me:hidden@data.example.com/x"

USES: dict[str, Callable[[Path], object]] = {
    "a data set": lambda _: Hyperparameters(dataset=f"shards:{URL}"),
    "a test set": lambda _: Hyperparameters(dataset="shards:x", test_dataset=f"shards:{URL}"),
    "a mirror": lambda _: Hyperparameters(data_source=URL),
    "initial weights": lambda _: Hyperparameters(init_from=URL),
    "a policy": lambda _: Policy(slices=URL),
    "a prediction's mirror": lambda folder: fetch("mnist", URL, folder / "data", progress="off"),
    "shards": lambda folder: create_index([URL], folder / "index.json", progress="off"),
    "an index": lambda _: read_index(URL),
    "a registry": lambda _: Registry("s3://key:hidden@bucket/models", "x"),
    "results": lambda folder: mirror_results(folder, URL, folder.name, resuming=False).__enter__(),
    "a bucket": lambda _: storage.read_file("s3://key:hidden@bucket/x"),
    "a user alone": lambda _: storage.read_file("https://hidden@data.example.com/x"),
}


@pytest.mark.parametrize("use", USES)
def test_an_address_with_a_password_is_refused(use: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\*\*\*@.*has a user name or a password.*~/.netrc") as caught:
        USES[use](tmp_path)
    assert "hidden" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", [
    "https://me:hid/den@data.example.com/x",
    "https://me:hid?den@data.example.com/x",
    "https://me:hid#den@data.example.com/x",
    "https://me:hid den@data.example.com/x",
    "https:/me:hidden@data.example.com/x",
    r"https:\\me:hidden@data.example.com\x",
    "HTTPS://me:hid/den@data.example.com/x",
    "https:///me:hidden@data.example.com/x",
    "s3:////key:hid/den@bucket/x",
    "s3://key:hid/den@bucket/x",
    "gs://key:12/den@bucket/x",
    "shards:s3://key:hid/den@bucket/{0..3}.tar",
])  # fmt: skip
def test_secrets_may_have_what_ends_a_servers_name(address: str) -> None:
    with pytest.raises(UserError, match="has a user name or a password") as caught:
        check_no_credentials("data_source", address)
    assert not any(part in str(caught.value) for part in ("hid", "den@", "12"))


@pytest.mark.parametrize("address", [
    "https://data.example.com:8080/a:b@c?x=1&sig=a%3Ab",
    "http://[::1]:9000",
    "http://[2001:db8::1]/x",
    "s3://bucket/2026-11-28T10:00:00/me@home.tar",
    '{"endpoint": "http://localhost:9000", "time": "10:00"}',
    "http://a.example.com:80/x,http://b.example.com:81/y",
    "see http://localhost:80, or (s3://bucket/x): both",
    "file.py:make",
    "hdfs:/home/x",
    "file:///home/a:b@c/x",
])  # fmt: skip
def test_addresses_without_a_secret(address: str) -> None:
    check_no_credentials("data_source", address)


def test_an_index_that_has_one(tmp_path: Path) -> None:
    index = tmp_path / "index.json"
    for entry in ({"url": URL, "nsamples": 3}, {"url": URL, "nsamples": "three"}, {"url": URL}):
        index.write_text(json.dumps({"shardlist": [entry]}))
        with pytest.raises(UserError, match="index") as caught:
            read_index(str(index))
        assert "hidden" not in caught.value.message
    ended = CliRunner().invoke(shards, ["verify", str(index)])
    assert ended.exit_code == 1
    assert "hidden" not in ended.output


def test_what_a_server_or_a_proxy_says_is_shown_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    s3_environment("http://me:hidden@127.0.0.1:9", monkeypatch)
    monkeypatch.setenv("HTTP_PROXY", "http://me:hidden@127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://me:hidden@127.0.0.1:9")
    for address in ("s3://bucket/x", "http://data.example.com/x", "http://[x"):
        with pytest.raises(storage.UnavailableError) as caught:
            storage.read_file(address)
        assert "hidden" not in str(caught.value)
    monkeypatch.undo()
    s3_environment("me:hidden@127.0.0.1", monkeypatch)
    with pytest.raises(storage.UnavailableError, match=r"Invalid endpoint: 127.0.0.1; it must begin with https://"):
        storage.read_file("s3://bucket/x")


def test_a_netrc_file_is_the_way(server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the error says."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password hidden\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    server.files = {"0.tar": shard_bytes(samples(3)), "index.json": b'{"shardlist": [{"url": "0.tar", "nsamples": 3}]}'}
    assert len(read_index(f"{server.url}/index.json")) == 3
    create_index([f"{server.url}/0.tar"], tmp_path / "index.json", progress="off")
    expected = f"Basic {base64.b64encode(b'me:hidden').decode()}"
    assert [headers["Authorization"] for headers in server.headers] == [expected] * 2
    assert "hidden" not in (tmp_path / "index.json").read_text()
