"""The map-style data set in several processes and threads, which share its open shards and the room of their cache."""

import gc
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from file_server import FileServer
from served_shards import DEADLINE, serve_samples

from flyte_ddp.shards.cache import ShardCache
from flyte_ddp.shards.dataset import ShardDataset, ShardReader


class LabelsAndSums(ShardDataset):
    """Numbers, labels, and sums of contents."""

    def __getitem__(self, number: Any) -> Any:
        sample = super().__getitem__(number)
        return sample["__index__"], sample[".cls"], sum(sample[".bin"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_in_workers_of_a_data_loader(server: FileServer, tmp_path: Path) -> None:
    """In a cache that cannot hold all of it, and with shards that the parent has open already."""
    served = serve_samples(server, 20, 20, 20, 20, 20, 20)
    limit = max(shard.size for shard in served.index.shards) * 5
    dataset = LabelsAndSums(served.index, ShardCache(tmp_path, limit))
    expected = [[i, int(found[".cls"]), sum(found[".bin"])] for i, (_, found) in enumerate(served.expected())]
    assert list(dataset[0]) == expected[0]
    order = random.Random(0).sample(range(120), 120)
    options = {"batch_size": 8, "sampler": order, "num_workers": 2, "persistent_workers": True}
    loader = torch.utils.data.DataLoader(dataset, multiprocessing_context="fork", **options)  # type: ignore[arg-type]
    for _ in range(2):
        rows = [list(row) for batch in loader for row in zip(*(column.tolist() for column in batch), strict=True)]
        assert rows == [expected[i] for i in order]
    del loader
    assert sum(path.stat().st_size for path in tmp_path.glob("*.tar")) <= limit


def test_threads_share_a_reader(server: FileServer, tmp_path: Path) -> None:
    """Each shard is opened once as long as it stays open, what a thread reads from stays open, and in the end none."""
    served = serve_samples(server, *[12] * 6)
    reader = ShardReader(served.index, ShardCache(tmp_path), most_open=2)
    expected = served.expected()
    order = [random.Random(seed).sample(range(72), 72) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda numbers: [reader.read_sample(i) for i in numbers], order))
    assert found == [[expected[i] for i in numbers] for numbers in order]
    assert server.counts == {f"{shard}.tar": 1 for shard in range(6)}
    assert len(open_files(tmp_path)) == 2
    reader.close()
    assert open_files(tmp_path) == []
    assert reader.read_sample(0) == expected[0]  # it opens them again
    reader.itself = reader  # type: ignore[attr-defined]  # a circle, of which Python takes apart what it likes first
    reader = None  # type: ignore[assignment]
    gc.collect()
    assert open_files(tmp_path) == []


def open_files(folder: Path) -> list[os.stat_result]:
    """The files of a cache that this process has open."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # another thread has closed it
            if str(path.readlink()).startswith(str(folder)):
                found.append(path.stat())
    return found


def test_shards_are_fetched_ahead(server: FileServer, tmp_path: Path) -> None:
    served = serve_samples(server, 3, 3, 3)
    server.faults["2.tar"] = [404]
    reader = ShardReader(served.index, ShardCache(tmp_path))
    for _ in range(3):
        reader.prefetch_in_threads([0, 1, 2])
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]:
        thread.join(DEADLINE)
    assert [reader.cache.holds_shard(shard) for shard in served.index.shards] == [True, True, False]
    assert server.counts == {"0.tar": 1, "1.tar": 1, "2.tar": 1}
    assert [reader.read_sample(i) for i in range(9)] == served.expected()
    assert server.counts == {"0.tar": 1, "1.tar": 1, "2.tar": 2}


def test_a_cache_with_room_for_one_shard_is_enough(server: FileServer, tmp_path: Path) -> None:
    """Shards that are merely kept open make way, with their room on the disk; threads wait until others have read."""
    served = serve_samples(server, *[6] * 5)
    cache = ShardCache(tmp_path, limit=max(shard.size for shard in served.index.shards))
    reader, other = (ShardReader(served.index, cache) for _ in range(2))
    expected = served.expected()
    for _ in range(2):
        assert [reader.read_sample(i) for i in range(30)] == expected
    assert other.read_sample(0) == expected[0]
    assert {status.st_blocks for status in open_files(tmp_path) if not status.st_nlink} == {0}
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(reader.read_sample, range(29, -1, -1))) == expected[::-1]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_neither_waits_for_its_parents_locks_nor_frees_them(server: FileServer, tmp_path: Path) -> None:
    """It is forked while another thread holds the reader's lock, closes what it has inherited, and reads itself."""
    served = serve_samples(server, 5, 5)
    cache = ShardCache(tmp_path)
    path = cache.cached_path(served.index.shards[0])
    reader = ShardReader(served.index, cache)
    first = reader.read_sample(0)
    reading, writing = os.pipe()
    with reader.hold_shard_open(0) as shard:
        with reader.open_shards.lock, shard.lock:
            child = os.fork()
            if child == 0:
                found = reader.read_sample(0)
                reader.close()
                os.write(writing, b"same" if found == first else b"not the same")
                os._exit(0)
        assert os.read(reading, 20) == b"same"
        assert os.waitpid(child, 0)[1] == 0
        assert cache.evict_file_if_unlocked(path) == 0  # the parent's lock is still there
        assert reader.read_sample(0) == first
    assert cache.evict_file_if_unlocked(path) > 0
    os.close(reading)
    os.close(writing)
