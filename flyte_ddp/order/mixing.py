"""The draws of mixup: which samples of a batch are mixed, and by which shares.

Zhang et al., "mixup: beyond empirical risk minimization", ICLR 2018. There a batch has one share and each process
permutes its own part, so that the result depends on the number of processes. Here both are functions of the step and
the sample in the global batch.
"""

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.order import sampling
from flyte_ddp.order.augmentation import uniform_draws
from flyte_ddp.order.sampling import Indices

SEED_OFFSET = 2**34  # makes the shares independent of other draws by (seed, epoch, sample)


def choose_partners(batch: Indices, seed: int, step: int) -> Indices:
    """Return the sample that each sample of a global batch [B] is mixed with: the batch in another order."""
    return sampling.make_generator(sampling.MIXING, seed, step).permutation(batch)


def draw_shares(samples: Indices, alpha: float, seed: int, step: int) -> NDArray[np.float64]:
    """Return the share of each sample in its mixture, [n], 0 to 1: a draw from the distribution Beta(alpha, alpha)."""
    from scipy import special  # which takes as long as all else that a rank imports of this library

    uniform = uniform_draws(seed + SEED_OFFSET, step, samples, 1)[:, 0]
    return np.asarray(special.betaincinv(alpha, alpha, uniform))
