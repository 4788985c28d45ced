"""The room that the cache of shards takes: its limit, what it removes and leaves alone, and full disks."""

import subprocess
import sys
from pathlib import Path

import pytest
from cli import HELPERS
from file_server import FileServer
from mounts import ALONE, need_mounts
from served_shards import DEADLINE, SPAWN, blob, content_of, hold, serve, sizes_in, stalled_download

from flyte_ddp.core.errors import UserError
from flyte_ddp.shards.cache import CacheFullError, ShardCache
from flyte_ddp.shards.index import Shard


def kept(cache: ShardCache, shards: list[Shard]) -> list[bool]:
    return [cache.holds_shard(shard) for shard in shards]


def fetch(cache: ShardCache, *shards: Shard) -> None:
    for shard in shards:
        cache.open_or_download_shard(shard).close()


def test_what_was_not_used_for_longest_is_removed(server: FileServer, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, limit=70_000)
    (tmp_path / "gone.tar").symlink_to("nowhere")  # as a file is that another process removes at this moment
    a, b, c, d = shards = [serve(server, f"{seed}.tar", blob(seed)) for seed in range(4)]
    fetch(cache, a, b, c, a)
    assert kept(cache, shards) == [True, True, True, False]
    fetch(cache, d)
    assert kept(cache, shards) == [True, False, True, True]
    fetch(cache, b)
    assert kept(cache, shards) == [True, True, False, True]
    big = serve(server, "big.tar", blob(9, 69_999))
    fetch(cache, big)
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
    with cache.open_or_download_shard(here) as file:
        fetch(cache, third, fourth)
        assert kept(cache, shards) == [True, True, False, True]
        said = r"too low by 20,000 for shards .*CACHE_BYTES"
        with cache.open_or_download_shard(fourth), pytest.raises(CacheFullError, match=said):
            cache.open_or_download_shard(third)
        assert file.read() == blob(1)
    ours.send("close")
    process.join(DEADLINE)
    with cache.open_or_download_shard(fourth), cache.open_or_download_shard(here):
        fetch(cache, third)
    assert kept(cache, shards) == [False, True, True, True]
    assert sorted(sizes_in(tmp_path).values()) == [20_000] * 3


def test_the_room_of_a_killed_download_is_given_back(server: FileServer, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, limit=40_000)
    killed, *others = [serve(server, f"{seed}.tar", blob(seed)) for seed in range(3)]
    process = stalled_download(server, cache, killed)
    process.kill()
    process.join(DEADLINE)
    with cache.open_or_download_shard(others[0]), cache.open_or_download_shard(others[1]):
        assert sizes_in(tmp_path) == {cache.cached_path(shard).name: 20_000 for shard in others}


def test_the_limit_holds_for_shards_of_unknown_size(server: FileServer, tmp_path: Path, monkeypatch) -> None:
    """Where neither the index nor the server says it, room is made as they come."""
    monkeypatch.setattr("flyte_ddp.storage.http.CHUNK_BYTES", 1000)
    a, b, c = shards = [serve(server, f"{seed}.tar", blob(seed), digest="") for seed in range(3)]
    server.faults = {f"{seed}.tar": ["unannounced"] * 2 for seed in range(3)}
    cache = ShardCache(tmp_path, limit=50_000)
    assert [content_of(cache, shard) for shard in (a, b)] == [blob(0), blob(1)]
    with cache.open_or_download_shard(a):
        assert content_of(cache, c) == blob(2)
    assert kept(cache, shards) == [True, False, True]
    assert sorted(sizes_in(tmp_path).values()) == [20_000] * 2
    with pytest.raises(UserError, match=r"limit of 15,500 bytes is below the 16,000"):
        ShardCache(tmp_path, limit=15_500).open_or_download_shard(b)
    server.requests.clear()
    with pytest.raises(UserError, match=f"shard cache {tmp_path}: its limit of 19,999 bytes is below the 20,000"):
        ShardCache(tmp_path, limit=19_999).open_or_download_shard(serve(server, "x.tar", blob(3)))
    assert server.requests == []


def test_what_others_keep_in_the_folder_stays(server: FileServer, tmp_path: Path) -> None:
    theirs = {name: bytes(4000) for name in ("data.tar", "movie.part", "0123.tar", "notes.txt")}
    for name, content in theirs.items():
        (tmp_path / name).write_bytes(content)
    cache = ShardCache(tmp_path, limit=6000)
    fetch(cache, *(serve(server, f"{number}.tar", blob(number, 5000)) for number in range(3)))
    assert {name: (tmp_path / name).read_bytes() for name in theirs} == theirs
    assert len([path for path in tmp_path.iterdir() if path.is_file()]) == len(theirs) + 1


MOUNTED = """
import os, pathlib, subprocess, sys
sys.path[:0] = sys.argv[2:]
from file_server import file_server
from served_shards import blob, serve, sizes_in
from flyte_ddp.core.errors import UserError
from flyte_ddp.shards.cache import ShardCache

folder = pathlib.Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", "none", folder], check=True)
with file_server() as server:
    shards = [serve(server, f"{seed}.tar", blob(seed, 300_000)) for seed in range(5)]
    cache = ShardCache(folder / "cache")
    for seed, shard in enumerate(shards):
        with cache.open_or_download_shard(shard) as file:
            assert file.read() == blob(seed, 300_000)
    print("kept", [cache.holds_shard(shard) for shard in shards])
    held = [cache.open_or_download_shard(shard) for shard in shards[2:]]
    try:
        cache.open_or_download_shard(shards[0])
    except UserError as error:
        print(error.message, sorted(sizes_in(cache.folder).values()))
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    print("read", cache.open_or_download_shard(shards[2]).read() == blob(2, 300_000))
    try:
        cache.open_or_download_shard(shards[0])
    except UserError as error:
        print(error.message)
"""


def test_a_really_full_and_then_read_only_disk(tmp_path: Path) -> None:
    """A file system of 1 MB in a mount namespace of its own: others make way; all in use, or read-only, is an error."""
    need_mounts(tmp_path)
    command = [*ALONE, sys.executable, "-c", MOUNTED, str(tmp_path), str(HELPERS)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    where, fix = f"cannot write {tmp_path}/cache:", "or set FLYTE_DDP_CACHE to another folder"
    assert result.stdout.splitlines() == [
        "kept [False, False, True, True, True]",
        f"{where} No space left on device; free some space, {fix} [300000, 300000, 300000]",
        "read True",
        f"{where} Read-only file system; make its folder writable, {fix}",
    ], result.stderr
