"""Reading files, parts of files and lists, from each kind of storage, and servers that fail."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from file_server import FileServer, file_server
from surroundings import object_stores

from flyte_ddp import storage
from flyte_ddp.core.errors import UserError
from flyte_ddp.storage import AlteredError, MissingError, UnavailableError, transfer

CONTENT = np.random.default_rng(0).bytes(3_000_000)  # several chunks
OBJECTS = ["s3", "gs", "az"]


@dataclass(frozen=True)
class Place:
    """The folder at ``address``; what is on the server is under the names that begin with ``prefix``."""

    address: str
    folder: Path
    server: FileServer
    prefix: str

    def put(self, name: str, content: bytes) -> str:
        """Write a file; return its address."""
        if self.prefix:
            self.server.files[f"{self.prefix}{name}"] = content
        else:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(content)
        return f"{self.address}/{name}"


@pytest.fixture(params=["path", "file", "http", *OBJECTS])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """An empty folder on each kind of storage; variables are set by which clients find it."""
    with file_server() as server:
        object_stores(server.url, monkeypatch)
        addresses = {"path": f"{tmp_path}", "file": f"file://{tmp_path}", "http": f"{server.url}/bucket/folder"}
        address = addresses.get(request.param, f"{request.param}://bucket/folder")
        yield Place(address, tmp_path, server, "" if request.param in ("path", "file") else "bucket/folder/")


two_remote = pytest.mark.parametrize("place", ["http", "s3"], indirect=True)
remote = pytest.mark.parametrize("place", ["http", *OBJECTS], indirect=True)
listed = pytest.mark.parametrize("place", ["path", "file", *OBJECTS], indirect=True)


def names_in(address: str) -> list[str]:
    return [entry.name for entry in storage.list_files(address)]


def test_a_file_and_parts_of_it(place: Place) -> None:
    address = place.put("a b/ü.bin", CONTENT)
    assert storage.read_file(address) == CONTENT
    for start, end in [(0, 1), (5, 2_000_005), (2_999_999, 3_000_000), (0, 3_000_000)]:
        with storage.open_file(address, (start, end)) as found:
            assert (found.size, b"".join(found.chunks)) == (end - start, CONTENT[start:end])
    with storage.open_file(address) as found:
        assert found.size == len(CONTENT)
        assert max(len(chunk) for chunk in found.chunks) <= 1 << 20
    for start, end in [(2_999_999, 3_000_001), (3_000_000, 3_000_001), (9_000_000, 9_000_001)]:
        with pytest.raises(UnavailableError, match=r"truncated after|HTTP 416"):
            storage.read_file(address, (start, end))


def test_a_file_that_never_ends_does_not_fill_the_memory(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    address = place.put("x", CONTENT)
    monkeypatch.setattr(storage, "MOST_BYTES", 2_500_000)
    with pytest.raises(UnavailableError, match="has more than 2,500,000 bytes, the limit") as caught:
        storage.read_file(address)
    assert not caught.value.transient
    assert storage.read_file(address, (0, 2_000_000)) == CONTENT[:2_000_000]


@pytest.mark.parametrize("length", ["abc", "-5", "1_0", "\xb2"])
def test_a_length_that_is_no_number(server: FileServer, length: str) -> None:
    server.files["x"], server.faults["x"] = b"content", ["unannounced"] * 2
    server.answers = {"Content-Length": length}
    for read in (storage.read_file, storage.stat_file):
        with pytest.raises(UnavailableError, match=r"Content-Length: '.*', which is not a number"):
            read(f"{server.url}/x")


def test_size_and_tag(place: Place) -> None:
    address = place.put("x", b"content")
    first = storage.stat_file(address)
    assert (first.name, first.size) == ("", 7)
    assert storage.stat_file(address) == first
    place.put("x", b"another")
    assert storage.stat_file(address).tag != first.tag


@listed
def test_a_file_is_the_one_that_was_listed(place: Place) -> None:
    """By the ETag, and on this machine by the time of the last change."""
    address = place.put("x", b"content")
    [entry] = storage.list_files(place.address)
    for span, content in ((None, b"content"), ((1, 3), b"on")):
        assert storage.read_file(address, span, tag=entry.tag) == content
    place.put("x", b"another")
    if (path := storage.find_local_path(address)) is not None:
        os.utime(path, ns=(0, 0))  # the clock of some file systems goes in steps of seconds
    for span in (None, (1, 3)):
        with pytest.raises(AlteredError, match=f"changed after it was listed: .* {entry.tag}$") as caught:
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
    names = ["0", *(f"{folder}/{number}.jpg" for folder in ("a", "b/c", "é d+&") for number in range(5))]
    for name in names:
        place.put(name, name.encode())
    if place.prefix:
        for name in ("", "a/", "b/", "b/c/"):
            place.put(name, b"")
        place.server.files |= {"bucket/folder2/x": b"", "bucket/top": b"1"}
        bucket = place.address.rpartition("/")[0]
        assert names_in(bucket) == [*(f"folder/{name}" for name in sorted(names)), "folder2/x", "top"]
        assert names_in(f"{place.address}/nothing") == []
    else:
        (place.folder / "empty").mkdir()
    for address in (place.address, f"{place.address}/"):
        found = list(storage.list_files(address))
        assert [(entry.name, entry.size) for entry in found] == sorted((name, len(name.encode())) for name in names)
    assert names_in(f"{place.address}/b") == [f"c/{number}.jpg" for number in range(5)]
    place.put("b/c/3.jpg", b"changed!!")
    assert [new.name for new in storage.list_files(place.address) if new not in found] == ["b/c/3.jpg"]


def test_lists_of_folders_follow_links_and_leave_out_hidden_files(tmp_path: Path) -> None:
    """As torchvision does; links to folders are how data sets are often put together."""
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "root"
    (elsewhere / "deeper").mkdir(parents=True)
    (elsewhere / "deeper" / "x").write_bytes(b"123")
    (root / ".hidden").mkdir(parents=True)
    for name in (".x", ".hidden/y", "z"):
        (root / name).write_bytes(b"")
    for name in ("one", "two"):
        (root / name).symlink_to(elsewhere)
    os.mkfifo(root / "pipe")
    found = [(entry.name, entry.size) for entry in storage.list_files(str(root))]
    assert found == [("one/deeper/x", 3), ("two/deeper/x", 3), ("z", 0)]
    (root / "gone").symlink_to(tmp_path / "no-such-file")
    with pytest.raises(UnavailableError, match=f"{root}/gone: No such file"):
        names_in(str(root))
    (root / "gone").unlink()
    (elsewhere / "deeper" / "back").symlink_to(root)
    with pytest.raises(UnavailableError, match="Too many levels of symbolic links"):
        names_in(str(root))
    with pytest.raises(MissingError, match="no such directory"):
        names_in(str(root / "z"))
    assert storage.list_folders(str(root)) == storage.list_folders(f"file://{root}/") == ["one", "two"]
    with pytest.raises(MissingError, match="no such file"):
        storage.list_folders(str(root / "z"))


@two_remote
@pytest.mark.parametrize("fault", [503, "truncate", "hang"])
def test_a_fault_that_passes_is_retried(place: Place, monkeypatch: pytest.MonkeyPatch, fault: int | str) -> None:
    monkeypatch.setattr(transfer, "READ_TIMEOUT", 0.2 if fault in ("hang", "stall") else 20.0)
    address = place.put("x", CONTENT)
    place.server.faults[f"{place.prefix}x"] = [fault]
    notes: list[str] = []
    assert storage.call_with_retries(address, storage.read_file, notes.append) == CONTENT
    assert len(place.server.requests) == 1 + len(notes) > 1  # on a busy machine another try may come too late
    assert all(text.startswith(f"{address}: ") for text in notes)
    if place.address.startswith("http:"):
        assert fault != "hang" or "timed out" in notes[0]


@two_remote
@pytest.mark.parametrize(("fault", "tries"), [(503, 4), (403, 1), ("reset", 4)])
def test_a_fault_that_stays_is_an_error(place: Place, fault: int | str, tries: int) -> None:
    address = place.put("x", CONTENT)
    assert storage.read_file(place.put("y", CONTENT)) == CONTENT  # which shows that the place can be asked in our way
    place.server.faults[f"{place.prefix}x"] = [fault] * 9
    before = random.getstate()
    with pytest.raises(UnavailableError, match=f"^{address}: " + (f"HTTP {fault}" if fault != "reset" else "")):
        storage.call_with_retries([address], storage.read_file)
    assert place.server.requests.count(f"{place.prefix}x") == tries
    assert random.getstate() == before, "a user's model may draw from Python's global generator"


@remote
def test_a_server_that_gives_no_parts(place: Place) -> None:
    address = place.put("x", CONTENT)
    place.server.gives_parts = False
    assert storage.read_file(address) == CONTENT
    with pytest.raises(UnavailableError, match=r"cannot send a part of a file|non-partial response when range"):
        storage.read_file(address, (0, 10))


@pytest.mark.parametrize("place", ["http"], indirect=True)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_children_have_connections_of_their_own(place: Place) -> None:
    """While the parent goes on with its own, and whatever its threads were doing."""
    expected = [b"%d" % number * 100_000 for number in range(20)]
    addresses = [place.put(str(number), content) for number, content in enumerate(expected)]
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

def fork(action):
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)

def read():
    print(storage.read_file(sys.argv[1]).decode(), flush=True)

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
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    assert lines[:3] == ["content"] * 3
    assert len(lines) == 5
    assert all("forked from a process that used object storage" in text and "'spawn'" in text for text in lines[3:])


def test_what_was_written_is_there(place: Place) -> None:
    address = f"{place.address}/a b/ü.bin"
    if place.address.startswith("http:"):
        for change in (storage.write_file, storage.create_file, lambda to, _: storage.delete_files([to])):
            with pytest.raises(UserError, match="files of a web server can only be read"):
                change(address, CONTENT)
        return
    for content in (b"", CONTENT):
        storage.write_file(address, content)
        assert storage.read_file(address) == content
    if not place.address.startswith("az:"):  # of which the server has no lists
        assert names_in(place.address) == ["a b/ü.bin"]
