"""Reading files, parts of files and lists, from each kind of storage, and servers that fail."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from file_server import FileServer
from places import KINDS, OBJECTS, Place, place_of

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.storage import AlteredError, Entry, MissingError, UnavailableError, failures, retries

CONTENT = np.random.default_rng(0).bytes(3_000_000)  # several chunks
REMOTE = ["http", *OBJECTS]


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with place_of(request.param, tmp_path, monkeypatch) as found:
        yield found


remote = pytest.mark.parametrize("place", REMOTE, indirect=True)
objects = pytest.mark.parametrize("place", OBJECTS, indirect=True)
listed = pytest.mark.parametrize("place", [kind for kind in KINDS if kind != "http"], indirect=True)


def test_a_file_and_parts_of_it(place: Place) -> None:
    address = place.put("a b/ü.bin", CONTENT)
    assert storage.read_file(address) == CONTENT
    for start, end in [(0, 1), (5, 2_000_005), (2_999_999, 3_000_000), (0, 3_000_000)]:
        assert storage.read_file(address, (start, end)) == CONTENT[start:end]
        with storage.open_file(address, (start, end)) as found:
            assert (found.size, b"".join(found.chunks)) == (end - start, CONTENT[start:end])
    with storage.open_file(address) as found:
        assert found.size == len(CONTENT)
        assert max(len(chunk) for chunk in found.chunks) <= 1 << 20
    for start, end in [(2_999_999, 3_000_001), (3_000_000, 3_000_001), (9_000_000, 9_000_001)]:
        with pytest.raises(UnavailableError, match=r"truncated after|HTTP 416"):
            storage.read_file(address, (start, end))


def test_size_and_tag(place: Place) -> None:
    address = place.put("x", b"content")
    first = storage.stat_file(address)
    assert (first.name, first.size) == ("", 7)
    assert storage.stat_file(address) == first
    place.put("x", b"another")
    assert storage.stat_file(address).tag != first.tag


@listed
def test_a_file_is_the_one_that_was_listed(place: Place) -> None:
    """Where storage says of content which it is; of a copy of a folder, files only have to be as long."""
    place.put("x", b"content")
    [entry] = storage.list_files(place.address)
    address = f"{place.address}/x"
    for span, content in ((None, b"content"), ((1, 3), b"on")):
        assert storage.read_file(address, span, tag=entry.tag) == content
    place.put("x", b"another")
    for span in (None, (1, 3)):
        if storage.local_path(address) is not None:
            storage.read_file(address, span, tag=entry.tag)
            continue
        with pytest.raises(AlteredError, match=f"has ETag .*, and {entry.tag} when it was listed") as caught:
            storage.read_file(address, span, tag=entry.tag)
        assert not caught.value.transient


def test_what_is_not_there(place: Place) -> None:
    place.put("folder/x", b"")
    for name in ("y", "folder/y", "folder/x/y"):
        for action in (storage.read_file, storage.stat_file):
            with pytest.raises(MissingError, match=r"no such file|HTTP 404"):
                action(f"{place.address}/{name}")


@listed
def test_all_files_below_a_folder(place: Place) -> None:
    """In order, page by page, without the objects that stand for folders and without neighbours of a similar name.

    obstore does not tell the object of an empty folder from an empty file.
    """
    place.server.page = 3
    names = [f"{folder}/{number}.jpg" for folder in ("a", "b/c", "é d+&") for number in range(5)]
    for name in [*names, "0"]:
        place.put(name, name.encode())
    if place.prefix:
        for name in ("", "a/", "b/", "b/c/"):
            place.put(name, b"")
        place.server.files["bucket/folder2/x"] = b""
    else:
        (place.folder / "empty").mkdir()
    for address in (place.address, f"{place.address}/"):
        found = list(storage.list_files(address))
        assert [(entry.name, entry.size) for entry in found] == sorted((n, len(n.encode())) for n in [*names, "0"])
    assert [entry.name for entry in storage.list_files(f"{place.address}/b")] == [f"c/{n}.jpg" for n in range(5)]
    before = {entry.name: entry.tag for entry in storage.list_files(place.address)}
    place.put("b/c/3.jpg", b"changed!!")
    after = {entry.name: entry.tag for entry in storage.list_files(place.address)}
    assert [name for name in after if after[name] != before[name]] == ["b/c/3.jpg"]


@objects
def test_all_objects_of_a_bucket(place: Place) -> None:
    place.put("x", b"")
    place.server.files["bucket/top"] = b"1"
    assert [entry.name for entry in storage.list_files(place.address.rpartition("/")[0])] == ["folder/x", "top"]
    assert list(storage.list_files(f"{place.address}/nothing")) == []


def test_web_servers_have_lists_only_where_one_was_put(server: FileServer) -> None:
    with pytest.raises(UnavailableError, match=r"no list of its files, and SHA256SUMS in that folder .*HTTP 404"):
        list(storage.list_files(f"{server.url}/data"))
    server.files = {"data/SHA256SUMS": b"%s  ./b/y.jpg\n%s *a/x z.jpg\n\n# a remark\n" % (b"B" * 64, b"0" * 64)}
    assert list(storage.list_files(f"{server.url}/data/")) == [
        Entry("a/x z.jpg", -1, "0" * 64),
        Entry("b/y.jpg", -1, "b" * 64),
    ]


def test_lists_of_folders_follow_links_and_leave_out_hidden_files(tmp_path: Path) -> None:
    """As torchvision does; links to folders are how data sets are often put together."""
    (tmp_path / "elsewhere" / "deeper").mkdir(parents=True)
    (tmp_path / "elsewhere" / "deeper" / "x").write_bytes(b"123")
    root = tmp_path / "root"
    (root / ".hidden").mkdir(parents=True)
    for name in (".x", ".hidden/y", "z"):
        (root / name).write_bytes(b"")
    (root / "one").symlink_to(tmp_path / "elsewhere")
    (root / "two").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(root / "pipe")
    assert [(e.name, e.size) for e in storage.list_files(str(root))] == [
        ("one/deeper/x", 3),
        ("two/deeper/x", 3),
        ("z", 0),
    ]
    (root / "gone").symlink_to(tmp_path / "no-such-file")
    with pytest.raises(UnavailableError, match=f"{root}/gone: No such file"):
        list(storage.list_files(str(root)))
    (root / "gone").unlink()
    (tmp_path / "elsewhere" / "deeper" / "back").symlink_to(root)
    with pytest.raises(UnavailableError, match="root/one/deeper/back is a link to a folder that it is in"):
        list(storage.list_files(str(root)))
    with pytest.raises(MissingError, match="no such directory"):
        list(storage.list_files(str(root / "z")))


def test_a_folder_that_cannot_be_read_is_an_error_and_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: str) -> None:
        raise PermissionError(13, "Permission denied", folder)

    monkeypatch.setattr(os, "scandir", refuse)  # root, who runs these tests in CI, may read everything
    with pytest.raises(UnavailableError, match=f"{tmp_path}: Permission denied"):
        list(storage.list_files(str(tmp_path)))


def test_a_disk_that_fails_is_an_error_of_reading() -> None:
    with pytest.raises(UnavailableError, match="Input/output error"):
        storage.read_file("/proc/self/mem", (0, 10))  # where no process has any memory


@remote
@pytest.mark.parametrize("fault", [500, 503, 429, "truncate", "reset", "hang", "stall"])
def test_a_fault_that_passes_is_retried(place: Place, monkeypatch: pytest.MonkeyPatch, fault: int | str) -> None:
    monkeypatch.setattr(failures, "READ_TIMEOUT", 0.2 if fault in ("hang", "stall") else 20.0)
    address = place.put("x", CONTENT)
    place.server.faults[f"{place.prefix}x"] = [fault]
    said: list[str] = []
    assert storage.retry(address, storage.read_file, said.append) == CONTENT
    assert len(place.server.requests) == 1 + len(said) > 1  # on a busy machine another try may come too late
    assert all(text.startswith(f"{address}: ") for text in said)


@remote
@pytest.mark.parametrize(("fault", "tries"), [(503, 4), (404, 1), (403, 1), (401, 1), (400, 1), ("reset", 4)])
def test_a_fault_that_stays_is_an_error(place: Place, fault: int | str, tries: int) -> None:
    address = place.put("x", CONTENT)
    assert storage.read_file(place.put("y", CONTENT)) == CONTENT  # which shows that the place can be asked in our way
    place.server.faults[f"{place.prefix}x"] = [fault] * 9
    with pytest.raises(UnavailableError, match=f"^{address}: " + (f"HTTP {fault}" if fault != "reset" else "")):
        storage.retry([address], storage.read_file)
    assert place.server.requests.count(f"{place.prefix}x") == tries


@objects
@pytest.mark.parametrize("fault", [503, "truncate"])
def test_a_list_that_fails_halfway_is_read_again(place: Place, fault: int | str) -> None:
    place.server.page = 2
    for number in range(5):
        place.put(str(number), b"")
    place.server.faults = {"bucket": [fault], "bucket/": [fault]}

    def names(address: str) -> list[str]:
        return [entry.name for entry in storage.list_files(address)]

    assert storage.retry(place.address, names) == ["0", "1", "2", "3", "4"]
    place.server.faults = {"bucket": [404], "bucket/": [404]}
    with pytest.raises(UnavailableError, match="HTTP 404"):
        storage.retry(place.address, names)


@remote
def test_a_server_that_gives_no_parts(place: Place) -> None:
    address = place.put("x", CONTENT)
    place.server.gives_parts = False
    assert storage.read_file(address) == CONTENT
    with pytest.raises(UnavailableError, match="cannot give a part of a file"):
        storage.read_file(address, (0, 10))


@remote
def test_connections_are_kept(place: Place) -> None:
    address = place.put("x", b"content")
    for _ in range(10):
        assert storage.read_file(address) == b"content"
        assert storage.stat_file(address).size == 7
    spare = 0 if place.address.startswith("http:") else 6  # opened by obstore before it has the last one back
    assert len(place.server.connections) <= 1 + spare
    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(storage.read_file, [address] * 200)) == {b"content"}
    assert len(place.server.connections) <= 6 + spare


@pytest.mark.parametrize("place", ["http"], indirect=True)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_children_have_connections_of_their_own(place: Place) -> None:
    """While the parent goes on with its own, and whatever its threads were doing."""
    addresses = [place.put(str(number), b"%d" % number * 100_000) for number in range(20)]
    expected = [b"%d" % number * 100_000 for number in range(20)]
    assert [storage.read_file(address) for address in addresses] == expected
    children = []
    with ThreadPoolExecutor(4) as pool:
        parents = [pool.submit(storage.read_file, address) for address in addresses * 3]
        for _ in range(2):
            child = os.fork()
            if child == 0:
                right = [storage.read_file(address) for address in addresses] == expected
                os._exit(0 if right else 1)
            children.append(child)
        assert [reading.result() for reading in parents] == expected * 3
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert 3 <= len(place.server.connections) <= 4 + 2


IN_FORKS = """
import os, sys
from flyte_ddp import storage
address = sys.argv[1]
def fork(action):
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException as error:
            print(error)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
