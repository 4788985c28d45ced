"""Jobs that share a cache which is far too small for them, while some of them are killed."""

import multiprocessing
import random
import signal
from pathlib import Path

import pytest
from file_server import FileServer
from served_shards import digest_of_sample, read_at_random, serve_samples, sizes_in

from flyte_ddp.shards.cache import ShardCache

SPAWN = multiprocessing.get_context("spawn")
PROCESSES, KILLS, SHARDS = 3, 4, 16


@pytest.mark.slow
def test_jobs_in_a_small_cache_read_what_is_right_within_the_limit(server: FileServer, tmp_path: Path) -> None:
    """And every one of them comes to its end, whenever others are killed; in the end nothing half-written is there."""
    served = serve_samples(server, *[30] * SHARDS)
    digests = [digest_of_sample(key, found) for key, found in served.expected()]
    limit = int(served.index.sizes.max()) * 4
    caches = [ShardCache(tmp_path, limit=limit) for _ in range(PROCESSES)]
    chosen, seeds = random.Random(0), iter(range(1000))

    def start(cache: ShardCache) -> multiprocessing.process.BaseProcess:
        process = SPAWN.Process(
            target=read_at_random, args=(cache, served.index, digests, 80, next(seeds)), daemon=True
        )
        process.start()
        return process

    running = [start(cache) for cache in caches]
    kills = sorted(chosen.sample(range(30, 150), KILLS))  # when the server has been asked so often
    most = 0
    while any(process.is_alive() for process in running):
        with caches[0].hold_lock("room"):  # a file gets its final name under this lock
            most = max(most, sum(sizes_in(tmp_path).values()))
        if kills and len(server.requests) >= kills[0]:
            kills.pop(0)
            victim = chosen.choice([number for number, process in enumerate(running) if process.is_alive()])
            running[victim].kill()
            running[victim].join()
            assert running[victim].exitcode == -signal.SIGKILL
            running[victim] = start(caches[victim])
        running[chosen.randrange(PROCESSES)].join(0.005)
    assert [process.exitcode for process in running] == [0] * PROCESSES
    assert kills == []
    assert limit / 2 < most <= limit
    with caches[0].open_shard(served.index.shards[0]):
        assert {Path(name).suffix for name in sizes_in(tmp_path)} == {".tar"}
