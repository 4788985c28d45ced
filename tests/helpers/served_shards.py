"""Put shards on a server, and read the shards in other processes through a cache."""

import hashlib
import multiprocessing
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
from file_server import FileServer
from tars import Samples, samples, shard_bytes

from flyte_ddp.shards.cache import ShardCache
from flyte_ddp.shards.dataset import ShardDataset
from flyte_ddp.shards.index import Shard, ShardIndex
from flyte_ddp.storage import transfer

SPAWN = multiprocessing.get_context("spawn")
DEADLINE = 60.0  # seconds, for a machine that is busy
SHORT = 0.001  # seconds, for pauses between tries


def blob(seed: int, size: int = 20_000) -> bytes:
    """Return bytes in place of a shard: a cache does not parse shards."""
    return np.random.default_rng(seed).bytes(size)


def serve(server: FileServer, name: str, content: bytes, *, digest: str = "sha256") -> Shard:
    """Put a shard on the server, and return the shard's entry for an index."""
    server.files[name] = content
    digests = {"md5": hashlib.md5(content).hexdigest(), "sha256": hashlib.sha256(content).hexdigest()}
    known = {kind: value for kind, value in digests.items() if kind == digest}
    return Shard(f"{server.url}/{name}", 0, len(content) if digest else -1, **known)


@dataclass(frozen=True)
class Served:
    """An index of shards on a server, and the shards' contents."""

    index: ShardIndex
    contents: tuple[Samples, ...]

    def expected(self) -> list[tuple[str, dict[str, bytes]]]:
        """Return all samples in order."""
        return [(key, dict(found)) for shard in self.contents for key, found in shard.items()]


def serve_samples(server: FileServer, *counts: int, digest: str = "sha256") -> Served:
    """Put shards with these numbers of samples on the server."""
    contents = tuple(samples(count, seed, f"{seed}/") for seed, count in enumerate(counts))
    shards = [
        serve(server, f"{number}.tar", shard_bytes(found), digest=digest)._replace(samples=len(found))
        for number, found in enumerate(contents)
    ]
    return Served(ShardIndex("served", shards), contents)


def open_all(cache: ShardCache, shards: Sequence[Shard], threads: int, seed: int, barrier: Barrier) -> None:
    """Open all shards in each thread, in different orders. Exit with the number of wrong contents."""
    transfer.FIRST_DELAY = SHORT

    def read(thread: int) -> int:
        wrong = 0
        for shard in random.Random(f"{seed} {thread}").sample(list(shards), len(shards)):
            with cache.open_or_download_shard(shard) as file:
                wrong += hashlib.sha256(file.read()).hexdigest() != shard.sha256
        return wrong

    barrier.wait(60)
    with ThreadPoolExecutor(threads) as pool:
        sys.exit(sum(pool.map(read, range(threads))))


def hold(cache: ShardCache, shard: Shard, pipe: Connection) -> None:
    """Keep a shard open until a message comes through the pipe."""
    with cache.open_or_download_shard(shard):
        pipe.send("open")
        pipe.recv()


def fetch_only(cache: ShardCache, shard: Shard) -> None:
    """Fetch a shard by opening and closing the shard."""
    cache.open_or_download_shard(shard).close()


def stalled_download(server: FileServer, cache: ShardCache, shard: Shard) -> SpawnProcess:
    """Return a running process whose download of a shard has stalled halfway."""
    server.faults[shard.url.rpartition("/")[2]] = ["stall"]
    process = SPAWN.Process(target=fetch_only, args=(cache, shard), daemon=True)
    process.start()
    assert server.stalled.wait(DEADLINE)
    return process


def sizes_in(folder: Path) -> dict[str, int]:
    """Return the sizes of the files in a cache's folder by name, without locks and marks."""
    found = {}
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # removed in the meantime
            found |= {path.name: path.stat().st_size} if path.name not in ("locks", "verified") else {}
    return found


def content_of(cache: ShardCache, shard: Shard) -> bytes:
    with cache.open_or_download_shard(shard) as file:
        return file.read()


def members_of(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if name.startswith(".")}


def all_of(dataset: ShardDataset) -> list[tuple[str, dict[str, Any]]]:
    return [(sample["__key__"], members_of(sample)) for sample in (dataset[i] for i in range(len(dataset)))]


def contents(index: Path) -> list[dict[str, Any]]:
    """Return all samples of an index on this machine."""
    return list(ShardDataset(index, index.parent / "cache", decode=False))
