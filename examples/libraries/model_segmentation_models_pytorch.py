# /// script
# dependencies = [
#     "segmentation-models-pytorch==0.6.0",
#     "timm==1.0.31",
# ]
# ///
"""segmentation-models-pytorch: a U-Net with an encoder of the library, and a Dice loss for each sample.

pyflyte run workflows/training.py training_wf --hp '{
    "dataset": "examples.segmentation.shapes:load_shapes",
    "model": "examples.libraries.model_segmentation_models_pytorch:make_unet",
    "objective": "examples.libraries.model_segmentation_models_pytorch:Dice",
    "optimizer": "adamw", "learning_rate": 0.003, "batch_size": 16, "max_steps": 8}'

Losses of this library reduce a batch to one number. This number depends on the distribution of samples to ranks, so
call the loss for each sample. `segmentation` itself, with cross-entropy, needs no user-defined objective. With five
stages of the encoder, sides of images must be multiples of 32.
"""

import segmentation_models_pytorch as smp
import torch
from torch import Tensor, nn

from flyte_ddp.objectives import Segmentation


def make_unet(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    sizes = {"encoder_depth": 3, "decoder_channels": (32, 16, 8)}  # the image's sides are multiples of 2**encoder_depth
    model: nn.Module = smp.Unet(
        "resnet18", encoder_weights=None, in_channels=input_shape[0], classes=num_classes, **sizes
    )
    return model


class Dice(Segmentation):
    def weights(self, targets: Tensor) -> Tensor:
        return torch.ones(len(targets), device=targets.device)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        dice = smp.losses.DiceLoss("multiclass", ignore_index=255)  # for a batch, the Dice of all pixels together
        return torch.stack([dice(one[None], mask[None].long()) for one, mask in zip(outputs, targets, strict=True)])
