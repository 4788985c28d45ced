"""Decoding by threads: what stands in for a damaged sample, and that an error waits for nobody."""

import io
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from file_server import FileServer
from PIL import Image
from surroundings import s3_environment

from flyte_ddp.datasets.image_folder import list_images
from flyte_ddp.errors import UserError
from flyte_ddp.loading.encoded import BadSamples, Encoded, EncodedImages, ImageReader
from flyte_ddp.loading.readers import FileReader
from flyte_ddp.loading.opening import find_substitutes
from flyte_ddp.order.sampling import Indices, ListedOrder
from flyte_ddp.order.shard_order import ShardOrder, ShardSplits

DEADLINE = 60.0  # seconds


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (number, number, number)).save(buffer, "PNG")
    return buffer.getvalue()


class Images(ImageReader):
    """A reader of grey images, whose shade is their number; some are damaged, and some are never read to their end."""

    def __init__(self, bad: set[int], endless: set[int] = frozenset()) -> None:
        self.bad, self.endless = bad, endless
        self.begun, self.over = threading.Event(), threading.Event()
        self.reads, self.heals = Counter[int](), Counter[int]()

    def read(self, sample: int) -> Encoded:
        self.reads[sample] += 1
        if sample in self.endless:
            self.begun.set()
            self.over.wait(DEADLINE)
        return Encoded(b"no image" if sample in self.bad else png(sample), sample % 10, f"sample {sample}")

    def refetch_if_damaged(self, sample: int) -> None:
        self.heals[sample] += 1


def loader(
    images: ImageReader, substitutes: Callable[[int], Indices], bad_samples: int, threads: int = 1
) -> EncodedImages:
    return EncodedImages(
        images,
        size=8,
        crop="none",
        seed=0,
        classes=10,
        bad=BadSamples(bad_samples),
        substitutes=substitutes,
        threads=threads,
        device=torch.device("cpu"),
    )


@pytest.fixture
def orders() -> dict[str, ShardOrder]:
    """Of three shards of twenty samples."""
    splits = ShardSplits(np.full(3, 20), 0.2, 0.2, seed=0)
    return {split: ShardOrder(splits, split, np.ones(3)) for split in ("training", "validation", "test")}


def members(order: ShardOrder) -> list[int]:
    return sorted(order.samples(slice(0, len(order))).tolist())


def test_a_substitute_is_of_the_same_split_and_shard(orders: dict[str, ShardOrder]) -> None:
    """Every second sample is damaged: the next one that is not, in a circle, takes its place with its label."""
    images = Images(bad=set(range(0, 60, 2)))
    loading = loader(images, partial(find_substitutes, orders.values()), bad_samples=30)
    for order in orders.values():
        for shard in range(3):
            own = [sample for sample in members(order) if sample // 20 == shard]
            good = [sample for sample in own if sample % 2]
            pixels, labels, _ = loading.gather(np.array(own), None)
            expected = [min([other for other in good if other >= sample] or good) for sample in own]
            assert pixels[:, 4, 4, 0].tolist() == expected
            assert labels.tolist() == [sample % 10 for sample in expected]
    assert loading.facts().bad == {f"sample {number}" for number in images.bad}
    loading.close()


def test_a_decoder_is_one_thread_also_where_torch_uses_more() -> None:
    here = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        loading = loader(Images(bad=set()), ListedOrder(np.arange(10)).substitutes, bad_samples=0)
        assert loading.pool.submit(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == 3
        loading.close()
    finally:
        torch.set_num_threads(here)


def test_a_damaged_sample_is_decoded_once() -> None:
    images = Images(bad={3})
    loading = loader(images, ListedOrder(np.arange(10)).substitutes, bad_samples=1)
    for _ in range(5):
        assert loading.gather(np.array([2, 3, 9]), None)[0][:, 0, 0, 0].tolist() == [2, 4, 9]
    assert images.heals == {3: 1}
    loading.close()


def test_no_decodable_substitute_is_an_error() -> None:
    loading = loader(Images(bad={3, 4, 5}), ListedOrder(np.array([3, 4, 5])).substitutes, bad_samples=9)
    with pytest.raises(UserError, match=r"^sample 4: neither this nor any of its 2 substitutes can be decoded"):
        loading.gather(np.array([4]), None)
    loading.close()


def test_images_of_a_store_are_asked_for_at_the_same_time(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer comes before sixteen have been asked for, although one thread decodes."""
    s3_environment(server.url, monkeypatch)
    server.files = {f"bucket/a/{number}.png": png(number) for number in range(16)}
    listed = list_images("s3://bucket")
    server.before_answer = threading.Barrier(16)
    order = ListedOrder(np.arange(16))
    loading = loader(FileReader(listed), order.substitutes, bad_samples=0)
    pixels = loading.gather(np.arange(16), None).images
    assert sorted(pixels[:, 0, 0, 0].tolist()) == list(range(16))
    loading.close()


def test_an_error_does_not_wait_for_what_is_being_read() -> None:
    images = Images(bad={1}, endless={2})
    loading = loader(images, ListedOrder(np.arange(3)).substitutes, bad_samples=0, threads=2)
    loading.prefetch(np.array([2]), None)
    assert images.begun.wait(DEADLINE)
    with pytest.raises(UserError, match=r"^sample 1 cannot be decoded"):
        loading.gather(np.array([1]), None)
    loading.close()
    assert not images.over.is_set()
    images.over.set()
