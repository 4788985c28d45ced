# /// script
# dependencies = ["timm==1.0.31"]
# ///
"""timm: an image classifier by name.

pyflyte run workflows/training.py training_wf --hp '{
    "dataset": "digits", "image_size": 32, "model": "examples.libraries.model_timm:make_model",
    "options": {"model": {"name": "test_efficientnet"}}, "batch_size": 32, "max_steps": 8}'

`BatchNormAct2d` counts as BatchNorm, and is computed over all ranks. `drop_path_rate` and `DropBlock` draw random
numbers in the model. Another number of ranks then gives another result, and the report notes this.
"""

import timm
from torch import nn


def make_model(num_classes: int, input_shape: tuple[int, int, int], name: str = "test_efficientnet") -> nn.Module:
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=num_classes, in_chans=input_shape[0])
    return model
