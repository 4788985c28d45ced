"""Load batches from arrays: memory-mapped and shared by all ranks on a CPU, resident on a GPU."""

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flyte_ddp.catalog import IGNORED
from flyte_ddp.device_copy import copy_to_device
from flyte_ddp.loading.split import Batch, ImageSource
from flyte_ddp.order.augmentation import augment_images
from flyte_ddp.order.sampling import Indices


@dataclass(frozen=True)
class ArrayImages(ImageSource):
    """Source of images in arrays: batches are copied from tensors that are on the device."""

    images: Tensor  # uint8 [N, H, W, C]
    targets: Tensor  # [N] or [N, ...]
    augment: str = "none"  # kind of augmentation: none, crop or crop_flip
    seed: int = 0  # of the augmentation

    def load_batch(self, samples: Indices, epoch: int | None = None) -> Batch:
        """Return a batch of these rows of the arrays, on the arrays' device; augmented if ``epoch`` is given."""
        rows = copy_to_device(torch.from_numpy(samples), self.images.device)
        # Much faster than ``images[rows]`` on a CPU.
        images, targets = (values.index_select(0, rows) for values in (self.images, self.targets))
        if epoch is not None:
            images, targets = augment_batch(images, targets, samples, kind=self.augment, seed=self.seed, epoch=epoch)
        return Batch(images, targets)


def augment_batch(
    images: Tensor, targets: Tensor, samples: Indices, *, kind: str, seed: int, epoch: int
) -> tuple[Tensor, Tensor]:
    """Return images [n, H, W, C], and masks [n, H, W] with them, as :func:`augment_images` does; other targets as are.

    What a mask does not cover becomes 255, an ignored pixel.
    """
    augment = partial(augment_images, kind=kind, seed=seed, epoch=epoch, samples=samples)
    if targets.dim() == 3:
        targets = augment(targets[..., None], fill=IGNORED)[..., 0]
    return augment(images), targets


def open_array_source(
    device: torch.device, images: NDArray[np.uint8], targets: NDArray[Any], augment: str = "none", seed: int = 0
) -> ArrayImages:
    """Return an ArrayImages of these arrays; on a GPU it holds a copy on ``device``, on a CPU the arrays themselves.

    ``augment`` is the kind of augmentation (none, crop or crop_flip), ``seed`` the seed of its random numbers. Hides
    warnings of this process meanwhile.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that mapped memory may not be written to, which nothing does
        on_device = [torch.from_numpy(stored).to(device) for stored in (images, targets)]
    return ArrayImages(on_device[0], on_device[1], augment, seed)
