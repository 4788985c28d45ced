"""Images for training from shards: of each sample an image and its ``.cls``."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

import numpy as np

from flyte_ddp.errors import UserError
from flyte_ddp.loading.encoded import Encoded
from flyte_ddp.sampling import Indices
from flyte_ddp.shards.dataset import ShardReader
from flyte_ddp.shards.decoding import IMAGES

EXTENSIONS = tuple(f".{kind}" for kind in IMAGES)
WANTED = frozenset((*EXTENSIONS, ".cls"))


class ShardImages:
    """Reads images and labels from shards, of which so many are fetched ahead."""

    def __init__(self, reader: ShardReader, ahead: int) -> None:
        self.reader, self.prefetch = reader, ShardPrefetch(reader, ahead)

    def read(self, sample: int) -> Encoded:
        """An image, encoded, and its label.

        Raises:
            UserError: the shard cannot be had, or the sample has no image or no label.
        """
        shard, _ = self.reader.index.locate(sample)
        key, contents = self.reader.read(sample, WANTED)
        self.prefetch.arrived_at(shard)
        if len(contents) < 2:  # the error says what else there is
            key, contents = self.reader.read(sample)
        return encoded_sample(key, contents, self.reader.index.shards[shard].url)

    def heal(self, sample: int) -> None:
        """Has the cache look at its copy of the shard, and fetch it again if it is damaged."""
        self.reader.heal(sample)

    def begin(self, sample: int) -> None:
        """An image is read from its shard when it is decoded."""

    def expect(self, samples: Indices) -> None:
        """Begins to fetch the shards that these samples are in, if they are not here."""
        shards = np.unique(np.searchsorted(self.reader.index.ends, samples, side="right"))
        self.prefetch.want(shards[self.reader.index.remote[shards]].tolist())

    def fetched(self) -> Mapping[str, int]:
        """How often each shard was fetched."""
        return self.reader.cache.fetched

    def close(self) -> None:
        """Closes the shards that are open."""
        self.reader.close()


def encoded_sample(key: str, contents: Mapping[str, bytes], shard: str) -> Encoded:
    """The image and the label of a sample, by its members' extensions.

    Raises:
        UserError: it has no image or no label.
    """
    name = f"sample {key!r} in shard {shard}"
    image = next((contents[kind] for kind in EXTENSIONS if kind in contents), None)
    if image is None:
        raise UserError(f"{name} has no image: it has {', '.join(contents)}; pack one of {', '.join(EXTENSIONS)}")
    if ".cls" not in contents:
        raise UserError(f"{name} has no label: it has {', '.join(contents)}; pack its class's number as .cls")
    try:
        return Encoded(image, int(contents[".cls"]), name, key)
    except ValueError:
        raise UserError(f"{name}: its .cls is {contents['.cls'][:20]!r}; must be the number of a class") from None


class ShardPrefetch:
    """Has shards fetched before they are read, and no more than so many, as more would fill a small cache."""

    def __init__(self, reader: ShardReader, most: int) -> None:
        self.reader, self.most = reader, most
        self.lock = threading.Lock()
        self.wanted: dict[int, None] = {}  # not begun with, in the order in which they will be read
        self.ahead: set[int] = set()  # fetched, or being fetched, and not read from yet

    def want(self, shards: Iterable[int]) -> None:
        """Takes in that these will be read next after those that it knows of."""
        with self.lock:
            self.wanted |= {shard: None for shard in shards if shard not in self.ahead}
            self.go_on()

    def arrived_at(self, shard: int) -> None:
        """Takes in that a shard is being read."""
        if shard in self.ahead or shard in self.wanted:
            with self.lock:
                self.ahead.discard(shard)
                self.wanted.pop(shard, None)
                self.go_on()

    def go_on(self) -> None:
        """Begins with as many as there is room for; under the lock."""
        while self.wanted and len(self.ahead) < self.most:
            shard = next(iter(self.wanted))
            del self.wanted[shard]
            if shard not in self.reader.ours.shards:
                self.ahead.add(shard)
                self.reader.prefetch([shard])
