"""Images for training from shards: of each sample an image and its ``.cls``."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flyte_ddp.loading.encoded import Encoded, Reader
from flyte_ddp.order.sampling import Indices
from flyte_ddp.shards.dataset import ShardReader
from flyte_ddp.shards.decoding import TRAINED_ON, class_number, image_and_label

WANTED = frozenset(TRAINED_ON)


class ShardImages(Reader):
    """Reads images and labels from shards."""

    def __init__(self, reader: ShardReader) -> None:
        self.reader, self.fetches = reader, bool(reader.index.remote.any())

    def read(self, sample: int) -> Encoded:
        """An image, encoded, and its label."""
        key, contents = self.reader.read(sample, WANTED)
        if len(contents) < 2:  # the error says what else there is
            key, contents = self.reader.read(sample)
        shard, _ = self.reader.index.locate(sample)
        return encoded_sample(key, contents, self.reader.index.shards[shard].url)

    def heal(self, sample: int) -> None:
        """Has the cache look at its copy of the shard, and fetch it again if it is damaged."""
        self.reader.heal(sample)

    def expect(self, samples: Indices) -> None:
        """Begins to fetch the shards that these samples are in, if they are not here."""
        shards = np.unique(np.searchsorted(self.reader.index.ends, samples, side="right"))
        self.reader.prefetch(shards[self.reader.index.remote[shards]].tolist())

    def fetched(self) -> Mapping[str, int]:
        """How often each shard was fetched."""
        return self.reader.cache.fetched

    def close(self) -> None:
        """Closes the shards that are open."""
        self.reader.close()


def encoded_sample(key: str, contents: Mapping[str, bytes], shard: str) -> Encoded:
    """The image and the label of a sample, by its members' extensions."""
    name = f"sample {key!r} in shard {shard}"
    image, label = image_and_label(name, contents)
    return Encoded(contents[image], class_number(name, contents[label]), name, key)
