"""Batches on the device: which samples a split has, and where their images come from."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from flyte_ddp.loading.facts import Facts, sum_facts
from flyte_ddp.lookahead import start_ahead
from flyte_ddp.order import sampling
from flyte_ddp.order.sampling import Indices, Order

Item = TypeVar("Item")


class Batch(NamedTuple):
    """Samples on the device."""

    images: Tensor  # uint8 [n, H, W, C]
    labels: Tensor  # int64 [n]
    names: Sequence[str] = ()  # of the samples where they are stored; empty where samples have none


class Images:
    """Base class of sources of images. Optional hooks default to no-ops."""

    batches_ahead = 0  # how many it is worth to prefetch
    fetches = False  # whether files are fetched as a whole, some time before they are needed

    def gather(self, samples: Indices, epoch: int | None) -> Batch:
        """Return these samples, augmented for an epoch, or as they are for None."""
        raise NotImplementedError

    def prefetch(self, samples: Indices, epoch: int | None) -> None:
        """Begin to load what :meth:`gather` will be asked for."""

    def expect(self, samples: Indices) -> None:
        """Begin to fetch the files of these samples, which will be needed a while later."""

    def facts(self) -> Facts:
        """Return what the report is to say."""
        return Facts()

    def close(self) -> None:
        """End what was begun, and close files."""


@dataclass(frozen=True)
class Split:
    """One split of a data set as this rank sees it: samples in an order, and their images."""

    source: Images
    order: Order

    def __len__(self) -> int:
        return len(self.order)

    def gather(self, samples: Indices, epoch: int | None = None) -> Batch:
        """Return these samples, augmented if it is for an epoch of training."""
        return self.source.gather(samples, epoch)

    def batches(self, batch_size: int, part: int, parts: int) -> Iterator[tuple[slice, Batch]]:
        """Yield the whole batches that fall to one of ``parts``, each with its place within the split.

        A part is a stretch of consecutive batches, so that it needs few shards.
        """
        numbers = sampling.share(np.arange(-(-len(self) // batch_size)), part, parts).tolist()
        places = [slice(number * batch_size, min((number + 1) * batch_size, len(self))) for number in numbers]
        wanted = ((place, self.order.samples(place)) for place in places)
        for place, samples in self.load_ahead(wanted, lambda item: [item[1]], None, batch_size):
            yield place, self.gather(samples)

    def load_ahead(
        self,
        wanted: Iterator[Item],
        samples_of: Callable[[Item], Iterable[Indices]],
        epoch: int | None,
        batch_size: int,
    ) -> Iterator[Item]:
        """Yield what is wanted, after beginning to load the next items and to fetch the files of those after them.

        Args:
            wanted: items in order, such as batches.
            samples_of: gives the samples of an item that this rank will gather, in as many parts.
            epoch: of training that the items are for; None for the items of :meth:`batches`.
            batch_size: samples of an item over all ranks.
        """
        lookahead = self.order.lookahead(batch_size, mixed=epoch is not None) if self.source.fetches else 0
        prefetch = partial(self.source.prefetch, epoch=epoch)
        for begin, ahead in ((self.source.expect, lookahead), (prefetch, self.source.batches_ahead)):

            def start(item: Item, begin: Callable[[Indices], None] = begin) -> Item:
                for samples in samples_of(item):
                    begin(samples)
                return item

            wanted = start_ahead(start, wanted, ahead) if ahead else wanted
        return wanted


@dataclass(frozen=True)
class Splits:
    """The three splits, and what images are like in them: [H, W, C]."""

    training: Split
    validation: Split
    test: Split
    shape: tuple[int, int, int]

    @property
    def sources(self) -> list[Images]:
        """Where the images of all splits come from."""
        splits = (self.training, self.validation, self.test)
        return list({id(split.source): split.source for split in splits}.values())

    def facts(self) -> Facts:
        """Return facts about the images that this rank has loaded."""
        return sum_facts(source.facts() for source in self.sources)

    def close(self) -> None:
        """End the threads that load images, and close files."""
        for source in self.sources:
            source.close()
