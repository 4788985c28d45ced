"""Read images for training from shards: each sample is an image and its ``.cls``."""

from collections.abc import Mapping

import numpy as np

from flyte_ddp.loading.encoded import Encoded, ImageReader
from flyte_ddp.order.sampling import Indices
from flyte_ddp.shards.dataset import ShardReader
from flyte_ddp.shards.decoding import TRAINED_ON, find_image_and_label, parse_class_number

WANTED = frozenset(TRAINED_ON)  # extensions of the members that are read


class ShardImages(ImageReader):
    """Reads images and labels from shards."""

    def __init__(self, reader: ShardReader) -> None:
        self.reader, self.fetches = reader, bool(reader.index.remote.any())

    def read(self, sample: int) -> Encoded:
        """Read a sample's image and label from its shard. Raises a UserError if it lacks one of them."""
        key, contents = self.reader.read_sample(sample, WANTED)
        if len(contents) < 2:  # read all members, because the error of image_and_label() lists them
            key, contents = self.reader.read_sample(sample)
        shard, _ = self.reader.index.locate(sample)
        name = f"sample {key!r} in shard {self.reader.index.shards[shard].url}"
        image, label = find_image_and_label(name, contents)
        return Encoded(contents[image], parse_class_number(name, contents[label]), name, key)

    def refetch_if_damaged(self, sample: int) -> None:
        """Check the cached copy of the sample's shard, and fetch it again if it is damaged."""
        self.reader.remove_damaged_shard(sample)

    def prefetch_files(self, samples: Indices) -> None:
        """Start to fetch the remote shards that hold these samples."""
        shards = np.unique(np.searchsorted(self.reader.index.ends, samples, side="right"))
        self.reader.prefetch_shards(shards[self.reader.index.remote[shards]].tolist())

    def fetch_counts(self) -> Mapping[str, int]:
        """Return how often each shard was fetched, by its address."""
        return self.reader.cache.fetched

    def close(self) -> None:
        """Close the open shards."""
        self.reader.close()
