"""Images and targets in memory as a source of batches."""

import torch
from torch import Tensor

from flyte_ddp.core.loading.arrays import ArrayBatches, LoadedLeaf
from flyte_ddp.core.loading.user_functions import Augmentation


def images_in_memory(images: Tensor, targets: Tensor, device: torch.device, augment: str = "none") -> ArrayBatches:
    inputs, labels = (LoadedLeaf(each, device, widened=False) for each in (images, targets))
    return ArrayBatches(inputs, labels, images.device, augmentation=Augmentation(augment))
