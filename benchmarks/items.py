"""Items/s of two loader processes: ours against torch's DataLoader with two workers, on the same map-style data set.

Batches have 64 items. A cheap item is a row of 50 numbers and one number. An expensive item is computed from 50 sines
and Fourier transforms of 4,096 numbers, and has 50 KiB. In addition, ours seeds three random generators for each
item.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.running import call
from flyte_ddp.core.loading.workers import LoaderPool
from flyte_ddp.core.lookahead import start_ahead
from flyte_ddp.datasets.items import ItemBatches, ItemLoader
from flyte_ddp.datasets.items import Items as OurItems
from flyte_ddp.datasets.on_demand_set import OnDemand, OnDemandSet, on_demand

WORKERS, BATCH, EPOCHS = 2, 64, 3
ITEMS = {"cheap": 40_000, "expensive": 1280}
Item = tuple[NDArray[np.float32], NDArray[np.float32]]


class Items(Dataset[Item]):
    def __init__(self, kind: str, number: int) -> None:
        self.kind, self.number = kind, number
        self.table = np.random.default_rng(0).standard_normal((1000, 51), dtype=np.float32)

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, sample: int) -> Item:
        if sample >= self.number:
            raise IndexError(sample)
        row = self.table[sample % 1000]
        if self.kind == "cheap":
            return row[:50], row[50]
        # In pieces that malloc needs no new pages for: else its thresholds would decide, which differ by process.
        signals = (np.sin(np.arange(4096, dtype=np.float32) * factor) for factor in row[:50])
        return np.stack([np.abs(np.fft.rfft(signal))[:256].astype(np.float32) for signal in signals]), row[50]


def make_set(source: str) -> OnDemand:
    """Return the items as a data set of the library. ``source`` has the kind and the number of items."""
    kind, number = source.split()
    return on_demand(Items(kind, int(number)), Items(kind, 1))


def measure(options: Options) -> Result:
    result = Result(settings={"workers": WORKERS, "batch": BATCH, "items": ITEMS})

    def run(kind: str, side: str, _: int) -> None:
        items = 4 * BATCH if options.quick else ITEMS[kind]
        for rate in call("benchmarks.items:measure_rates", kind, side, items):
            result.add(f"{kind}: {side}", rate, "items/s")

    for kind in ITEMS:
        sides = {side: partial(run, kind, side) for side in ("ours", "DataLoader")}
        interleaved(options, result, sides, options.number(5))
        figure = result.ratio(f"{kind}: ours / DataLoader", f"{kind}: ours", f"{kind}: DataLoader")
        result.targets.append(Target(f"{kind} items: rate, times DataLoader", figure, "x", at_least=1.0))
    return result


def our_epochs(kind: str, number: int) -> Callable[[int], Iterator[Tensor]]:
    data = OnDemandSet("benchmarks.items:make_set", f"{kind} {number}", number, 1, (), "")
    loader = ItemLoader(OurItems(data, "train"), "stacked", 0)
    source = ItemBatches(loader, LoaderPool([loader], WORKERS), torch.device("cpu"))

    def epoch(count: int) -> Iterator[Tensor]:
        order = np.random.default_rng(count).permutation(number)

        def begin(start: int) -> NDArray[Any]:
            samples = order[start : start + BATCH]
            source.begin_batch(samples, count)
            return samples

        for samples in start_ahead(begin, range(0, number, BATCH), source.batches_ahead):
            yield source.load_batch(samples, count).inputs

    return epoch


def their_epochs(kind: str, number: int) -> Callable[[int], Iterator[Tensor]]:
    loader = DataLoader(Items(kind, number), BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True)
    return lambda _: (inputs for inputs, _ in loader)


def measure_rates(kind: str, side: str, items: int) -> list[float]:
    """Return the items/s of each epoch but the first, in which processes start."""
    torch.set_num_threads(1)
    epoch = (our_epochs if side == "ours" else their_epochs)(kind, items)
    rates = []
    for count in range(EPOCHS + 1):
        begin = time.perf_counter()
        found = sum(len(inputs) for inputs in epoch(count))
        rates.append(found / (time.perf_counter() - begin))
    return rates[1:]
