# /// script
# dependencies = ["timm==1.0.31"]
# ///
"""timm: a classifier of images by its name.

pyflyte run workflows/training.py training_wf --hp '{
    "dataset": "digits", "image_size": 32, "model": "examples.libraries.model_timm:make_model",
    "options": {"model": {"name": "test_efficientnet"}}, "batch_size": 32, "max_steps": 8}'

`BatchNormAct2d` counts as BatchNorm: it is over all ranks. `drop_path_rate` and `DropBlock` draw random numbers of
their own, and the report says that another number of ranks then gives another result.
"""

import timm
from torch import nn


def make_model(num_classes: int, input_shape: tuple[int, int, int], name: str = "test_efficientnet") -> nn.Module:
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=num_classes, in_chans=input_shape[0])
    return model
