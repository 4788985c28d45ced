"""Data sets of shards, and streams of shards that are read in no fixed order."""

from __future__ import annotations

import importlib.util
import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.order.shard_order import TEST_FRACTION, Orders, ShardOrder, ShardSplits, WholeShardSplits
from flyte_ddp.datasets.encoded.encoded_set import EncodedSet
from flyte_ddp.datasets.prepared_folder import Description, write_json
from flyte_ddp.shards.index import Part, Shard, ShardIndex, pause_garbage_collector, read_index
from flyte_ddp.shards.scanning import check_first_samples_of_parts

if TYPE_CHECKING:
    from flyte_ddp.core.settings import Settings
    from flyte_ddp.datasets.encoded.readers import ImageReader


class ShardSet(EncodedSet):
    """A data set of shards, ``shards:ADDRESS``. Each shard has samples of all splits."""

    train: ShardIndex
    test: ShardIndex | None
    divide = ShardSplits
    read_source = staticmethod(read_index)

    @staticmethod
    def open_source(folder: Path, side: str, address: str, described: Description) -> ShardIndex:  # noqa: ARG004
        with pause_garbage_collector():
            content = json.loads((folder / f"{side}.json").read_bytes())
            shards = [Shard._make([*row[:-1], tuple(row[-1]) if row[-1] else None]) for row in content["shards"]]
        parts = tuple(Part(*part) for part in content["parts"])
        return ShardIndex(content["name"], shards, parts, described.classes)

    def write_other_files(self, folder: Path) -> None:
        for side, source in self.list_sources().items():
            content = {"name": source.name, "parts": source.parts, "shards": source.shards}
            write_json(folder / f"{side}.json", content)

    def check_first_samples(self) -> None:
        for source in self.list_sources().values():
            check_first_samples_of_parts(source)

    def open_reader(
        self, source: ShardIndex, settings: Settings, streams: int = 16, *, members: bool = False
    ) -> ImageReader:
        from flyte_ddp.datasets.encoded.readers import ShardImages
        from flyte_ddp.shards.cache import ShardCache
        from flyte_ddp.shards.dataset import ShardReader

        cache = ShardCache(settings.cache_folder, settings.cache_bytes)
        return ShardImages(ShardReader(source, cache, most_open=2 * streams, most_ahead=streams), members=members)

    @cached_property
    def train_samples(self) -> int:
        return int(self.train.counts.sum())

    def divide_shards(self, counts: NDArray[np.int64], validation_fraction: float, seed: int) -> ShardSplits:
        return self.divide(counts, validation_fraction, TEST_FRACTION if self.test is None else 0.0, seed)

    def make_test_order(self) -> ShardOrder:
        """Return the order of the test split. Without a test set, the split is a tenth of the samples."""
        if self.test is not None:
            return ShardOrder(ShardSplits(self.test.counts, 0.0, 0.0, 0), "training")
        return ShardOrder(self.divide_shards(self.train.counts, 0.0, 0), "test")

    def make_split_orders(self, validation_fraction: float, seed: int, shuffle_shards: int) -> Orders:
        splits = self.divide_shards(self.train.counts, validation_fraction, seed)
        training = ShardOrder(splits, "training", self.train.weights, shuffle_shards)
        return {"training": training, "validation": ShardOrder(splits, "validation"), "test": self.make_test_order()}


class StreamSet(ShardSet):
    """A stream of shards, ``stream:ADDRESS``. Whole shards are held out."""

    opening = "flyte_ddp.datasets.encoded.streams"
    divide = WholeShardSplits
    advice = "pack more shards (a stream holds out whole shards)"

    def check_settings(self, hp: Hyperparameters) -> None:
        """Raise UserError if webdataset is not installed, or a data set in the index has a weight other than 1."""
        if importlib.util.find_spec("webdataset") is None:
            problem = "streams need webdataset, which is not installed; pip install webdataset"
            raise UserError(f"dataset={self.name!r}: {problem}")
        for part in self.train.parts:
            if part.weight != 1:
                rule = "but a stream reads all parts equally often"
                problem = f"its part {part.name!r} has weight {part.weight:g}, {rule}"
                raise UserError(f"dataset={self.name!r}: {problem}; use shards:ADDRESS, or an index without weights")
        super().check_settings(hp)

    def report_notes(self) -> list[str]:
        return ["The training data were a stream: each rank and each worker read different shards."]
