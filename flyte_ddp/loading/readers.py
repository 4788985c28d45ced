"""Read images and labels for training: from shards, or from single files on a disk or in object storage."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from flyte_ddp import storage
from flyte_ddp.datasets.image_folder import ImageList
from flyte_ddp.loading.encoded import Encoded, ImageReader
from flyte_ddp.order.sampling import Indices
from flyte_ddp.shards.dataset import ShardReader
from flyte_ddp.shards.decoding import TRAINED_ON, find_image_and_label, parse_class_number

CONNECTIONS = 32  # parallel requests of one rank: a request takes tens of milliseconds, nearly all of it waiting
WANTED = frozenset(TRAINED_ON)  # extensions of the members of a shard's sample that are read


class ShardImages(ImageReader):
    """Reads images and labels from shards."""

    def __init__(self, reader: ShardReader) -> None:
        self.reader, self.fetches_files = reader, bool(reader.index.remote.any())

    def read_sample(self, sample: int) -> Encoded:
        key, contents = self.reader.read_sample(sample, WANTED)
        if len(contents) < 2:  # read all members, because the error of find_image_and_label() lists them
            key, contents = self.reader.read_sample(sample)
        number, _ = self.reader.index.locate(sample)
        shard = self.reader.index.shards[number]
        name, copy = f"sample {key!r} in shard {shard.url}", self.reader.cache.describe_copy(shard)
        image, label = find_image_and_label(name, contents)
        return Encoded(contents[image], parse_class_number(name, contents[label]), name, key, copy=copy)

    def skip_read(self, samples: Indices) -> None:
        self.reader.skip_read(np.unique(np.searchsorted(self.reader.index.ends, samples, side="right")).tolist())

    def prefetch_files(self, samples: Indices) -> None:
        shards = np.unique(np.searchsorted(self.reader.index.ends, samples, side="right"))
        self.reader.prefetch_shards(shards[self.reader.index.remote[shards]].tolist())

    def fetch_counts(self) -> Mapping[str, int]:
        return self.reader.cache.fetched

    def close(self) -> None:
        self.reader.close()


class ShardMembers(ShardImages):
    """Reads all members of samples in shards, for users' own decoding."""

    def read_sample(self, sample: int) -> Encoded:
        key, contents = self.reader.read_sample(sample)
        shard, _ = self.reader.index.locate(sample)
        name = f"sample {key!r} in shard {self.reader.index.shards[shard].url}"
        return Encoded(b"", 0, name, key, {**contents, "__key__": key})


class FileReader(ImageReader):
    """Reads the images of an ImageList. Keeps no copies. Has 32 threads for remote images."""

    def __init__(self, images: ImageList) -> None:
        self.images = images
        remote = storage.local_path(images.address) is None
        self.pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="reader") if remote else None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.images,)

    def start_read(self, sample: int) -> Callable[[], Encoded]:
        return super().start_read(sample) if self.pool is None else self.pool.submit(self.read_sample, sample).result

    def read_sample(self, sample: int) -> Encoded:
        content = self.images.read_image(sample)
        name, label = str(self.images.names[sample]), int(self.images.labels[sample])
        return Encoded(content, label, f"image {self.images.image_address(sample)}", name)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)


class FileMembers(FileReader):
    """Reads image files as samples of one member, for users' own decoding."""

    def read_sample(self, sample: int) -> Encoded:
        encoded = super().read_sample(sample)
        stem, dot, extension = encoded.key.rpartition(".")
        return Encoded(b"", 0, encoded.name, encoded.key, {f"{dot}{extension}": encoded.content, "__key__": stem})
