"""The global order of samples: pure functions of (seed, epoch, step), whatever the number of ranks.

A rank's share of a step is a slice of the global batch, so that changing the number of ranks changes who computes,
never what is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.integer[Any]]

# What a random stream is for; keeps streams of one seed apart.
SPLIT, ORDER, PACKING, TEST, CYCLE, WITHIN = range(6)


def random_stream(purpose: int, seed: int, first: int = 0, second: int = 0) -> np.random.Generator:
    """A random generator that depends on its arguments alone (Philox is counter-based and the same on all machines).

    Args:
        first: such as the epoch; ``second`` likewise.
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([purpose, seed, first, second])))


def held_out(samples: int, fraction: float) -> int:
    """How many of so many samples :func:`split_indices` holds out."""
    return round(samples * fraction)


def split_indices(samples: int, fraction: float, seed: int, purpose: int = SPLIT) -> tuple[Indices, Indices]:
    """Divides samples at random into those that stay and the fraction that is held out, each in ascending order."""
    number = held_out(samples, fraction)
    order = random_stream(purpose, seed).permutation(np.arange(samples, dtype=np.int32))
    return np.sort(order[number:]), np.sort(order[:number])


def epoch_order(samples: Indices, seed: int, epoch: int) -> Indices:
    """The order in which an epoch (counted from 0) visits the samples."""
    return random_stream(ORDER, seed, epoch).permutation(samples)


def steps_per_epoch(samples: int, batch_size: int) -> int:
    """Global batches in an epoch; the last one may be smaller, none is dropped."""
    return -(-samples // batch_size)


class Order(Protocol):
    """The samples of a split, and the order in which training goes through them."""

    def __len__(self) -> int: ...

    def samples(self, place: slice) -> Indices:
        """Those from one place of the split to another, in an order of the split's own."""

    def batches(self, epoch: int, batch_size: int, first: int = 0) -> Iterator[Indices]:
        """An epoch's global batches, from the ``first``-th one on; the last one may be smaller."""

    def lookahead(self, batch_size: int, *, mixed: bool) -> int:  # noqa: ARG002
        """How many batches ahead the files are worth fetching, in an epoch's order or in the split's own."""
        return 0


@dataclass(frozen=True)
class ListedOrder(Order):
    """Samples that are listed one by one, all mixed in each epoch."""

    listed: Indices
    seed: int = 0

    def __len__(self) -> int:
        return len(self.listed)

    def samples(self, place: slice) -> Indices:
        """Those listed there."""
        return self.listed[place]

    def substitutes(self, sample: int) -> Indices:  # noqa: ARG002
        """All samples: each is as near as any other."""
        return self.listed

    def batches(self, epoch: int, batch_size: int, first: int = 0) -> Iterator[Indices]:
        """Cuts the epoch's order into global batches."""
        order = epoch_order(self.listed, self.seed, epoch)
        for start in range(first * batch_size, len(order), batch_size):
            yield order[start : start + batch_size]


def share(items: Indices, part: int, parts: int) -> Indices:
    """The ``part``-th of ``parts`` consecutive slices, whose lengths differ by one at most, the longer ones first."""
    return items[share_start(len(items), part, parts) : share_start(len(items), part + 1, parts)]


def share_start(length: int, part: int, parts: int) -> int:
    """Where that slice begins, of so many items; the one after the last at their end."""
    return part * (length // parts) + min(part, length % parts)


def share_length(length: int, part: int, parts: int) -> int:
    """How long that slice is."""
    return length // parts + (part < length % parts)
