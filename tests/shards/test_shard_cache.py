"""The cache of shards: what it fetches, checks, keeps and removes, against a server that fails on request."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from cli import HELPERS
from file_server import FileServer, file_server
from mounts import ALONE, need_mounts
from served_shards import blob, fetch_only, hold, open_all, serve, sizes_in

from flyte_ddp import locks
from flyte_ddp.errors import UserError
from flyte_ddp.shards import cache as cache_module
from flyte_ddp.shards.cache import CacheFullError, ShardCache
from flyte_ddp.shards.index import Shard
from flyte_ddp.storage import failures

SPAWN = multiprocessing.get_context("spawn")
DEADLINE = 60.0  # seconds, for a machine that is busy


def content_of(cache: ShardCache, shard: Shard) -> bytes:
    with cache.open(shard) as file:
        return file.read()


def kept(cache: ShardCache, shards: list[Shard]) -> list[bool]:
    return [cache.holds(shard) for shard in shards]


def in_thread(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def test_a_shard_is_fetched_once_for_all_threads_of_all_processes(server: FileServer, tmp_path: Path) -> None:
    shards = [serve(server, f"{seed}.tar", blob(seed)) for seed in range(12)]
    cache, barrier = ShardCache(tmp_path / "cache"), SPAWN.Barrier(3)
    running = [SPAWN.Process(target=open_all, args=(cache, shards, 4, seed, barrier), daemon=True) for seed in range(3)]
    for process in running:
        process.start()
    for process in running:
        process.join(DEADLINE)
    assert [process.exitcode for process in running] == [0, 0, 0]
    assert server.counts == {f"{seed}.tar": 1 for seed in range(12)}
    assert len(sizes_in(cache.folder)) == 12


def test_a_shard_is_on_the_disk_before_it_has_its_name(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, cache = serve(server, "a.tar", blob(1)), ShardCache(tmp_path)
    path = cache.path_of(shard)
    synced = []
    sync = os.fsync

    def note(file: int) -> None:
        synced.append((os.fstat(file).st_ino, os.fstat(file).st_size, path.exists()))
        sync(file)

    monkeypatch.setattr(os, "fsync", note)
    assert content_of(cache, shard) == blob(1)
    assert synced == [(path.stat().st_ino, len(blob(1)), False)]


def test_a_shard_on_this_machine_is_read_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(b"content")
    cache = ShardCache(tmp_path / "cache")
    for url in (f"{tmp_path}/x.tar", f"file://{tmp_path}/x.tar"):
        assert content_of(cache, Shard(url, 1, 7)) == b"content"
        assert cache.holds(Shard(url, 1, 7))
    assert not cache.folder.exists()
    with pytest.raises(UserError, match=r"x\.tar: has 7 bytes and not the 8 that the index says"):
        cache.open(Shard(f"{tmp_path}/x.tar", 1, 8))
    with pytest.raises(UserError, match=r"y\.tar: cannot be fetched \(No such file or directory\)"):
        cache.open(Shard(f"{tmp_path}/y.tar", 1))


class TestShardsOnThisMachine:
    """They are compared with their digests as fetched ones are, once."""

    @pytest.fixture
    def read(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The shards that were read for that, in order."""
        found: list[str] = []
        file_digest = hashlib.file_digest

        def noted(file: BinaryIO, kind: str) -> Any:
            found.append(Path(file.name).name)
            return file_digest(file, kind)

        monkeypatch.setattr(hashlib, "file_digest", noted)
        return found

    @staticmethod
    def shard(path: Path, kind: str = "sha256") -> Shard:
        path.write_bytes(blob(0))
        return Shard(str(path), 1, 20_000, **({kind: hashlib.new(kind, blob(0)).hexdigest()} if kind else {}))

    @pytest.mark.parametrize("kind", ["sha256", "md5"])
    def test_one_that_is_damaged_without_a_change_of_its_size(self, kind: str, tmp_path: Path) -> None:
        shard = self.shard(tmp_path / "x.tar", kind)
        with (tmp_path / "x.tar").open("r+b") as file:
            file.seek(9000)
            file.write(b"damage")
        for _ in range(2):
            with pytest.raises(UserError, match=rf"x\.tar: its {kind} is \w+ and not the \w+ that the index says"):
                ShardCache(tmp_path / "cache").open(shard)
        self.shard(tmp_path / "x.tar")
        assert content_of(ShardCache(tmp_path / "cache"), shard) == blob(0)

    def test_once_is_enough_until_the_file_changes(self, read: list[str], tmp_path: Path) -> None:
        """For all processes that share the cache; also of a change after which size and time are as before."""
        path = tmp_path / "x.tar"
        shard = self.shard(path)
        for _ in range(3):
            assert content_of(ShardCache(tmp_path / "cache"), shard) == blob(0)
        fetch_only(pickle.loads(pickle.dumps(ShardCache(tmp_path / "cache"))), shard)
        assert read == ["x.tar"]
        before = path.stat()
        path.write_bytes(blob(1))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(UserError, match="its sha256 is"):
            ShardCache(tmp_path / "cache").open(shard)
        assert read == ["x.tar"] * 2

    def test_one_without_a_digest_is_not_read_for_one(self, read: list[str], tmp_path: Path) -> None:
        assert content_of(ShardCache(tmp_path / "cache"), self.shard(tmp_path / "x.tar", "")) == blob(0)
        assert read == []
        assert not (tmp_path / "cache").exists()

    def test_threads_do_it_once(self, read: list[str], tmp_path: Path) -> None:
        shard, cache = self.shard(tmp_path / "x.tar"), ShardCache(tmp_path / "cache")
        begin = threading.Barrier(4)

        def opened() -> None:
            begin.wait(DEADLINE)
            cache.open(shard).close()

        running = [in_thread(opened) for _ in range(4)]
        for thread in running:
            thread.join(DEADLINE)
        assert read == ["x.tar"]

    def test_where_nothing_can_be_written_it_is_done_each_time(self, read: list[str], tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        shard, cache = self.shard(tmp_path / "x.tar"), ShardCache(tmp_path / "file" / "cache")
        for _ in range(2):
            assert content_of(cache, shard) == blob(0)
        assert read == ["x.tar"] * 2


def test_shards_of_one_name_do_not_collide(server: FileServer, tmp_path: Path) -> None:
    """In another folder, on another server, or with another content at the same address; the sizes are all the same."""
    cache = ShardCache(tmp_path)
    with file_server() as other:
        places = [(server, "a/x.tar"), (server, "b/x.tar"), (other, "a/x.tar")]
        shards = [serve(at, name, blob(seed))._replace(sha256="") for seed, (at, name) in enumerate(places)]
        before = [content_of(cache, shard) for shard in shards]
        renewed = serve(server, "a/x.tar", blob(3))
        assert content_of(cache, renewed) == blob(3)
        assert [content_of(cache, shard) for shard in shards] == before == [blob(0), blob(1), blob(2)]
    with_neither = [Shard("http://h/x", 1, -1), Shard("http://h/x", 1, 5), Shard("http://h/x", 1, 5, md5="0" * 32)]
    assert len({cache.path_of(shard) for shard in with_neither}) == 3


FAULTS = [500, 503, 429, "truncate", "reset", "alter", "longer"]


@pytest.mark.parametrize("digest", ["sha256", "md5"])
@pytest.mark.parametrize("fault", [*FAULTS, "hang", "stall"])
def test_a_fault_that_passes_is_retried(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digest: str, fault: int | str
) -> None:
    monkeypatch.setattr(failures, "READ_TIMEOUT", 0.2 if fault in ("hang", "stall") else 20.0)
    cache = ShardCache(tmp_path)
    shard = serve(server, "x.tar", blob(0), digest=digest)
    server.faults["x.tar"] = [fault]
    assert content_of(cache, shard) == blob(0)
    assert server.counts == {"x.tar": 2}
    assert sizes_in(tmp_path) == {cache.path_of(shard).name: 20_000}


@pytest.mark.parametrize(
    ("fault", "tries", "said"),
    [
        (404, 1, "cannot be fetched .HTTP 404"),
        (403, 1, "cannot be fetched .HTTP 403"),
        (503, 4, "cannot be fetched .HTTP 503"),
        ("truncate", 4, "cannot be fetched .IncompleteRead"),
        ("reset", 4, "cannot be fetched"),
        ("alter", 2, r"is not the one in the index: (sha256|md5) \w+ instead of \w+; copy it again, or renew"),
        ("longer", 2, "is not the one in the index: 20,001 bytes instead of 20,000; copy it again, or renew"),
    ],
)
@pytest.mark.parametrize("digest", ["sha256", "md5"])
def test_a_fault_that_stays_is_one_error_and_leaves_nothing(
    server: FileServer, tmp_path: Path, fault: int | str, tries: int, said: str, digest: str
) -> None:
    shard = serve(server, "x.tar", blob(0), digest=digest)
    server.faults["x.tar"] = [fault] * 9
    with pytest.raises(UserError, match=f"^shard {shard.url}: {said}") as caught:
        ShardCache(tmp_path).open(shard)
    assert len(caught.value.message.splitlines()) == 1
    assert server.counts == {"x.tar": tries}
    assert sizes_in(tmp_path) == {}


def test_a_body_that_does_not_say_how_long_it_is(server: FileServer, tmp_path: Path) -> None:
    shard = serve(server, "x.tar", blob(0))
    server.faults["x.tar"] = ["unannounced"]
    assert content_of(ShardCache(tmp_path), shard) == blob(0)
    shorter = shard._replace(size=19_999)
    server.faults["x.tar"] = ["unannounced"] * 2
    with pytest.raises(UserError, match="more than 19,999 bytes"):
        ShardCache(tmp_path).open(shorter)


def test_a_killed_download_is_cleaned_up_by_whoever_fetches_next(server: FileServer, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path)
    stalling, other = (serve(server, f"{seed}.tar", blob(seed)) for seed in range(2))
    server.faults["0.tar"] = ["stall"]
    process = SPAWN.Process(target=fetch_only, args=(cache, stalling), daemon=True)
    process.start()
    assert server.stalled.wait(DEADLINE)
    part = cache.path_of(stalling).with_suffix(".part")
    assert sizes_in(tmp_path) == {part.name: 20_000}  # its room is taken from the start
    # What another process is fetching is left alone, and who wants the same shard waits.
    assert content_of(cache, other) == blob(1)
    got: list[bytes] = []
    waiting = in_thread(lambda: got.append(content_of(cache, stalling)))
    assert part.exists()
    assert server.counts == {"0.tar": 1, "1.tar": 1}
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join(DEADLINE)
    waiting.join(DEADLINE)
    assert got == [blob(0)]
    assert server.counts == {"0.tar": 2, "1.tar": 1}
    assert sizes_in(tmp_path) == {cache.path_of(shard).name: 20_000 for shard in (stalling, other)}


def test_what_a_killed_download_left_makes_room_for_others(server: FileServer, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, limit=20_000)
    stalling, other = (serve(server, f"{seed}.tar", blob(seed)) for seed in range(2))
    server.faults["0.tar"] = ["stall"]
    process = SPAWN.Process(target=fetch_only, args=(cache, stalling), daemon=True)
    process.start()
    assert server.stalled.wait(DEADLINE)
    with pytest.raises(CacheFullError):  # a download that goes on has its room
        cache.open(other)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join(DEADLINE)
    assert content_of(cache, other) == blob(1)
    assert sizes_in(tmp_path) == {cache.path_of(other).name: 20_000}


def test_what_was_not_used_for_longest_is_removed(server: FileServer, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, limit=70_000)
    (tmp_path / "gone.tar").symlink_to("nowhere")  # as a file is that another process removes at this moment
    a, b, c, d = shards = [serve(server, f"{seed}.tar", blob(seed)) for seed in range(4)]
    for shard in (a, b, c, a):
        cache.open(shard).close()
    assert kept(cache, shards) == [True, True, True, False]
    cache.open(d).close()
    assert kept(cache, shards) == [True, False, True, True]
    cache.open(b).close()
    assert kept(cache, shards) == [True, True, False, True]
    big = serve(server, "big.tar", blob(9, 69_999))
    cache.open(big).close()
    assert kept(cache, [*shards, big]) == [False, False, False, False, True]
    assert server.counts == {"0.tar": 1, "1.tar": 2, "2.tar": 1, "3.tar": 1, "big.tar": 1}


def test_what_is_open_stays(server: FileServer, tmp_path: Path) -> None:
    """Here or in another process, even if it was not used for longest."""
    cache = ShardCache(tmp_path, limit=60_000)
    held, here, third, fourth = shards = [serve(server, f"{seed}.tar", blob(seed)) for seed in range(4)]
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=hold, args=(cache, held, theirs), daemon=True)
    process.start()
    assert ours.poll(DEADLINE)
    with cache.open(here) as file:
        cache.open(third).close()
        cache.open(fourth).close()
        assert kept(cache, shards) == [True, True, False, True]
        with cache.open(fourth), pytest.raises(CacheFullError, match=r"too low by 20,000 for the shards .*CACHE_BYTES"):
            cache.open(third)
        assert file.read() == blob(1)
    ours.send("close")
    process.join(DEADLINE)
    with cache.open(fourth), cache.open(here):
        cache.open(third).close()
    assert kept(cache, shards) == [False, True, True, True]
    assert sorted(sizes_in(tmp_path).values()) == [20_000] * 3