def read():
    print(storage.read_file(address).decode())
for _ in range(2):
    fork(read)
read()
fork(read)
fork(lambda: fork(read))
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_forked_children_can_read_if_their_parent_has_not(place: Place) -> None:
    """Else it is an error that says what to do: obstore would wait for threads that a fork does not have."""
    command = [sys.executable, "-W", "ignore", "-c", IN_FORKS, place.put("x", b"content")]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    assert said[:3] == ["content"] * 3
    assert len(said) == 5
    assert all("fork of one that has used object storage" in text and "'spawn'" in text for text in said[3:])


def test_what_was_put_is_there(place: Place) -> None:
    address = f"{place.address}/a b/ü.bin"
    if place.address.startswith("http:"):
        with pytest.raises(UserError, match="nothing can be written to a web server"):
            storage.write_file(address, CONTENT)
        return
    for content in (b"", CONTENT):
        storage.write_file(address, content)
        assert storage.read_file(address) == content
    assert [entry.name for entry in storage.list_files(place.address)] == ["a b/ü.bin"]


def test_cookies_are_not_kept(server: FileServer) -> None:
    """Where connections are."""
    server.files["x"], server.answers["Set-Cookie"] = b"", "a=b; Path=/"
    for _ in range(2):
        storage.read_file(f"{server.url}/x")
    assert ["Cookie" in headers for headers in server.headers] == [False, False]
    assert len(server.connections) == 1


