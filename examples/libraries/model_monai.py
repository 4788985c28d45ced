# /// script
# dependencies = ["monai==1.6.1"]
# ///
"""MONAI: a U-Net for volumes, a Dice loss and a random transform.

pyflyte run workflows/training.py training_wf --hp '{
    "dataset": "examples.libraries.model_monai:draw_volumes", "num_classes": 2,
    "model": "examples.libraries.model_monai:make_unet", "objective": "examples.libraries.model_monai:Dice",
    "augment": "examples.libraries.model_monai:flip",
    "optimizer": "adamw", "learning_rate": 0.01, "batch_size": 8, "epochs": 2}'

Losses need `reduction="none"`, and return a value for each sample and class. Random transforms draw from a separate
generator, which is not seeded. Set the generator's state from NumPy's generator, which is seeded for each sample.
Transforms return a `MetaTensor`, so convert the results to arrays.

`segmentation` does not accept 3D masks as targets, so the objective defines a measure. `answers` returns the columns of
a volume in a table of predictions.
"""

from typing import Any

import numpy as np
from monai.losses import DiceLoss
from monai.metrics import compute_dice
from monai.networks.nets import UNet
from monai.networks.utils import one_hot
from monai.transforms import RandFlip
from torch import Tensor, nn

from flyte_ddp import arrays
from flyte_ddp.objectives import HIGHER, Objective


def make_unet(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:  # noqa: ARG001
    model: nn.Module = UNet(3, input_shape[0], out_channels=2, channels=(4, 8, 16), strides=(2, 2))
    return model


class Dice(Objective):
    measures = {"dice": HIGHER}  # noqa: RUF012

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        dice = DiceLoss(include_background=False, to_onehot_y=True, softmax=True, reduction="none")
        return dice(outputs, targets).flatten(1).mean(1)

    def columns(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        predicted = one_hot(outputs.argmax(1, keepdim=True), 2)
        return {"dice": compute_dice(predicted, one_hot(targets, 2), include_background=False)[:, 0]}

    def measure(self, columns: Any) -> dict[str, float]:
        return {"dice": columns["dice"].nanmean().item()}

    def answers(self, outputs: Tensor) -> dict[str, list[int]]:
        return {"voxels": outputs.argmax(1).flatten(1).sum(1).tolist()}

    def truths(self, targets: Tensor) -> dict[str, list[float]]:
        return {"truth_voxels": targets.flatten(1).sum(1).tolist()}


def flip(volume: Any, mask: Any) -> tuple[Any, Any]:
    transform = RandFlip(prob=0.5, spatial_axis=0)
    transform.set_random_state(np.random.randint(2**31))  # noqa: NPY002 (the generator that is seeded for the sample)
    return np.asarray(transform(volume)), np.asarray(transform(mask, randomize=False))


# What it is tried with.
def draw_volumes(_: str) -> Any:
    """Return noise [1, 16, 16, 16] with a bright cube, and masks of the cube."""
    random = np.random.default_rng(0)
    masks = np.zeros((40, 1, 16, 16, 16), np.float32)
    for mask in masks:
        corner = random.integers(0, 10, 3)
        mask[(0, *(slice(start, start + 6) for start in corner))] = 1
    volumes = (random.normal(size=masks.shape) + 2 * masks).astype(np.float32)
    return arrays((volumes[:32], masks[:32]), (volumes[32:], masks[32:]))
