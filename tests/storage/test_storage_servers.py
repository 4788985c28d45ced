"""A real server of objects, rclone's: credentials, rights, lists of more than one page, and writing."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from faulty_proxy import faulty_proxy, locking_proxy
from image_folders import write_files
from s3_server import AT_ONCE, S3Server, s3_server
from surroundings import s3_environment, set_variables

from flyte_ddp import storage
from flyte_ddp.storage import ExistsError, ForbiddenError, MissingError, UnavailableError

MANY = {f"{number:04d}.jpg": b"%d" % number for number in range(1205)}  # a page has at most 1,000


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server that asks for a key, with two buckets, of which one has many objects."""
    folder = tmp_path_factory.mktemp("objects")
    write_files(folder, {"few/x": b"content", **{f"many/in/{name}": content for name, content in MANY.items()}})
    with s3_server(folder, *AT_ONCE) as server:
        yield server


@pytest.fixture
def keys(keyed: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(keyed.aws_environment(), monkeypatch)


@pytest.mark.usefixtures("keys")
def test_with_the_right_key_a_list_has_all_pages() -> None:
    found = [(entry.name, entry.size) for entry in storage.list_files("s3://many/in")]
    assert found == [(name, len(content)) for name, content in MANY.items()]
    assert storage.read_file("s3://many/in/1204.jpg") == b"1204"
    assert storage.list_folders("s3://many") == storage.list_folders("s3://many/") == ["in"]
    assert storage.list_folders("s3://many/in") == storage.list_folders("s3://few/nothing") == []
    for list_names in (storage.list_files, storage.list_folders):
        with pytest.raises(MissingError, match="HTTP 404 NoSuchBucket"):
            [*list_names("s3://no-such-bucket/in")]


def test_a_server_with_a_certificate_of_its_own(keyed: S3Server, tmp_path: Path, monkeypatch) -> None:
    authority, key = trustme.CA(), tmp_path / "key.pem"
    certificate, authorities = tmp_path / "certificate.pem", tmp_path / "authorities.pem"
    authorities.write_bytes(trustme.CA().cert_pem.bytes() + authority.cert_pem.bytes())
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(str(certificate))
    issued.private_key_pem.write_to_path(str(key))
    with s3_server(keyed.folder, *AT_ONCE, "--cert", str(certificate), "--key", str(key)) as server:
        assert server.endpoint.startswith("https://")
        set_variables(server.aws_environment(), monkeypatch)
        with pytest.raises(UnavailableError, match=f"S3 error: .*{server.endpoint}"):
            storage.read_file("s3://few/x")
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authorities))
        assert storage.read_file("s3://few/x") == b"content"
        for wrong, words in {tmp_path / "gone": "No such file.*gone", key: "No certificates found"}.items():
            monkeypatch.setenv("AWS_CA_BUNDLE", str(wrong))
            with pytest.raises(UnavailableError, match=words):
                storage.read_file("s3://few/x")


def test_without_a_key_or_with_a_wrong_one(keyed: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one error that says so, for reading and for lists, and no second try."""
    s3_environment(keyed.endpoint, monkeypatch)
    for action in (storage.read_file, storage.stat_file, lambda address: list(storage.list_files(address))):
        with pytest.raises(UnavailableError, match=r"HTTP 40[03].*without credentials") as caught:
            action("s3://few/x")
        assert not caught.value.transient
    set_variables(keyed.aws_environment(), monkeypatch)
    for name, code in {"SECRET_ACCESS_KEY": "SignatureDoesNotMatch", "ACCESS_KEY_ID": "InvalidAccessKeyId"}.items():
        monkeypatch.setenv(f"AWS_{name}", "something-else")
        with pytest.raises(UnavailableError, match=f"HTTP 403 {code}$") as caught:
            storage.read_file("s3://few/x")
        assert not caught.value.transient


@pytest.mark.usefixtures("keys")
@pytest.mark.canary
def test_without_a_status_in_obstores_text_its_class_decides(keyed: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a release of obstore with other texts, whose patterns other tests here would miss."""
    monkeypatch.setattr("flyte_ddp.storage.objects.STATUS", re.compile("(no)(status)"))
    with pytest.raises(MissingError, match="not found"):
        storage.read_file("s3://few/no-such-object")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "something-else")
    with pytest.raises(ForbiddenError):
        storage.read_file("s3://few/x")


@pytest.mark.usefixtures("keys")
def test_a_refusal_is_no_proof_that_an_object_is_missing(keyed: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list tells, where there is a right to list."""
    with faulty_proxy(keyed.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        proxy.denied = ("many/in/0", "few")
        for action in (storage.read_file, storage.stat_file):
            for address in ("s3://many/in/0003.jpg", "s3://few/x"):
                with pytest.raises(ForbiddenError):
                    action(address)
            for address in ("s3://many/in/0003", "s3://few/y", "s3://few/a/b"):
                with pytest.raises(MissingError, match=r"HTTP 403.*: the bucket's listing does not contain it"):
                    action(address)
        proxy.denied, proxy.lists = (), False
        for action in (storage.read_file, storage.stat_file, lambda address: list(storage.list_files(address))):
            with pytest.raises(ForbiddenError):
                action("s3://few/y")


def test_keys_of_a_profiles_process(keyed: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys = {"Version": 1, "AccessKeyId": keyed.access_key, "SecretAccessKey": keyed.secret_key}
    (tmp_path / "keys.json").write_text(json.dumps(keys))
    profile = f"credential_process = cat {tmp_path}/keys.json\nendpoint_url = {keyed.endpoint}\nregion = eu-west-1\n"
    (tmp_path / "config").write_text(f"[profile mine]\n{profile}")
    set_variables({"AWS_CONFIG_FILE": str(tmp_path / "config"), "AWS_PROFILE": "mine"}, monkeypatch)
    assert storage.read_file("s3://few/x") == b"content"


@pytest.mark.usefixtures("keys")
def test_files_are_sent_in_parts_and_deleted_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("flyte_ddp.storage.objects.PART_BYTES", 5 << 20)  # the least that S3 takes
    content = os.urandom(11 << 20)
    (tmp_path / "large").write_bytes(content)
    storage.write_file("s3://few/new/large", tmp_path / "large")
    storage.write_file("s3://few/new/small", b"small")
    assert storage.read_file("s3://few/new/large") == content
    storage.delete_files(["s3://few/new/large", "s3://few/new/small", "s3://few/new/none"])
    assert list(storage.list_files("s3://few/new")) == []


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize("place", ["folder", "S3"])
def test_a_file_is_written_once(keyed: S3Server, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"from a file")
    with locking_proxy(keyed) as proxy:  # knows conditional writes
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        (keyed.folder / "made").mkdir(exist_ok=True)
        folder = "s3://made/in" if place == "S3" else str(tmp_path / "made")
        for name, content in (("one", b"content"), ("deep/er", tmp_path / "file")):
            address = storage.join_address(folder, name)
            storage.create_file(address, content)
            with pytest.raises(ExistsError):
                storage.create_file(address, b"other")
            assert storage.read_file(address) == (b"content" if name == "one" else b"from a file")
        assert [entry.name for entry in storage.list_files(folder)] == ["deep/er", "one"]


def test_where_nothing_can_be_written_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    with pytest.raises(UnavailableError, match="No such file"):
        storage.create_file(str(tmp_path / "other"), tmp_path / "missing")
    with pytest.raises(UnavailableError, match="File exists"):
        storage.create_file(str(tmp_path / "file/below"), b"")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
