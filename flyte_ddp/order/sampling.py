"""The global order of samples: pure functions of (seed, epoch, step), whatever the number of ranks.

A rank's share of a step is a slice of the global batch, so that changing the number of ranks changes who computes,
never what is computed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.integer[Any]]

# What a random stream is for; keeps streams of one seed apart.
SPLIT, ORDER, PACKING, TEST, CYCLE, WITHIN = range(6)


def random_stream(purpose: int, seed: int, first: int = 0, second: int = 0) -> np.random.Generator:
    """Return a random generator that depends on its arguments alone, on all machines (it is counter-based).

    ``first`` and ``second`` are such as the epoch and the shard.
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([purpose, seed, first, second])))


def held_out(samples: int, fraction: float) -> int:
    """Return how many of so many samples :func:`split_indices` holds out."""
    return round(samples * fraction)


def split_indices(samples: int, fraction: float, seed: int, purpose: int = SPLIT) -> tuple[Indices, Indices]:
    """Divide samples at random; return those that stay and the fraction that is held out, each in ascending order."""
    number = held_out(samples, fraction)
    order = random_stream(purpose, seed).permutation(np.arange(samples, dtype=np.int32))
    return np.sort(order[number:]), np.sort(order[:number])


def epoch_order(samples: Indices, seed: int, epoch: int) -> Indices:
    """Return the samples in the order in which an epoch (counted from 0) visits them."""
    return random_stream(ORDER, seed, epoch).permutation(samples)


def steps_per_epoch(samples: int, batch_size: int) -> int:
    """Return the number of global batches in an epoch; the last one may be smaller, none is dropped."""
    return -(-samples // batch_size)


class Order(Protocol):
    """The samples of a split, and the order in which training goes through them."""

    def __len__(self) -> int: ...

    def samples(self, place: slice) -> Indices:
        """Return the samples in a slice of the split's own order, in which they are evaluated."""

    def batches(self, epoch: int, batch_size: int, first: int = 0) -> Iterator[Indices]:
        """Yield an epoch's global batches, from number ``first`` on; the last one may be smaller."""

    def lookahead(self, batch_size: int, *, mixed: bool) -> int:  # noqa: ARG002
        """Return how many batches ahead to fetch files, in an epoch's order (``mixed``) or in the split's own."""
        return 0


@dataclass(frozen=True)
class ListedOrder(Order):
    """Samples that are listed one by one, all permuted in each epoch."""

    listed: Indices
    seed: int = 0

    def __len__(self) -> int:
        return len(self.listed)

    def samples(self, place: slice) -> Indices:
        """Return the samples in a slice of the list."""
        return self.listed[place]

    def substitutes(self, sample: int) -> Indices:  # noqa: ARG002
        """Return all samples: each is as near as any other."""
        return self.listed

    def batches(self, epoch: int, batch_size: int, first: int = 0) -> Iterator[Indices]:
        """Yield the epoch's global batches, from number ``first`` on; the last one may be smaller."""
        order = epoch_order(self.listed, self.seed, epoch)
        for start in range(first * batch_size, len(order), batch_size):
            yield order[start : start + batch_size]


def share(items: Indices, part: int, parts: int) -> Indices:
    """Return slice number ``part`` of ``parts`` consecutive ones, whose lengths differ by one at most, longer first."""
    return items[share_start(len(items), part, parts) : share_start(len(items), part + 1, parts)]


def share_start(length: int, part: int, parts: int) -> int:
    """Return where slice number ``part`` of so many items begins; ``part`` may be ``parts``, for their end."""
    return part * (length // parts) + min(part, length % parts)
