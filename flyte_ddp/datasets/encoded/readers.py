"""Read the encoded images of shards or of single files."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from flyte_ddp import storage
from flyte_ddp.core.loading.loader_threads import limit_to_one_thread
from flyte_ddp.core.loading.split import FileFetcher
from flyte_ddp.core.lookahead import map_in_threads
from flyte_ddp.core.order.sampling import Indices
from flyte_ddp.datasets.encoded.image_list import ImageList
from flyte_ddp.shards.dataset import ShardReader
from flyte_ddp.shards.members import TRAINED_ON, choose_image_and_label, parse_class_number

CONNECTIONS = 32  # parallel requests of one rank: a request takes tens of milliseconds, nearly all of it waiting
WANTED = frozenset(TRAINED_ON)  # extensions of the members of a shard's sample that are read

Result = TypeVar("Result")


@dataclass(frozen=True)
class Encoded:
    """An image file's content, with label and names."""

    content: bytes
    label: int
    name: str  # for errors, such as "image s3://bucket/cat/1.jpg"
    key: str = ""  # the name within the data set
    # For user-defined decoding, in place of content and label: the members by extension, and ``__key__``.
    members: Mapping[str, Any] | None = None
    copy: str = ""  # for errors: where the content is cached, in brackets


class ImageReader:
    """Base class of thread-safe readers of encoded images. Optional hooks default to no-ops."""

    prefetcher: FileFetcher | None = None  # None: no whole files are fetched

    def read_sample(self, sample: int) -> Encoded:
        raise NotImplementedError

    def start_read(self, sample: int) -> Callable[[], Encoded]:
        """Return a function that returns the sample. A slow reader starts the read at once, in another thread.

        Errors of the read are raised by the returned function.
        """
        return partial(self.read_sample, sample)

    def close(self) -> None:
        """Cancel started reads and close files."""


class ShardImages(ImageReader):
    """Reads samples of shards as image and label.

    With ``members``, reads all members of a sample, for user-defined decoding.
    """

    def __init__(self, reader: ShardReader, *, members: bool = False) -> None:
        self.reader, self.members = reader, members
        self.prefetcher = self if reader.index.remote.any() else None

    def read_sample(self, sample: int) -> Encoded:
        """Return a sample of a shard. Downloads the shard to the cache if needed.

        Raises:
            UserError: The shard is damaged or cannot be read, or the sample has no image or no class number.
        """
        key, contents = self.reader.read_sample(sample, None if self.members else WANTED)
        if len(contents) < 2 and not self.members:  # read all, because the error of choose_image_and_label() lists them
            key, contents = self.reader.read_sample(sample)
        number, _ = self.reader.index.locate_sample(sample)
        shard = self.reader.index.shards[number]
        name = f"sample {key!r} in shard {shard.url}"
        copy = self.reader.cache.describe_copy(shard)
        if self.members:
            return Encoded(b"", 0, name, key, {**contents, "__key__": key}, copy)
        image, label = choose_image_and_label(name, contents)
        return Encoded(contents[image], parse_class_number(name, contents[label]), name, key, copy=copy)

    def finish(self, samples: Indices) -> None:
        self.reader.mark_read_and_prefetch_next(
            np.unique(np.searchsorted(self.reader.index.ends, samples, side="right")).tolist()
        )

    def begin_fetching(self, samples: Indices) -> None:
        shards = np.unique(np.searchsorted(self.reader.index.ends, samples, side="right"))
        self.reader.prefetch_in_threads(shards[self.reader.index.remote[shards]].tolist())

    def close(self) -> None:
        self.reader.close()


class FileReader(ImageReader):
    """Reads the images of an ImageList, remote images in 32 threads.

    With ``members``, an image is a sample with a single member.
    """

    def __init__(self, images: ImageList, *, members: bool = False) -> None:
        self.images, self.members = images, members
        remote = storage.find_local_path(images.address) is None
        self.pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="reader") if remote else None

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), members=self.members), (self.images,)

    def start_read(self, sample: int) -> Callable[[], Encoded]:
        return super().start_read(sample) if self.pool is None else self.pool.submit(self.read_sample, sample).result

    def read_sample(self, sample: int) -> Encoded:
        """Return an image file and its label. With ``members``, returns the file as the sample's only member.

        Raises:
            UserError: The file cannot be read, or has changed since the files were listed.
        """
        content, key = self.images.read_image(sample), str(self.images.names[sample])
        name = f"image {self.images.image_address(sample)}"
        if self.members:
            stem, dot, extension = key.rpartition(".")
            return Encoded(b"", 0, name, key, {f"{dot}{extension}": content, "__key__": stem})
        return Encoded(content, int(self.images.labels[sample]), name, key)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)


def map_samples(
    reader: ImageReader, samples: Indices, threads: int, use: Callable[[int, Encoded], Result], ahead: int
) -> Iterator[Result]:
    """Yield ``use(sample, encoded image)`` for each sample, in order.

    The iterator starts nothing before the first ``next()``. When the iterator is closed, calls that have not begun are
    cancelled.

    Args:
        reader: Reads the samples. Files of the next samples are fetched ahead.
        threads: Number of threads that call ``use``.
        use: Called in a thread. An error of ``use`` or of the read is raised in the sample's turn.
        ahead: Reads and calls are started for at most this many samples at a time.
    """

    def start_reads() -> Iterator[tuple[int, Callable[[], Encoded]]]:
        for place, sample in enumerate(samples.tolist()):
            if place % ahead == 0 and reader.prefetcher is not None:
                reader.prefetcher.begin_fetching(samples[place : place + 2 * ahead])
            yield sample, reader.start_read(sample)

    with map_in_threads(
        lambda item: use(item[0], item[1]()), start_reads(), threads, ahead=ahead - 1, initializer=limit_to_one_thread
    ) as results:
        yield from results