@objects
def test_a_list_that_is_none(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("file_server.Answer.listed", lambda *_: b"<html>log in first")
    with pytest.raises(UnavailableError, match="invalid list response") as caught:
        list(storage.list_files(place.address))
    assert not caught.value.transient


def test_pauses_grow_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(retries, "FIRST_DELAY", 8.0)
    monkeypatch.setattr(retries.time, "sleep", waited.append)

    def fails(_: str) -> None:
        raise UnavailableError("no", transient=True)

    with pytest.raises(UnavailableError, match=r"^a: no; b: no$"):
        storage.retry(["a", "b"], fails)
    assert [4 <= waited[0] <= 8, 8 <= waited[1] <= 16, 16 <= waited[2] <= 32] == [True] * 3
    assert len(waited) == 3


@pytest.mark.parametrize("option", ["--text", "--binary", "--tag"])
def test_a_list_on_a_web_server_has_the_names_of_files(server: FileServer, tmp_path: Path, option: str) -> None:
    """All that a file can be called, as sha256sum itself writes it."""
    names = ["x#1.jpg", "x?y=1.jpg", "100%.jpg", "%20.jpg", "é 名.jpg", "ends with a space.jpg ", "..jpg", "+&=;:@.jpg"]
    names += ["\u2028.jpg", "\x85.jpg", "a\\b.jpg", "a\nb.jpg", "a\rb.jpg", "a\\nb.jpg", "a (1) = b.jpg", " a.jpg"]
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(b"%d" % number)
        server.files[f"d/{name}"] = b"%d" % number
    sums = subprocess.run(["sha256sum", option, *names], cwd=tmp_path, capture_output=True, check=True).stdout
    server.files["d/SHA256SUMS"] = sums
    address = f"{server.url}/d"
    assert [entry.name for entry in storage.list_files(address)] == sorted(names)
    assert [storage.read_file(storage.join(address, name)) for name in names] == [b"%d" % n for n in range(len(names))]


@pytest.mark.parametrize("name", ["../secret/x.jpg", "a/../../x.jpg", "/etc/x.jpg", "./../x.jpg", "a/.."])
def test_a_list_that_leads_elsewhere_is_refused(server: FileServer, name: str) -> None:
    server.files["d/SHA256SUMS"] = f"{'0' * 64}  {name}\n{'0' * 64}  a/fine.jpg\n".encode()
    with pytest.raises(UnavailableError, match=r"SHA256SUMS there names '.*', which is not in that folder"):
        list(storage.list_files(f"{server.url}/d"))
