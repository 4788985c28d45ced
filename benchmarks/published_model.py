"""torchvision's ResNet18 as in the published runs; writes its weights to a file after every epoch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torchvision.models import resnet18

FOLDER = "FLYTE_DDP_PUBLISHED_WEIGHTS"  # environment: where to


class Published(nn.Module):
    """Takes grey images of [0, 1] in three equal channels; from random weights."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net = resnet18(num_classes=num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [N, classes] of images [N, 1, 28, 28]."""
        return cast("Tensor", self.net(images.expand(-1, 3, -1, -1)))

    def train(self, mode: bool = True) -> Published:
        """An evaluation in the library begins with ``train(False)``: after the last step of an epoch."""
        if self.training and not mode and (folder := os.environ.get(FOLDER)):
            path = Path(folder, f"{int(self.net.bn1.num_batches_tracked)}.pt")
            first_rank = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
            if first_rank and not path.exists():
                partial = path.with_suffix(".partial")
                torch.save(self.net.state_dict(), partial)
                partial.rename(path)  # whole or not at all, as the run may be cut off here
        return super().train(mode)


def build(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """For ``model: benchmarks.published_model:build``."""
    if input_shape != (1, 28, 28):
        raise ValueError(f"images of {input_shape}: the published runs are on FashionMNIST")
    return Published(num_classes)
