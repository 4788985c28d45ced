"""The global order of samples: pure functions of (seed, epoch, step), whatever the number of ranks.

A rank's share of a step is a slice of the global batch, so that changing the number of ranks changes who computes,
never what is computed.
"""

from __future__ import annotations

from typing import Any

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


def split_indices(samples: int, validation_fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Divides the training samples at random into those trained on and those held out, each in ascending order."""
    held_out = round(samples * validation_fraction)
    order = random_stream(SPLIT, seed).permutation(np.arange(samples, dtype=np.int32))
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def epoch_order(samples: Indices, seed: int, epoch: int) -> Indices:
    """The order in which an epoch (counted from 0) visits the samples."""
    return random_stream(ORDER, seed, epoch).permutation(samples)


def steps_per_epoch(samples: int, batch_size: int) -> int:
    """Global batches in an epoch; the last one may be smaller, none is dropped."""
    return -(-samples // batch_size)


def share(items: Indices, part: int, parts: int) -> Indices:
    """The ``part``-th of ``parts`` consecutive slices, whose lengths differ by one at most, the longer ones first."""
    start, end = (part_ * (len(items) // parts) + min(part_, len(items) % parts) for part_ in (part, part + 1))
    return items[start:end]


def share_length(length: int, part: int, parts: int) -> int:
    """How long that slice is, of so many items."""
    return length // parts + (part < length % parts)
