"""Orders of training in which an epoch may repeat or skip samples.

Samples are drawn by weights, or chosen by a user's function. Like all orders, these are pure functions of (seed,
epoch), whatever the number of ranks and wherever a run resumes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.order.sampling import DRAWS, Indices, ListedOrder, make_generator


@dataclass(frozen=True, kw_only=True)
class WeightedOrder(ListedOrder):
    """An order that draws samples with replacement, as many in an epoch as the split has samples.

    A sample's probability is its share of the sum of the weights.
    """

    ends: NDArray[np.float64]  # running sums of the weights of ``listed``

    def epoch_order(self, epoch: int) -> Indices:
        """Draw the samples of an epoch by weight, as many as the split has. Samples may be repeated or missing."""
        # A draw is below 1, and so below the last end. A draw chooses the first sample whose end is above the draw. A
        # sample with weight 0 has the end of the sample before, and is never chosen.
        draws = make_generator(DRAWS, self.seed, epoch).random(len(self.listed)) * self.ends[-1]
        chosen: Indices = self.listed[np.searchsorted(self.ends, draws, side="right")]
        return chosen


@dataclass(frozen=True, kw_only=True)
class CustomOrder(ListedOrder):
    """The order that a user's function returns for each epoch. Samples may be repeated or missing."""

    spec: str  # the function's name, package.module:callable
    choose_samples: Callable[[Indices, int, int], Any]  # called with samples [N], seed and epoch
    length: int = 0  # of each epoch

    def __len__(self) -> int:
        return self.length

    def epoch_order(self, epoch: int) -> Indices:
        """Return the samples that the user's function chooses for an epoch. The function's exceptions pass through.

        Raises:
            UserError: The function returns something unfit, or another number of samples than for epoch 0.
        """
        chosen = self.call_choose_samples(epoch)
        if len(chosen) != self.length:
            raise UserError(
                f"sampling={self.spec!r}: returned {len(chosen):,} samples for epoch {epoch} and {self.length:,} for "
                "epoch 0: each epoch must have the same number of samples, because the number of steps is fixed"
            )
        return chosen

    def call_choose_samples(self, epoch: int) -> Indices:
        """Return the samples that the user's function chooses for an epoch, without a check of their number.

        The function's exceptions pass through.

        Raises:
            UserError: The function returns no whole numbers [M], no number at all, or samples of another split.
        """
        chosen = np.asarray(self.choose_samples(self.listed.astype(np.int64), self.seed, epoch))
        if chosen.ndim != 1 or not len(chosen) or chosen.dtype.kind not in "iu":
            raise UserError(
                f"sampling={self.spec!r}: returned {chosen.dtype} {list(chosen.shape)} for epoch {epoch}: must be "
                "whole numbers [M], at least one; return some of the given samples"
            )
        if len(others := np.setdiff1d(chosen, self.listed)):
            raise UserError(
                f"sampling={self.spec!r}: returned sample {others[0]} for epoch {epoch}, which is not in the training "
                "split; return some of the given samples"
            )
        return chosen.astype(np.int64)


def make_weighted_order(order: ListedOrder, weights: NDArray[Any]) -> WeightedOrder:
    """Return an order that draws samples of ``order`` with replacement, with probabilities proportional to ``weights``.

    ``weights`` has a number for each sample of ``order``, in ascending order of the samples.

    Raises:
        UserError: All weights are 0.
    """
    ends = np.cumsum(weights, dtype=np.float64)
    if not len(ends) or ends[-1] == 0:
        raise UserError(
            "sampling='weighted': the weights of all training samples are 0; give at least one sample a weight above 0"
        )
    return WeightedOrder(order.listed, order.seed, ends=ends)


def compute_inverse_class_counts(labels: NDArray[Any]) -> NDArray[np.float64]:
    """Return a weight for each sample: 1 divided by the number of samples in the sample's class."""
    _, classes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    weights: NDArray[np.float64] = 1.0 / counts[classes]
    return weights


def make_custom_order(order: ListedOrder, spec: str, choose_samples: Callable[[Indices, int, int], Any]) -> CustomOrder:
    """Return an order whose samples a user's function chooses. To check the function, calls it twice for epoch 0.

    Args:
        order: The samples of the split, and the seed.
        spec: The function's name, for errors.
        choose_samples: The function, which is called with samples, seed and epoch. Its exceptions pass through.

    Raises:
        UserError: The two calls return different samples, or something else than samples of the split.
    """
    custom = CustomOrder(order.listed, order.seed, spec=spec, choose_samples=choose_samples)
    first, again = custom.call_choose_samples(0), custom.call_choose_samples(0)
    if not np.array_equal(first, again):
        raise UserError(
            f"sampling={spec!r}: returned different samples in a second call for epoch 0: must depend on samples, seed "
            "and epoch only; draw with np.random.default_rng([seed, epoch])"
        )
    return replace(custom, length=len(first))
