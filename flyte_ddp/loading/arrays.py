"""Images from arrays that all ranks map into memory together; on a GPU the arrays are resident."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flyte_ddp.device_copy import copy_to_device
from flyte_ddp.loading.split import Batch, Images
from flyte_ddp.order.augmentation import augment
from flyte_ddp.order.sampling import Indices


@dataclass(frozen=True)
class ArrayImages(Images):
    """Arrays that all ranks map into memory together.

    On a CPU a batch is gathered straight from the memory-mapped file, so that ranks share one copy in the page cache.
    On a GPU all of them, still uint8, are copied once and batches are gathered there.
    """

    images: NDArray[np.uint8] | Tensor  # [N, H, W, C]
    labels: NDArray[np.int64] | Tensor  # [N]
    augment: str = "none"
    seed: int = 0

    def gather(self, samples: Indices, epoch: int | None = None) -> Batch:
        """Return these rows of the arrays."""
        if isinstance(self.images, Tensor):
            where = copy_to_device(torch.from_numpy(samples), self.images.device)
            assert isinstance(self.labels, Tensor)
            images, labels = self.images[where], self.labels[where]
        else:
            images = torch.from_numpy(self.images[samples])
            labels = torch.from_numpy(np.asarray(self.labels[samples]))
        if epoch is not None:
            images = augment(images, self.augment, seed=self.seed, epoch=epoch, samples=samples)
        return Batch(images, labels)


def open_array_images(
    device: torch.device, images: NDArray[np.uint8], labels: NDArray[np.int64], kind: str = "none", seed: int = 0
) -> ArrayImages:
    """Return the source of stored arrays, which are copied to a GPU; ``kind`` and ``seed`` are of the augmentation."""
    if device.type == "cpu":
        # The same memory without numpy's memmap class, whose indexing is slower.
        return ArrayImages(np.asarray(images), np.asarray(labels), kind, seed)
    on_gpu = [torch.from_numpy(np.array(stored)).to(device) for stored in (images, labels)]
    return ArrayImages(on_gpu[0], on_gpu[1], kind, seed)
