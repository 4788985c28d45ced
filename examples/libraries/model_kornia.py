# /// script
# dependencies = [
#     "kornia==0.9.0",
#     "kornia-rs==0.2.0",
# ]
# ///
"""kornia: augmentations in loader processes, and a focal loss.

pyflyte run workflows/training.py training_wf --hp '{
    "dataset": "digits", "augment": "examples.libraries.model_kornia:augment",
    "objective": "examples.libraries.model_kornia:focal", "batch_size": 32, "max_steps": 8}'

An augmentation inside a model draws random numbers for the rank's part of a batch. Another number of ranks then gives
another result, and the report notes this. In `augment`, random numbers depend on seed, epoch and sample. kornia's
images are floats [N, C, H, W] from 0 to 1.

`focal_loss` returns a value for each class. Add the values up.
"""

from typing import Any

import torch
from kornia import augmentation
from kornia.losses import focal_loss
from torch import Tensor

PIPELINE = augmentation.AugmentationSequential(
    augmentation.RandomAffine(degrees=10, translate=(0.1, 0.1), p=1.0),
    augmentation.RandomGaussianNoise(std=0.05, p=0.5),
)


def augment(image: Any, target: Any) -> tuple[Tensor, Any]:
    """Return the changed uint8 image [H, W, C] as uint8 [C, H, W], and the unchanged target."""
    pixels = torch.as_tensor(image).movedim(-1, 0)[None] / 255
    return (PIPELINE(pixels)[0].clamp(0, 1) * 255).round().to(torch.uint8), target


def focal(outputs: Tensor, targets: Tensor, gamma: float = 2.0) -> Tensor:
    losses: Tensor = focal_loss(outputs, targets, alpha=None, gamma=gamma, reduction="none").sum(1)
    return losses
