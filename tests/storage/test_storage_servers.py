"""A real server of objects, rclone's: credentials, and lists of more than one page."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from faulty_proxy import faulty_proxy
from file_server import file_server
from s3_server import S3Server, s3_server
from surroundings import s3_environment

from flyte_ddp import storage
from flyte_ddp.storage import ForbiddenError, MissingError, UnavailableError

MANY = 1205  # objects; a page has at most 1,000


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two buckets, of which one has many objects."""
    folder = tmp_path_factory.mktemp("objects")
    for name in ("many/in", "few"):
        (folder / name).mkdir(parents=True)
    (folder / "few" / "x").write_bytes(b"content")
    for number in range(MANY):
        (folder / "many" / "in" / f"{number:04d}.jpg").write_bytes(b"%d" % number)
    return folder


@pytest.fixture(scope="module")
def keyed(objects: Path) -> Iterator[S3Server]:
    """A server that asks for a key."""
    with s3_server(objects) as server:
        yield server


@pytest.fixture
def keys(keyed: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in keyed.aws_environment().items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("keys")
def test_with_the_right_key_a_list_has_all_pages() -> None:
    found = list(storage.list_files("s3://many/in"))
    assert [(entry.name, entry.size) for entry in found] == [(f"{n:04d}.jpg", len(str(n))) for n in range(MANY)]
    assert storage.read_file("s3://many/in/1204.jpg") == b"1204"
    with pytest.raises(MissingError, match="HTTP 404 NoSuchBucket"):
        list(storage.list_files("s3://no-such-bucket/in"))


@pytest.mark.usefixtures("keys")
def test_keys_of_any_characters_are_signed_as_the_server_does(objects: Path) -> None:
    for name in ["a b", "ä+ö", "50%", "x=1&y=2", "~(1)'!*", "a/:/b", "%41", "#?", "c;d,e@f$"]:
        path = objects / "odd" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
        assert storage.read_file(f"s3://odd/{name}") == name.encode()


def test_a_server_with_a_certificate_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, certificate, key = trustme.CA(), tmp_path / "certificate.pem", tmp_path / "key.pem"
    bundle = trustme.CA().cert_pem.bytes() + authority.cert_pem.bytes()
    (tmp_path / "authorities.pem").write_bytes(bundle)
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(str(certificate))
    issued.private_key_pem.write_to_path(str(key))
    (tmp_path / "served" / "bucket").mkdir(parents=True)
    (tmp_path / "served" / "bucket" / "x").write_bytes(b"content")
    with s3_server(tmp_path / "served", "--cert", str(certificate), "--key", str(key)) as server:
        assert server.endpoint.startswith("https://")
        for name, value in server.aws_environment().items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UnavailableError, match=f"verify failed: UnknownIssuer by {server.endpoint}") as caught:
            storage.read_file("s3://bucket/x")
        assert not caught.value.transient
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "authorities.pem"))
        assert storage.read_file("s3://bucket/x") == b"content"
        for wrong, words in {tmp_path / "gone": "No such file.*gone", key: f"{key}: has no certificate"}.items():
            monkeypatch.setenv("AWS_CA_BUNDLE", str(wrong))
            with pytest.raises(UnavailableError, match=words):
                storage.read_file("s3://bucket/x")


