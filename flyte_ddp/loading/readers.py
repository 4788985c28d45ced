"""Read images and labels for training: from shards, or from single files on a disk or in object storage."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
    """Reads samples in shards: image and label, or with ``members`` all members, for users' own decoding."""

    def __init__(self, reader: ShardReader, *, members: bool = False) -> None:
        self.reader, self.members = reader, members
        self.fetches_files = bool(reader.index.remote.any())

    def read_sample(self, sample: int) -> Encoded:
        key, contents = self.reader.read_sample(sample, None if self.members else WANTED)
        if len(contents) < 2 and not self.members:  # read all, because the error of find_image_and_label() lists them
            key, contents = self.reader.read_sample(sample)
        shard, _ = self.reader.index.locate(sample)
        name = f"sample {key!r} in shard {self.reader.index.shards[shard].url}"
        if self.members:
            return Encoded(b"", 0, name, key, {**contents, "__key__": key})
        image, label = find_image_and_label(name, contents)
        return Encoded(contents[image], parse_class_number(name, contents[label]), name, key)

    def skip_read(self, samples: Indices) -> None:
        self.reader.skip_read(np.unique(np.searchsorted(self.reader.index.ends, samples, side="right")).tolist())

    def refetch_if_damaged(self, sample: int) -> None:
        self.reader.remove_damaged_shard(sample)

    def prefetch_files(self, samples: Indices) -> None:
        shards = np.unique(np.searchsorted(self.reader.index.ends, samples, side="right"))
        self.reader.prefetch_shards(shards[self.reader.index.remote[shards]].tolist())

    def fetch_counts(self) -> Mapping[str, int]:
        return self.reader.cache.fetched

    def close(self) -> None:
        self.reader.close()


class FileReader(ImageReader):
    """Reads the images of an ImageList, with ``members`` as samples of one member, by 32 threads if they are remote."""

    def __init__(self, images: ImageList, *, members: bool = False) -> None:
        self.images, self.members = images, members
        remote = storage.local_path(images.address) is None
        self.pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="reader") if remote else None

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), members=self.members), (self.images,)

    def start_read(self, sample: int) -> Callable[[], Encoded]:
        return super().start_read(sample) if self.pool is None else self.pool.submit(self.read_sample, sample).result

    def read_sample(self, sample: int) -> Encoded:
        content, key = self.images.read_image(sample), str(self.images.names[sample])
        name = f"image {self.images.image_address(sample)}"
        if self.members:
            stem, dot, extension = key.rpartition(".")
            return Encoded(b"", 0, name, key, {f"{dot}{extension}": content, "__key__": stem})
        return Encoded(content, int(self.images.labels[sample]), name, key)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)
