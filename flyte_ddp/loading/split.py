"""A rank's view of the splits: which samples a split has, and the source that loads them as batches."""

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
    """Images and labels on the device, with the names of the samples."""

    images: Tensor  # uint8 [n, H, W, C]
    labels: Tensor  # int64 [n]
    names: Sequence[str] = ()  # keys of the samples in their data set; empty if they have none


class ImageSource:
    """Base class of sources that load batches of images. Optional hooks default to no-ops."""

    batches_ahead = 0  # how many batches to prefetch
    fetches_files = False  # True if whole files are fetched, so that prefetch_files() is useful

    def gather(self, samples: Indices, epoch: int | None) -> Batch:
        """Load these samples as a batch on the device: augmented for this epoch, or unchanged if ``epoch`` is None."""
        raise NotImplementedError

    def prefetch(self, samples: Indices, epoch: int | None) -> None:
        """Start to load these samples for a later :meth:`gather` with the same arguments."""

    def prefetch_files(self, samples: Indices) -> None:
        """Start to fetch the files that hold these samples, which will be loaded later."""

    def facts(self) -> Facts:
        """Return facts about the loading for the report."""
        return Facts()

    def close(self) -> None:
        """Stop what was started, and close files."""


@dataclass(frozen=True)
class Split:
    """One split of a data set as this rank uses it: the order of the samples, and the source that loads them."""

    source: ImageSource
    order: Order

    def __len__(self) -> int:
        return len(self.order)

    def gather(self, samples: Indices, epoch: int | None = None) -> Batch:
        """Load these samples as a batch on the device; augmented if ``epoch`` is given."""
        return self.source.gather(samples, epoch)

    def batches(self, batch_size: int, part: int, parts: int) -> Iterator[tuple[slice, Batch]]:
        """Yield this part's batches of the split, unaugmented, each with its slice of the split's order.

        The batches of the split are divided into ``parts`` runs of consecutive batches; run number ``part`` is yielded.
        Consecutive batches need few shards. Later batches are loaded ahead.
        """
        numbers = sampling.take_slice(np.arange(-(-len(self) // batch_size)), part, parts).tolist()
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
        """Yield the items of ``wanted``, while the source loads the next items and fetches the files of later ones.

        Args:
            wanted: items in order, such as batches.
            samples_of: returns the samples of an item that this rank loads, as one or more arrays; each is prefetched
                for one call of :meth:`gather`.
            epoch: epoch of training that the items are for; None for evaluation.
            batch_size: samples of an item over all ranks.
        """

        def start(begin: Callable[[Indices], None], item: Item) -> Item:
            """Call ``begin`` with each array of the item's samples; return the item."""
            for samples in samples_of(item):
                begin(samples)
            return item

        if self.source.fetches_files:
            distance = self.order.prefetch_distance(batch_size, mixed=epoch is not None)
            wanted = start_ahead(partial(start, self.source.prefetch_files), wanted, distance)
        if self.source.batches_ahead:
            prefetch = partial(start, partial(self.source.prefetch, epoch=epoch))
            wanted = start_ahead(prefetch, wanted, self.source.batches_ahead)
        return wanted


@dataclass(frozen=True)
class Splits:
    """Training, validation and test split, and the shape [H, W, C] of their images."""

    training: Split
    validation: Split
    test: Split
    shape: tuple[int, int, int]

    @property
    def sources(self) -> list[ImageSource]:
        """The different sources of the three splits."""
        sources = (split.source for split in (self.training, self.validation, self.test))
        return list({id(source): source for source in sources}.values())

    def facts(self) -> Facts:
        """Return the combined facts of this rank's sources."""
        return sum_facts(source.facts() for source in self.sources)

    def close(self) -> None:
        """Stop the loading threads and close files."""
        for source in self.sources:
            source.close()