def test_a_limit_below_one_shard_is_an_error_of_its_own(server: FileServer, tmp_path: Path) -> None:
    shard = serve(server, "x.tar", blob(0))
    with pytest.raises(UserError, match=f"shard cache {tmp_path}: its limit of 19,999 bytes is less than the 20,000"):
        ShardCache(tmp_path, limit=19_999).open(shard)
    assert sizes_in(tmp_path) == {}
    assert server.requests == []


def test_the_limit_holds_for_shards_of_unknown_size(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where neither the index nor the server says it, room is made as they come."""
    monkeypatch.setattr(cache_module, "STEP", 5000)
    monkeypatch.setattr("flyte_ddp.storage.http.CHUNK_BYTES", 1000)
    a, b, c = shards = [serve(server, f"{seed}.tar", blob(seed), digest="") for seed in range(3)]
    server.faults = {f"{seed}.tar": ["unannounced"] for seed in range(3)}
    cache = ShardCache(tmp_path, limit=50_000)
    assert [content_of(cache, shard) for shard in (a, b)] == [blob(0), blob(1)]
    with cache.open(a):
        assert content_of(cache, c) == blob(2)
    assert kept(cache, shards) == [True, False, True]
    assert sorted(sizes_in(tmp_path).values()) == [20_000] * 2
    server.faults["1.tar"] = ["unannounced"]
    with pytest.raises(UserError, match=r"limit of 15,500 bytes is less than the 16,000 of one shard"):
        ShardCache(tmp_path, limit=15_500).open(b)


@pytest.mark.parametrize("while_open", [False, True])
def test_a_copy_that_was_cut_short_is_fetched_again(server: FileServer, tmp_path: Path, while_open: bool) -> None:
    cache = ShardCache(tmp_path)
    shard = serve(server, "x.tar", blob(0))
    with ExitStack() as stack:
        file = cache.open(shard)
        if while_open:
            stack.enter_context(file)
        else:
            file.close()
        os.truncate(cache.path_of(shard), 100)
        assert content_of(cache, shard) == blob(0)
    assert server.counts == {"x.tar": 2}


def test_what_others_keep_in_the_folder_stays(server: FileServer, tmp_path: Path) -> None:
    """Also under names that end like the cache's own, and where there is no room without them."""
    theirs = {name: bytes(4000) for name in ("data.tar", "movie.part", "0123.tar", "notes.txt")}
    for name, content in theirs.items():
        (tmp_path / name).write_bytes(content)
    cache = ShardCache(tmp_path, limit=6000)
    for number in range(3):
        content = blob(number, 5000)
        assert content_of(cache, serve(server, f"{number}.tar", content)) == content
    assert {name: (tmp_path / name).read_bytes() for name in theirs} == theirs
    assert len([path for path in tmp_path.iterdir() if path.is_file()]) == len(theirs) + 1


def test_healing_fetches_only_what_is_damaged(server: FileServer, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path)
    shard = serve(server, "x.tar", blob(0))
    assert content_of(cache, shard) == blob(0)
    assert not cache.heal(shard)
    path = cache.path_of(shard)
    path.write_bytes(b"\0" + path.read_bytes()[1:])
    assert cache.heal(shard)
    assert content_of(cache, shard) == blob(0)
    without = serve(server, "x.tar", blob(0), digest="")
    assert content_of(cache, without) == blob(0)
    assert not cache.heal(without)  # nobody can know
    assert cache.heal(without, damaged=True)  # but somebody does
    assert not cache.holds(without)


def test_locks_do_not_stay_with_forked_children(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that was forked during a download has its locks, too, and never closes them."""
    monkeypatch.setattr(locks, "LOCKS", 1)
    monkeypatch.setattr(failures, "READ_TIMEOUT", 0.5)
    cache = ShardCache(tmp_path)
    first, second = (serve(server, f"{seed}.tar", blob(seed)) for seed in range(2))
    server.faults["0.tar"] = ["stall"]
    fetching = in_thread(lambda: content_of(cache, first))
    assert server.stalled.wait(DEADLINE)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        fetching.join(DEADLINE)
        got: list[bytes] = []
        in_thread(lambda: got.append(content_of(cache, second))).join(DEADLINE)
        assert got == [blob(1)]
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


def test_a_cache_can_go_to_another_process() -> None:
    cache = ShardCache(Path("a"), limit=5)
    assert pickle.loads(pickle.dumps(cache)) == cache


def test_a_folder_that_is_none(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shard = serve(server, "x.tar", blob(0))
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=f"^shard cache {folder}: .*FLYTE_DDP_CACHE to another folder"):
            ShardCache(folder).open(shard)


MOUNTED = """
import os, pathlib, subprocess, sys
sys.path[:0] = sys.argv[2:]
from file_server import file_server
from served_shards import blob, serve, sizes_in
from flyte_ddp.errors import UserError
from flyte_ddp.shards.cache import ShardCache

folder = pathlib.Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", "none", folder], check=True)
with file_server() as server:
    shards = [serve(server, f"{seed}.tar", blob(seed, 300_000)) for seed in range(5)]
    cache = ShardCache(folder / "cache")
    for seed, shard in enumerate(shards):
        with cache.open(shard) as file:
            assert file.read() == blob(seed, 300_000)
    print("kept", [cache.holds(shard) for shard in shards])
    held = [cache.open(shard) for shard in shards[2:]]
    try:
        cache.open(shards[0])
    except UserError as error:
        print(error.message, sorted(sizes_in(cache.folder).values()))
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    print("read", cache.open(shards[2]).read() == blob(2, 300_000))
    try:
        cache.open(shards[0])
    except UserError as error:
        print(error.message)
"""


def test_a_really_full_and_then_read_only_disk(tmp_path: Path) -> None:
    """A file system of 1 MB in a mount namespace of its own: others make way; all in use, or read-only, is an error."""
    need_mounts(tmp_path)
    command = [*ALONE, sys.executable, "-c", MOUNTED, str(tmp_path), str(HELPERS)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    where, fix = f"shard cache {tmp_path}/cache:", "or set FLYTE_DDP_CACHE to another folder"
    assert result.stdout.splitlines() == [
        "kept [False, False, True, True, True]",
        f"{where} No space left on device; free some space, {fix} [300000, 300000, 300000]",
        "read True",
        f"{where} Read-only file system; make it writable, {fix}",
    ], result.stderr


def test_digests_are_checked_by_the_algorithm_that_the_index_has(server: FileServer, tmp_path: Path) -> None:
    """A right MD5 does not make up for a wrong SHA-256."""
    content = blob(0)
    right = hashlib.md5(content).hexdigest()
    shard = serve(server, "x.tar", content, digest="md5")._replace(sha256="0" * 64)
    with pytest.raises(
        UserError, match=re.escape(f"sha256 {hashlib.sha256(content).hexdigest()} instead of {'0' * 64}")
    ):
        ShardCache(tmp_path).open(shard)
    assert content_of(ShardCache(tmp_path), shard._replace(sha256="", md5=right)) == content
    assert Counter(server.requests) == {"x.tar": 3}
