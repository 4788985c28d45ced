"""Data sets without images, named in tests as ``plain_sets:...``."""

import secrets
from typing import Any

import numpy as np
import torch

from flyte_ddp import on_demand


class Texts:
    """Tokens 1 to 9 of different lengths. With ``changing``, each read gives other tokens."""

    def __init__(self, first: int, samples: int, changing: int = -1) -> None:
        self.first, self.samples, self.changing = first, samples, changing

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, sample: int) -> dict[str, Any]:
        seed = secrets.randbits(60) if sample == self.changing else self.first + sample
        random = np.random.default_rng(seed)
        noise = torch.rand(2)  # seeded by the library
        return {"tokens": random.integers(1, 10, 2 + sample % 5), "noise": noise, "labels": sample % 2}


def texts(source: str) -> Any:
    return on_demand(Texts(0, 40), Texts(100, 10), classes=["even", "odd"])


def changing_texts(source: str) -> Any:
    return on_demand(Texts(0, 40), Texts(100, 10, changing=9), classes=["even", "odd"])


def rows_of_rows(source: str) -> Any:
    """Return a set whose items after the first 64 have one more dimension."""
    return on_demand([(np.ones((1, 3) if sample >= 64 else 3), 0.5) for sample in range(70)], [(np.ones(3), 0.5)])
