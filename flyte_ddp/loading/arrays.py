"""Load batches from arrays: memory-mapped and shared by all ranks on a CPU, resident on a GPU."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flyte_ddp.device_copy import copy_to_device
from flyte_ddp.loading.split import Batch, ImageSource
from flyte_ddp.order.augmentation import augment_images
from flyte_ddp.order.sampling import Indices


@dataclass(frozen=True)
class ArrayImages(ImageSource):
    """Source of images in arrays.

    On a CPU batches are copied from the memory-mapped file, so ranks share one copy in the page cache. On a GPU the
    uint8 arrays are copied there once, and batches are indexed on the GPU.
    """

    images: NDArray[np.uint8] | Tensor  # [N, H, W, C]
    labels: NDArray[np.int64] | Tensor  # [N]
    augment: str = "none"  # kind of augmentation: none, crop or crop_flip
    seed: int = 0  # of the augmentation

    def load_batch(self, samples: Indices, epoch: int | None = None) -> Batch:
        """Return a batch of these rows of the arrays, on the arrays' device; augmented if ``epoch`` is given."""
        if isinstance(self.images, Tensor):
            assert isinstance(self.labels, Tensor)
            rows = copy_to_device(torch.from_numpy(samples), self.images.device)
            images, labels = self.images[rows], self.labels[rows]
        else:
            images = torch.from_numpy(self.images[samples])
            labels = torch.from_numpy(np.asarray(self.labels[samples]))
        if epoch is not None:
            images = augment_images(images, self.augment, seed=self.seed, epoch=epoch, samples=samples)
        return Batch(images, labels)


def open_array_source(
    device: torch.device, images: NDArray[np.uint8], labels: NDArray[np.int64], augment: str = "none", seed: int = 0
) -> ArrayImages:
    """Return an ArrayImages of these arrays; on a GPU it holds a copy on ``device``, on a CPU the arrays themselves.

    ``augment`` is the kind of augmentation (none, crop or crop_flip), ``seed`` the seed of its random numbers.
    """
    if device.type == "cpu":
        # A plain array of the same mapped memory: indexing an np.memmap is slower.
        return ArrayImages(np.asarray(images), np.asarray(labels), augment, seed)
    on_gpu = [torch.from_numpy(np.array(stored)).to(device) for stored in (images, labels)]
    return ArrayImages(on_gpu[0], on_gpu[1], augment, seed)
