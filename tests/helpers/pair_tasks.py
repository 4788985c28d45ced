"""Pairs for losses that compare samples, with a model and a user-defined objective."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from objective_tasks import TEST, TRAIN
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from flyte_ddp import across_ranks, arrays
from flyte_ddp.datasets import SampleArrays
from flyte_ddp.objectives import HIGHER, Objective


def pairs(source: str) -> SampleArrays:
    """Return two views of each sample, [6] and [5], without targets."""
    random = np.random.default_rng(3)
    hidden = random.normal(size=(TRAIN + TEST, 4))
    views = [hidden @ random.normal(size=(4, width)) + random.normal(0, 0.3, (TRAIN + TEST, width)) for width in (6, 5)]
    return arrays((tuple(view[:TRAIN] for view in views), None), (tuple(view[TRAIN:] for view in views), None))


class Towers(nn.Module):
    """Returns an embedding of each view, and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(6, 3), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return normalize(self.image(image)), normalize(self.text(text)), self.scale.exp()


class Contrastive(Objective):
    """The objective of the documents."""

    compares_samples = True
    measures: Mapping[str, str] = {"recall_at_1": HIGHER}

    def losses(self, outputs: Any, targets: None) -> Tensor:
        image, text, scale = outputs
        (images, own), (texts, _) = across_ranks(image), across_ranks(text)
        by_image = cross_entropy(scale * image @ texts.T, own, reduction="none")
        return (by_image + cross_entropy(scale * text @ images.T, own, reduction="none")) / 2

    def columns(self, outputs: Any, targets: None) -> dict[str, Tensor]:
        return {"image": outputs[0], "text": outputs[1]}

    def measure(self, columns: Mapping[str, Tensor]) -> dict[str, float]:
        nearest = (columns["image"] @ columns["text"].T).argmax(1)
        return {"recall_at_1": (nearest == torch.arange(len(nearest))).double().mean().item()}
