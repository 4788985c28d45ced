"""Built-in decoding, by threads or processes: what stands in for a damaged sample; an error waits for nobody."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from file_server import FileServer
from image_folders import stored, write_files
from PIL import Image
from served_shards import serve
from surroundings import s3_environment
from tars import shard_bytes

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.loading.loader_threads import LoaderThreads
from flyte_ddp.core.loading.user_functions import Augmentation
from flyte_ddp.core.loading.worker_sources import WorkerImages
from flyte_ddp.core.loading.workers import LoaderPool, start_loader_pool
from flyte_ddp.core.order.sampling import ListedOrder
from flyte_ddp.core.order.shard_order import ShardOrder, ShardSplits
from flyte_ddp.datasets.encoded.image_list import list_images
from flyte_ddp.datasets.encoded.opening import start_pool
from flyte_ddp.datasets.encoded.readers import Encoded, FileReader, ImageReader, ShardImages
from flyte_ddp.datasets.encoded.samples import BadSamples, EncodedSamples
from flyte_ddp.datasets.prepared import SampleOrder
from flyte_ddp.shards.cache import ShardCache
from flyte_ddp.shards.dataset import ShardReader
from flyte_ddp.shards.index import ShardIndex

DEADLINE = 60.0  # seconds


def test_what_users_decoding_gets_of_an_image_file(tmp_path: Path) -> None:
    """The name without its extension, and the extension in its own case."""
    write_files(tmp_path, {"photos/17.JPG": b"one", "photos/18.x.png": b"two"})
    reader = FileReader(list_images(str(tmp_path)), members=True)
    assert [reader.read_sample(number).members for number in range(2)] == [
        {".JPG": b"one", "__key__": "photos/17"},
        {".png": b"two", "__key__": "photos/18.x"},
    ]


def png(number: int) -> bytes:
    return stored(Image.new("RGB", (8, 8), (number, number, number)), "PNG")


class Images(ImageReader):
    """A reader of grey images, whose shade is their number; some are damaged, and some are never read to their end."""

    def __init__(self, bad: set[int], endless: set[int] = frozenset()) -> None:
        self.bad, self.endless = bad, endless
        self.begun, self.over = threading.Event(), threading.Event()

    def read_sample(self, sample: int) -> Encoded:
        if sample in self.endless:
            self.begun.set()
            self.over.wait(DEADLINE)
        return Encoded(b"no image" if sample in self.bad else png(sample), sample % 10, f"sample {sample}")


Load = Callable[..., WorkerImages]


@pytest.fixture
def load() -> Iterator[Load]:
    """Makes sources of images, and closes them."""
    made: list[WorkerImages] = []

    def make(
        reader: ImageReader,
        orders: list[SampleOrder],
        bad: int,
        threads: int = 1,
        *,
        processes: int = 0,
        **options: Any,
    ) -> WorkerImages:
        loader = EncodedSamples(reader, orders, BadSamples(bad), **{"size": 8, "classes": 10, **options})
        pool = start_loader_pool([loader], processes) if processes else LoaderThreads(threads)
        made.append(WorkerImages(loader, pool, torch.device("cpu")))
        return made[-1]

    yield make
    for source in made:
        source.close()


@pytest.mark.parametrize("processes", [1, 3])
def test_processes_load_what_threads_load(load: Load, tmp_path: Path, processes: int) -> None:
    """As beside a GPU: the same bits, substitutes, names and facts."""
    draws = np.random.default_rng(0)
    sizes = [(int(height), int(width), 3) for height, width in draws.integers(9, 40, (24, 2))]
    files = {
        f"{n % 3}/{n}.png": stored(Image.fromarray(draws.integers(0, 256, size, np.uint8)), "PNG")
        for n, size in enumerate(sizes)
    }
    write_files(tmp_path, {**files, "1/16.png": b"no image", "2/2.png": b""})
    listed, order = list_images(str(tmp_path)), ListedOrder(np.arange(24))
    options = {"bad": 2, "augmentation": Augmentation("resized_crop", 5)}
    by_threads, by_processes = (
        load(FileReader(listed), [order], threads=2, processes=number, **options) for number in (0, processes)
    )
    for samples, epoch in ((np.arange(24)[::-1], 0), (np.arange(7), 3), (np.arange(5, 24), None)):
        ours, others = by_processes.load_batch(samples, epoch), by_threads.load_batch(samples, epoch)
        assert torch.equal(ours.inputs, others.inputs)
        assert torch.equal(ours.targets, others.targets)
        assert ours.names == others.names == [str(listed.names[sample]) for sample in samples]
    assert by_processes.bad_samples() == by_threads.bad_samples()
    assert len(by_threads.bad_samples()) == 2
    assert by_processes.loader.replaced == by_threads.loader.replaced


@pytest.mark.parametrize(("device", "kind"), [("cpu", LoaderThreads), ("cuda", LoaderPool)])
def test_a_process_decodes_beside_a_gpu(load: Load, device: str, kind: type) -> None:
    loader = load(Images(bad=set()), [ListedOrder(np.arange(10))], bad=0).loader
    pool = start_pool([loader], 1, torch.device(device))
    assert isinstance(pool, kind)
    pool.close()


def test_a_substitute_is_of_the_same_split_and_shard(load: Load) -> None:
    """Every second sample is damaged: the next one that is not, in a circle, takes its place with its label."""
    splits = ShardSplits(np.full(3, 20), 0.2, 0.2, seed=0)
    orders = [ShardOrder(splits, split, np.ones(3)) for split in ("training", "validation", "test")]
    images = Images(bad=set(range(0, 60, 2)))
    loading = load(images, orders, bad=30)
    for order in orders:
        samples = sorted(order.samples_at(slice(0, len(order))).tolist())
        for shard in range(3):
            own = [sample for sample in samples if sample // 20 == shard]
            good = [sample for sample in own if sample % 2]
            pixels, labels, _ = loading.load_batch(np.array(own), None)
            expected = [min([other for other in good if other >= sample] or good) for sample in own]
            assert pixels[:, 4, 4, 0].tolist() == expected
            assert labels.tolist() == [sample % 10 for sample in expected]
    assert loading.bad_samples() == {f"sample {number}" for number in images.bad}


def test_no_decodable_substitute_is_an_error(load: Load) -> None:
    loading = load(Images(bad={3, 4, 5}), [ListedOrder(np.array([3, 4, 5]))], bad=9)
    with pytest.raises(UserError, match=r"^sample 4: neither .* 2 substitutes can be decoded"):
        loading.load_batch(np.array([4]), None)


def test_images_of_a_store_are_asked_for_at_the_same_time(load: Load, server: FileServer, monkeypatch) -> None:
    """No answer comes before sixteen have been asked for, although one thread decodes."""
    s3_environment(server.url, monkeypatch)
    server.files = {f"bucket/a/{number}.png": png(number) for number in range(16)}
    listed = list_images("s3://bucket")
    server.before_answer = threading.Barrier(16)
    pixels = load(FileReader(listed), [ListedOrder(np.arange(16))], bad=0).load_batch(np.arange(16), None).inputs
    assert sorted(pixels[:, 0, 0, 0].tolist()) == list(range(16))


def test_an_image_that_is_damaged_in_the_cache_is_named_with_its_file(load: Load, server, tmp_path: Path) -> None:
    """The shard's structure is whole, so that only the decoder can notice."""
    contents = {f"{number}": {".png": png(number), ".cls": b"1"} for number in range(3)}
    shard, cache = serve(server, "0.tar", shard_bytes(contents))._replace(samples=3), ShardCache(tmp_path)
    loading = load(ShardImages(ShardReader(ShardIndex("", [shard]), cache)), [ListedOrder(np.arange(3))], bad=0)
    assert loading.load_batch(np.arange(3), None).inputs[:, 0, 0, 0].tolist() == [0, 1, 2]
    damaged = bytearray(cache.cached_path(shard).read_bytes())
    damaged[damaged.index(b"IDAT") + 8] ^= 0xFF
    cache.cached_path(shard).write_bytes(damaged)
    with pytest.raises(UserError, match=rf"sample '0' in .* cannot be decoded: .*cached in {cache.cached_path(shard)}"):
        loading.load_batch(np.arange(3), None)
    reader = ShardImages(ShardReader(ShardIndex("", [shard]), cache), members=True)
    assert str(cache.cached_path(shard)) in reader.read_sample(0).copy, "also for the user's own decoding"
