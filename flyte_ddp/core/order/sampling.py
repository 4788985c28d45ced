"""The global order of samples: pure functions of (seed, epoch, step), whatever the number of ranks.

A rank trains on a slice of each global batch, so the number of ranks never changes which samples make up a step.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.integer[Any]]

# Purposes of random generators: they make the generators of one seed independent of each other.
SPLIT, ORDER, PACKING, TEST, CYCLE, WITHIN, DRAWS, MIXING = range(8)


def make_generator(purpose: int, seed: int, first: int = 0, second: int = 0) -> np.random.Generator:
    """Return a random generator whose numbers depend only on the arguments, on all machines.

    Args:
        purpose: One of the constants above, such as ORDER, which makes generators independent of each other.
        first: A number such as the epoch.
        second: A number such as the shard.
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([purpose, seed, first, second])))


def split_indices(samples: int, fraction: float, seed: int, purpose: int = SPLIT) -> tuple[Indices, Indices]:
    """Divide the numbers 0..samples-1 at random into a rest and a held-out part.

    The held-out part has ``fraction`` of the numbers, rounded. The division depends only on the arguments.

    Returns:
        The rest, and the held-out numbers, both ascending.
    """
    count = round(samples * fraction)
    order = make_generator(purpose, seed).permutation(np.arange(samples, dtype=np.int32))
    return np.sort(order[count:]), np.sort(order[:count])


def steps_per_epoch(samples: int, batch_size: int) -> int:
    """Return the number of global batches in an epoch.

    No sample is dropped, so the last batch may be smaller.
    """
    return -(-samples // batch_size)


class Order(Protocol):
    """The order of a split's samples in evaluations, and in each epoch of training."""

    def __len__(self) -> int: ...

    def samples_at(self, place: slice) -> Indices:
        """Return the samples at the positions ``place`` of the order of evaluations. ``place`` is a slice without step.

        An evaluation has each sample of the split once.
        """

    def batches(self, epoch: int, batch_size: int, first: int = 0) -> Iterator[Indices]:
        """Yield the global batches of an epoch of training, from batch ``first`` on. The last batch may be smaller."""

    def count_batches_to_prefetch(self, batch_size: int, *, mixed: bool) -> int:  # noqa: ARG002
        """Return for how many batches ahead files are fetched: 0 by default, if the split has no files to fetch.

        ``mixed`` is True in an epoch of training, and False in an evaluation.
        """
        return 0


@dataclass(frozen=True)
class ListedOrder(Order):
    """An explicit list of samples. Each epoch of training permutes the whole list."""

    listed: Indices  # ascending
    seed: int = 0

    def __len__(self) -> int:
        return len(self.listed)

    def samples_at(self, place: slice) -> Indices:
        return self.listed[place]

    def list_substitutes(self, sample: int) -> Indices:  # noqa: ARG002
        """Return the samples that may replace a damaged sample: here all samples, ascending."""
        return self.listed

    def epoch_order(self, epoch: int) -> Indices:
        return make_generator(ORDER, self.seed, epoch).permutation(self.listed)

    def batches(self, epoch: int, batch_size: int, first: int = 0) -> Iterator[Indices]:
        order = self.epoch_order(epoch)
        for start in range(first * batch_size, len(order), batch_size):
            yield order[start : start + batch_size]


def take_slice(items: Indices, part: int, parts: int) -> Indices:
    """Cut ``items`` into ``parts`` consecutive slices, and return slice number ``part``.

    The lengths of slices differ by at most 1, and longer slices come first.
    """
    return items[compute_slice_start(len(items), part, parts) : compute_slice_start(len(items), part + 1, parts)]


def compute_slice_start(length: int, part: int, parts: int) -> int:
    """Return the position where slice ``part`` of :func:`take_slice` begins, if there are ``length`` items.

    For ``part`` equal to ``parts``, returns ``length``.
    """
    return part * (length // parts) + min(part, length % parts)
