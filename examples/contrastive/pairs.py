"""Contrastive learning: match the left and the right sides of handwritten digits.

Run it with ``pyflyte run workflows/training.py training_wf --hp examples/contrastive/hp.json``.
"""

from collections.abc import Mapping
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from flyte_ddp import across_ranks, arrays
from flyte_ddp.datasets import SampleArrays
from flyte_ddp.objectives import HIGHER, Objective

TEST, PIXELS = 360, 40


def load_sides(source: str) -> SampleArrays:  # noqa: ARG001 (the hyperparameter data_source, unused here)
    """Return scikit-learn's 1797 digits as pairs of float [40], without targets.

    A pair has the left and the right 5 of 8 columns.
    """
    images = load_digits().images / 16
    sides = images[:, :, :5].reshape(len(images), PIXELS), images[:, :, 3:].reshape(len(images), PIXELS)
    train, test = (tuple(side[part] for side in sides) for part in (slice(TEST, None), slice(TEST)))
    return arrays((train, None), (test, None))


class Towers(nn.Module):
    """Maps left and right sides [n, 40] to embeddings [n, width] of length 1."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Linear(PIXELS, 256), nn.ReLU(), nn.BatchNorm1d(256), nn.Linear(256, width))
            for _ in range(2)
        )
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the embeddings of both sides, and the scale of their products, a scalar."""
        return normalize(self.left(left)), normalize(self.right(right)), self.log_scale.exp()


class Contrastive(Objective):
    """A loss that compares each side with all partners in the global batch (Radford et al., ICML 2021)."""

    compares_samples = True
    measures: Mapping[str, str] = {"recall_at_1": HIGHER}
    loss_unit = "cross-entropy (nats)"

    def losses(self, outputs: Any, targets: None) -> Tensor:  # noqa: ARG002
        """Return the mean of both directions' cross-entropies, [n]."""
        left, right, scale = outputs
        (lefts, own), (rights, _) = across_ranks(left), across_ranks(right)
        by_left = cross_entropy(scale * left @ rights.T, own, reduction="none")
        return (by_left + cross_entropy(scale * right @ lefts.T, own, reduction="none")) / 2

    def scores(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Return the negative loss of each pair, [N].

        Without this method, a release would call ``measure`` for each sample.
        """
        return -columns["loss"]

    def columns(self, outputs: Any, targets: None) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the embeddings of each sample."""
        return {"left": outputs[0], "right": outputs[1]}

    def measure(self, columns: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the share of left sides whose nearest right side in the split is the partner."""
        nearest = (columns["left"] @ columns["right"].T).argmax(1)
        return {"recall_at_1": (nearest == torch.arange(len(nearest))).double().mean().item()}
