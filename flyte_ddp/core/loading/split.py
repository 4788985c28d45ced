"""A rank's view of the splits: the samples of each split, and the source that loads batches."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.lookahead import start_ahead
from flyte_ddp.core.models.inputs import ModelInput
from flyte_ddp.core.order.sampling import Indices, Order, take_slice
from flyte_ddp.core.parallel.distributed import gather_objects
from flyte_ddp.core.samples.leaves import Leaves
from flyte_ddp.core.text.formatting import join_first

Item = TypeVar("Item")
# Raises UserError for targets [n, ...] that the objective does not accept.
CheckTargets: TypeAlias = Callable[[NDArray[Any]], None]


class Batch(NamedTuple):
    """Inputs and targets on the device, with the names of the samples."""

    inputs: Leaves  # images, uint8 [n, H, W, C], or any leaves
    targets: Leaves  # for the objective, to compare with the model's outputs: usually [n] or [n, ...]
    names: Sequence[str] = ()  # keys of the samples in their data set; empty if they have none


class TargetSpec(NamedTuple):
    """Properties that all targets of a data set share."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    classes: int = 0  # upper limit (exclusive) of whole numbers; 0: no limit
    varies: bool = False  # whether the first dimension has another length in each sample


class SampleFacts:
    """What is known of single samples. By default every sample can be decoded, and no class number is known."""

    def bad_samples(self) -> frozenset[str]:
        """Return the names of samples that could not be decoded."""
        return frozenset()

    def replaced_samples(self) -> frozenset[int]:
        """Return the numbers of samples in whose place other samples were loaded."""
        return frozenset()

    def read_label(self, sample: int) -> int | None:  # noqa: ARG002
        """Return the class number of a sample, or None if the class number is unknown. Reads the sample."""
        return None


class BatchSource(SampleFacts):
    """Base class of sources that load batches. Optional hooks default to no-ops."""

    batches_ahead = 0  # how many batches to prefetch
    loaders = 0  # processes or threads that load for this rank; 0: the rank itself

    def load_batch(self, samples: Indices, epoch: int | None, check_targets: CheckTargets | None = None) -> Batch:
        """Return samples as a batch on the device. Waits if the batch is still being loaded.

        Samples are augmented for an ``epoch`` of training, and not for None. Targets that user code makes are checked
        by ``check_targets``.
        """
        raise NotImplementedError

    def begin_batch(self, samples: Indices, epoch: int | None) -> None:
        """Start loading samples, without waiting, for a later :meth:`load_batch` of the same samples and epoch."""

    def close(self) -> None:
        """Stop started loads and close files."""


class FileFetcher(Protocol):
    """Fetches whole files before their samples are loaded."""

    def begin_fetching(self, samples: Indices) -> None:
        """Start to fetch the files that hold these samples, without waiting."""

    def finish(self, samples: Indices) -> None:
        """Record that these samples were loaded. Later files may then be fetched."""


@dataclass(frozen=True)
class Split:
    """A split of a data set: the order of the samples, and this rank's source of batches."""

    source: BatchSource
    order: Order
    prefetcher: FileFetcher | None = None  # None: no whole files are fetched
    check_targets: CheckTargets | None = None

    def __len__(self) -> int:
        return len(self.order)

    def load_batch(self, samples: Indices, epoch: int | None = None) -> Batch:
        batch = self.source.load_batch(samples, epoch, self.check_targets)
        if self.prefetcher is not None:
            self.prefetcher.finish(samples)
        return batch

    def load_evaluation_batches(self, batch_size: int, part: int, parts: int) -> Iterator[tuple[slice, Batch]]:
        """Divide the split's batches into ``parts``, and yield the batches of part number ``part`` (from 0).

        Each batch comes with its slice of the order of evaluations. The batches of a part are consecutive, and are not
        augmented. A part may have no batch.
        """
        numbers = take_slice(np.arange(-(-len(self) // batch_size)), part, parts).tolist()
        places = [slice(number * batch_size, min((number + 1) * batch_size, len(self))) for number in numbers]
        wanted = ((place, self.order.samples_at(place)) for place in places)
        for place, samples in self.iterate_with_prefetch(wanted, lambda item: [item[1]], None, batch_size):
            yield place, self.load_batch(samples)

    def iterate_with_prefetch(
        self,
        items: Iterator[Item],
        list_samples: Callable[[Item], Iterable[Indices]],
        epoch: int | None,
        batch_size: int,
    ) -> Iterator[Item]:
        """Return an iterator over ``items``, such as batches, that starts to load the samples of later items.

        Starting does not wait. Reads ``items`` ahead.

        Args:
            list_samples: Returns the arrays of sample numbers that an item needs.
            epoch: Epoch of training, as in the later call of :meth:`load_batch`, or None in an evaluation.
            batch_size: Samples of a global batch, or of a batch of the evaluation.
        """

        def begin_item(begin: Callable[[Indices], None], item: Item) -> Item:
            for samples in list_samples(item):
                begin(samples)
            return item

        if self.prefetcher is not None:
            distance = self.order.count_batches_to_prefetch(batch_size, mixed=epoch is not None)
            items = start_ahead(partial(begin_item, self.prefetcher.begin_fetching), items, distance)
        if self.source.batches_ahead:
            begin = partial(begin_item, partial(self.source.begin_batch, epoch=epoch))
            items = start_ahead(begin, items, self.source.batches_ahead)
        return items


@dataclass(frozen=True)
class Splits:
    """The training, validation and test split, with the properties of inputs and targets."""

    training: Split
    validation: Split
    test: Split
    inputs: ModelInput  # images with the size, mean and std of the data set, or other leaves
    targets: TargetSpec | None  # None: targets have several leaves, or none

    def with_target_check(self, check_targets: CheckTargets) -> "Splits":
        """Return a copy of these splits that checks the targets that user code makes, by ``check_targets``."""
        splits = (replace(each, check_targets=check_targets) for each in (self.training, self.validation, self.test))
        training, validation, test = splits
        return Splits(training, validation, test, self.inputs, self.targets)

    @property
    def sources(self) -> list[BatchSource]:
        sources = (split.source for split in (self.training, self.validation, self.test))
        return list({id(source): source for source in sources}.values())

    def gather_bad_samples(self) -> frozenset[str]:
        """Return the names of all ranks' samples that could not be decoded. Collective."""
        ours = frozenset[str]().union(*(source.bad_samples() for source in self.sources))
        return frozenset().union(*gather_objects(ours))

    def check_number_of_bad_samples(self, allowed: int) -> None:
        """Raise UserError if all ranks together have more than ``allowed`` samples that cannot be decoded.

        Collective. If ``allowed`` is 0, does nothing, because a rank then fails at its first bad sample.
        """
        if not allowed:  # then a rank fails at its first bad sample
            return
        bad = self.gather_bad_samples()
        if len(bad) > allowed:
            problem = f"{len(bad):,} samples cannot be decoded, more than bad_samples={allowed}"
            fix = "fix or remove the samples, or raise bad_samples"
            raise UserError(f"{join_first(sorted(bad))} cannot be decoded; {problem}; {fix}")

    def close(self) -> None:
        for source in self.sources:
            source.close()
