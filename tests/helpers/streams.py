"""Sets on demand that read another library's stream, named in tests as ``streams:...``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset, Subset

from flyte_ddp import on_demand
from flyte_ddp.datasets.on_demand_set import OnDemand


class Numbers(IterableDataset[Any]):
    """A stream that cannot be read by number."""

    def __iter__(self) -> Iterator[Any]:
        return ((np.float32([number]), number % 2) for number in range(8))


class Stream(Numbers):
    """A stream that can be read by number, as mosaicml-streaming's and litdata's StreamingDataset can."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> Any:
        return np.float32([number]), number % 2


class Opening(Dataset[Any]):
    """A set that opens a stream at the first item."""

    stream: Any = None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> Any:
        self.stream = self.stream or Stream()
        return self.stream[number]


class Holding(Opening):
    def __init__(self) -> None:
        self.stream = Stream()


class Collected(list[Any]):
    """A list of all items of a stream, with the stream as an attribute."""

    def __init__(self) -> None:
        self.stream = Numbers()
        super().__init__(self.stream)


SETS = {
    "stream": Stream,
    "holding": Holding,
    "opening": Opening,
    "subset": lambda: Subset(Holding(), range(8)),
    "collected": Collected,
}


def samples(source: str) -> OnDemand:
    return on_demand(SETS[Path(source).name](), Collected(), classes="ab")


def tested(source: str) -> OnDemand:
    return on_demand(Collected(), SETS[Path(source).name](), classes="ab")