def test_without_a_key_or_with_a_wrong_one(keyed: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one error that says so, for reading and for lists, and no second try."""
    s3_environment(keyed.endpoint, monkeypatch)
    for action in (storage.read_file, storage.stat_file, lambda address: list(storage.list_files(address))):
        with pytest.raises(UnavailableError, match=r"HTTP 40[03].*without credentials, as there are none") as caught:
            action("s3://few/x")
        assert not caught.value.transient
    for name, value in keyed.aws_environment().items():
        monkeypatch.setenv(name, value)
    for name, said in {
        "AWS_SECRET_ACCESS_KEY": "SignatureDoesNotMatch",
        "AWS_ACCESS_KEY_ID": "InvalidAccessKeyId",
    }.items():
        monkeypatch.setenv(name, "something-else")
        with pytest.raises(UnavailableError, match=f"HTTP 403 {said}$") as caught:
            storage.read_file("s3://few/x")
        assert not caught.value.transient


@pytest.mark.usefixtures("keys")
def test_which_right_is_missing(keyed: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """403 is no proof that an object is not there: the list tells, where there is a right to list."""
    with faulty_proxy(keyed.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        proxy.denied = ("many/in/0", "few")
        no_right = r"HTTP 403.*: the right to read it \(s3:GetObject\) is missing"
        for action in (storage.read_file, storage.stat_file):
            for address in ("s3://many/in/0003.jpg", "s3://few/x"):
                with pytest.raises(ForbiddenError, match=f"{no_right}$"):
                    action(address)
            for address in ("s3://many/in/0003", "s3://few/y", "s3://few/a/b"):
                with pytest.raises(MissingError, match=r"HTTP 403.*: the list of the bucket does not have it"):
                    action(address)
        proxy.denied, proxy.lists = (), False
        assert storage.read_file("s3://many/in/0003.jpg") == b"3"
        for action in (storage.read_file, storage.stat_file):
            with pytest.raises(ForbiddenError, match=f"{no_right}; or there is none, .*s3:ListBucket"):
                action("s3://few/y")
        with pytest.raises(ForbiddenError, match=r"the right to list .* \(s3:ListBucket\) is missing"):
            list(storage.list_files("s3://many/in"))


def test_where_everybody_may_read_no_key_is_needed(objects: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server(objects, keyed=False) as server:
        s3_environment(server.endpoint, monkeypatch)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
        for scheme in ("s3", "gs"):
            assert storage.read_file(f"{scheme}://few/x") == b"content"
            with pytest.raises(UnavailableError, match="ignores Range"):  # rclone sends the part, but as "200 OK"
                storage.read_file(f"{scheme}://few/x", (3, 7))
            assert storage.stat_file(f"{scheme}://few/x").size == 7
            found = list(storage.list_files(f"{scheme}://many/in"))
            assert [(entry.name, entry.size) for entry in found] == [(f"{n:04d}.jpg", len(str(n))) for n in range(MANY)]
            with pytest.raises(MissingError, match="HTTP 404"):
                storage.read_file(f"{scheme}://few/y")


def test_keys_of_a_profiles_process(keyed: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And its endpoint; as SSO and roles, botocore alone knows them."""
    keys = {"Version": 1, "AccessKeyId": keyed.access_key, "SecretAccessKey": keyed.secret_key}
    (tmp_path / "keys.json").write_text(json.dumps(keys))
    profile = f"credential_process = cat {tmp_path}/keys.json\nendpoint_url = {keyed.endpoint}\nregion = eu-west-1\n"
    (tmp_path / "config").write_text(f"[profile mine]\n{profile}")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert storage.read_file("s3://few/x") == b"content"
    (tmp_path / "keys.json").unlink()
    monkeypatch.setenv("AWS_SDK_UA_APP_ID", "makes a new store")
    with pytest.raises(UnavailableError, match="No such file"):
        storage.read_file("s3://few/x")


@pytest.mark.slow
def test_keys_of_a_machines_role(keyed: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_environment(keyed.endpoint, monkeypatch)
    with file_server() as metadata:
        role = "latest/meta-data/iam/security-credentials/"
        keys = {"AccessKeyId": keyed.access_key, "SecretAccessKey": keyed.secret_key, "Token": None}
        until = {"Code": "Success", "Expiration": "2099-01-01T00:00:00Z"}
        metadata.files = {role: b"reader", f"{role}reader": json.dumps(keys | until).encode()}
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.url)
        assert storage.read_file("s3://few/x") == b"content"
        assert metadata.counts[f"{role}reader"] == 1


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
