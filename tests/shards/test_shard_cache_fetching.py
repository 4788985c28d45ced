"""What the cache of shards fetches, reads in place, checks and fetches again, from a server that fails on request."""

import hashlib
import os
import pickle
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from file_server import FileServer
from served_shards import DEADLINE, SPAWN, blob, content_of, fetch_only, open_all, serve, sizes_in, stalled_download

from flyte_ddp.core.errors import UserError
from flyte_ddp.shards import cache as cache_module
from flyte_ddp.shards.cache import ShardCache
from flyte_ddp.shards.index import Shard


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


@pytest.fixture
def digested(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose digests were computed, in order."""
    found: list[str] = []
    file_digest = hashlib.file_digest

    def noted(file: BinaryIO, kind: str) -> Any:
        found.append(Path(file.name).name)
        return file_digest(file, kind)

    monkeypatch.setattr(hashlib, "file_digest", noted)
    return found


def local_shard(path: Path, kind: str = "sha256") -> Shard:
    path.write_bytes(blob(0))
    return Shard(str(path), 1, 20_000, **({kind: hashlib.new(kind, blob(0)).hexdigest()} if kind else {}))


def test_a_shard_on_this_machine_is_read_where_it_is(digested: list[str], tmp_path: Path) -> None:
    """Not for a digest, where the index has none."""
    shard, cache = local_shard(tmp_path / "x.tar", ""), ShardCache(tmp_path / "cache")
    for found in (shard, shard._replace(url=f"file://{shard.url}")):
        assert content_of(cache, found) == blob(0)
        assert cache.holds_shard(found)
    assert digested == []
    assert not cache.folder.exists()


@pytest.mark.parametrize("kind", ["sha256", "md5"])
def test_damage_on_this_machine_that_leaves_the_size_as_it_was(kind: str, tmp_path: Path) -> None:
    shard, cache = local_shard(tmp_path / "x.tar", kind), ShardCache(tmp_path / "cache")
    (tmp_path / "x.tar").write_bytes(blob(0)[:-1] + b"?")
    for _ in range(2):
        with pytest.raises(UserError, match=rf"x\.tar: its {kind} is \w+, but the index lists \w+"):
            cache.open_or_download_shard(shard)
    local_shard(tmp_path / "x.tar")
    assert content_of(cache, shard) == blob(0)


def test_a_file_is_compared_with_its_digest_once_until_it_changes(digested: list[str], tmp_path: Path) -> None:
    """For all processes that share the cache; also of a change after which size and time are as before."""
    path = tmp_path / "x.tar"
    shard = local_shard(path)
    for _ in range(2):
        assert content_of(ShardCache(tmp_path / "cache"), shard) == blob(0)
    fetch_only(pickle.loads(pickle.dumps(ShardCache(tmp_path / "cache"))), shard)
    assert digested == ["x.tar"]
    before = path.stat()
    path.write_bytes(blob(1))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(UserError, match="its sha256 is"):
        ShardCache(tmp_path / "cache").open_or_download_shard(shard)
    assert digested == ["x.tar"] * 2
    (tmp_path / "file").write_text("")
    for _ in range(2):  # each time, where nothing can be written
        content_of(ShardCache(tmp_path / "file" / "cache"), local_shard(path))
    assert digested == ["x.tar"] * 4


def test_an_altered_copy_is_fetched_again(
    server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte, of the same size. An unaltered copy is hashed once, whoever uses it how often."""
    shard, cache = serve(server, "x.tar", blob(0)), ShardCache(tmp_path)
    assert content_of(cache, shard) == blob(0)
    with cache.cached_path(shard).open("r+b") as file:
        file.write(bytes([blob(0)[0] ^ 1]))
    assert content_of(cache, shard) == blob(0)
    assert server.counts == {"x.tar": 2}
    assert f"its cached copy {cache.cached_path(shard)} was altered" in capsys.readouterr().err
    monkeypatch.setattr(cache_module, "hash_file", None)
    assert [content_of(ShardCache(tmp_path), shard) for _ in range(2)] == [blob(0)] * 2


def test_shards_that_are_fetched_again_and_again_leave_one_mark_each(server: FileServer, tmp_path: Path) -> None:
    """As in each epoch of a data set that is larger than the cache."""
    shards = [serve(server, f"{number}.tar", blob(number)) for number in range(2)]
    cache = ShardCache(tmp_path, limit=len(blob(0)))
    assert [content_of(cache, shard) for shard in shards * 3] == [blob(0), blob(1)] * 3
    assert server.counts == {"0.tar": 3, "1.tar": 3}
    assert len(list((tmp_path / "verified").iterdir())) == len(shards)


def test_a_link_in_the_place_of_a_download_is_not_followed(server: FileServer, tmp_path: Path) -> None:
    shard, cache, other = serve(server, "x.tar", blob(0)), ShardCache(tmp_path / "cache"), tmp_path / "another file"
    other.write_bytes(b"of the user's")
    cache.folder.mkdir()
    cache.cached_path(shard).with_suffix(".part").symlink_to(other)
    assert content_of(cache, shard) == blob(0)
    assert other.read_bytes() == b"of the user's"


def test_shards_of_one_name_do_not_collide(server: FileServer, tmp_path: Path) -> None:
    """In another folder, or with another content at the same address; the sizes are all the same."""
    cache = ShardCache(tmp_path)
    shards = [serve(server, name, blob(seed))._replace(sha256="") for seed, name in enumerate(("a/x.tar", "b/x.tar"))]
    assert [content_of(cache, shard) for shard in shards] == [blob(0), blob(1)]
    assert content_of(cache, serve(server, "a/x.tar", blob(3))) == blob(3)
    assert [content_of(cache, shard) for shard in shards] == [blob(0), blob(1)]


@pytest.mark.parametrize(("fault", "digest"), [(503, ""), ("alter", "md5")])
def test_a_fault_that_passes_is_retried(server: FileServer, tmp_path: Path, digest: str, fault: int | str) -> None:
    cache, shard = ShardCache(tmp_path), serve(server, "x.tar", blob(0), digest=digest)
    server.faults["x.tar"] = [fault]
    assert content_of(cache, shard) == blob(0)
    assert server.counts == {"x.tar": 2}
    assert sizes_in(tmp_path) == {cache.cached_path(shard).name: 20_000}


@pytest.mark.parametrize(
    ("fault", "changes", "tries", "said"),
    [
        (404, {}, 1, "cannot be fetched .HTTP 404"),
        ("alter", {}, 2, r"differs from the index: md5 \w+ instead of \w+; copy it again, or rebuild"),
        ("longer", {}, 2, "differs from the index: 20,001 bytes instead of 20,000; copy it again, or rebuild"),
        ("", {"sha256": "0" * 64}, 2, r"differs from the index: sha256 \w+ instead of 0{64}"),  # with the right md5
    ],
)
def test_a_fault_that_stays_is_one_error_and_leaves_nothing(
    server: FileServer, tmp_path: Path, fault: int | str, changes: dict[str, str], tries: int, said: str
) -> None:
    shard = serve(server, "x.tar", blob(0), digest="md5")._replace(**changes)
    server.faults["x.tar"] = [fault] * 9
    with pytest.raises(UserError, match=f"^shard {shard.url}: {said}.*$"):
        ShardCache(tmp_path).open_or_download_shard(shard)
    assert server.counts == {"x.tar": tries}
    assert sizes_in(tmp_path) == {}


def test_a_body_that_does_not_say_how_long_it_is(server: FileServer, tmp_path: Path) -> None:
    shard = serve(server, "x.tar", blob(0))
    server.faults["x.tar"] = ["unannounced"] * 3
    assert content_of(ShardCache(tmp_path), shard) == blob(0)
    with pytest.raises(UserError, match="more than 19,999 bytes"):
        ShardCache(tmp_path).open_or_download_shard(shard._replace(size=19_999))


def test_a_killed_download_is_cleaned_up_by_whoever_fetches_next(server: FileServer, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path)
    stalling, other = (serve(server, f"{seed}.tar", blob(seed)) for seed in range(2))
    process = stalled_download(server, cache, stalling)
    part = cache.cached_path(stalling).with_suffix(".part")
    assert sizes_in(tmp_path) == {part.name: 20_000}  # its room is taken from the start
    # What another process is fetching is left alone, and who wants the same shard waits.
    assert content_of(cache, other) == blob(1)
    got: list[bytes] = []
    waiting = in_thread(lambda: got.append(content_of(cache, stalling)))
    assert part.exists()
    assert server.counts == {"0.tar": 1, "1.tar": 1}
    os.kill(process.pid or 0, signal.SIGKILL)
    waiting.join(DEADLINE)
    assert got == [blob(0)]
    assert server.counts == {"0.tar": 2, "1.tar": 1}
    assert sizes_in(tmp_path) == {cache.cached_path(shard).name: 20_000 for shard in (stalling, other)}
