"""Images for training from shards: of each sample an image and its ``.cls``."""

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
        """Return an image, encoded, and its label, or raise a UserError for a sample without them."""
        key, contents = self.reader.read(sample, WANTED)
        if len(contents) < 2:  # the error says what else there is
            key, contents = self.reader.read(sample)
        shard, _ = self.reader.index.locate(sample)
        name = f"sample {key!r} in shard {self.reader.index.shards[shard].url}"
        image, label = image_and_label(name, contents)
        return Encoded(contents[image], class_number(name, contents[label]), name, key)

    def heal(self, sample: int) -> None:
        """Check the cached copy of the sample's shard, and fetch it again if it is damaged."""
        self.reader.heal(sample)

    def expect(self, samples: Indices) -> None:
        """Begin to fetch the shards of these samples that are not here."""
        shards = np.unique(np.searchsorted(self.reader.index.ends, samples, side="right"))
        self.reader.prefetch(shards[self.reader.index.remote[shards]].tolist())

    def fetched(self) -> Mapping[str, int]:
        """Return how often each shard was fetched."""
        return self.reader.cache.fetched

    def close(self) -> None:
        """Close the shards that are open."""
        self.reader.close()
