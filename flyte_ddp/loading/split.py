"""Batches on the device: which samples a split has, and where their images come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from torch import Tensor

from flyte_ddp.loading.facts import Facts, together
from flyte_ddp.order import sampling
from flyte_ddp.order.sampling import Indices, Order

Item = TypeVar("Item")


class Images:
    """Where images come from. What a source has no use for does nothing."""

    batches_ahead = 0  # how many it is worth to prefetch
    fetches = False  # whether files are fetched as a whole, some time before they are needed

    def gather(self, samples: Indices, epoch: int | None) -> tuple[Tensor, Tensor]:
        """Images uint8 [n, H, W, C] and labels int64 [n] on the device; augmented for an epoch, or as they are."""
        raise NotImplementedError

    def names(self, samples: Indices) -> list[str]:  # noqa: ARG002
        """What samples of the batch that was gathered last are called where they are; nothing without names."""
        return []

    def prefetch(self, samples: Indices, epoch: int | None) -> None:
        """Begins to load what :meth:`gather` will be asked for."""

    def expect(self, samples: Indices) -> None:
        """Begins to fetch the files that these samples are in, which will be needed a while later."""

    def facts(self) -> Facts:
        """What the report is to say."""
        return Facts()

    def close(self) -> None:
        """Ends what was begun, and closes files."""


@dataclass(frozen=True)
class Split:
    """One split of a data set as this rank sees it: samples in an order, and their images."""

    source: Images
    order: Order

    def __len__(self) -> int:
        return len(self.order)

    def gather(self, samples: Indices, epoch: int | None = None) -> tuple[Tensor, Tensor]:
        """Images uint8 [n, H, W, C] and labels int64 [n] on the device, augmented if it is for an epoch of training."""
        return self.source.gather(samples, epoch)

    def names(self, samples: Indices) -> list[str]:
        """Names of the batch that was gathered last, such as those of files; none at all where samples have none."""
        return self.source.names(samples)

    def batches(self, batch_size: int, part: int, parts: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """The whole batches, in order, that fall to one of ``parts``: a stretch of them, so that it needs few shards.

        Yields:
            The batch's place within the split, its images and its labels.

        """
        numbers = sampling.share(np.arange(-(-len(self) // batch_size)), part, parts).tolist()
        places = [slice(number * batch_size, min((number + 1) * batch_size, len(self))) for number in numbers]
        wanted = ((place, self.order.samples(place)) for place in places)
        for place, samples in self.loading_ahead(wanted, lambda item: [item[1]], None, batch_size):
            yield place, *self.gather(samples)

    def loading_ahead(
        self,
        wanted: Iterator[Item],
        samples_of: Callable[[Item], Iterable[Indices]],
        epoch: int | None,
        batch_size: int,
    ) -> Iterator[Item]:
        """Hands on what is wanted, while it loads what comes next and fetches the files that come after that.

        Args:
            samples_of: the samples of an item that this rank will gather, in as many parts.
            epoch: that they are for; None for those of :meth:`batches`.
        """

        def expect(item: Item) -> None:
            for samples in samples_of(item):
                self.source.expect(samples)

        def prefetch(item: Item) -> None:
            for samples in samples_of(item):
                self.source.prefetch(samples, epoch)

        lookahead = self.order.lookahead(batch_size, mixed=epoch is not None) if self.source.fetches else 0
        expected = sampling.looking_ahead(wanted, lookahead, expect)
        return sampling.looking_ahead(expected, self.source.batches_ahead, prefetch)


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
        """About the images that this rank has loaded."""
        return together(source.facts() for source in self.sources)

    def close(self) -> None:
        """Ends the threads that load images, and closes files."""
        for source in self.sources:
            source.close()
