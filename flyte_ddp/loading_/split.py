"""Batches on the device, from arrays that all ranks map into memory together; on a GPU the arrays are resident."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flyte_ddp.sampling import Indices


@dataclass(frozen=True)
class ImageSet:
    """One split of a data set as this rank sees it.

    On a CPU a batch is gathered straight from the memory-mapped file, so that ranks share one copy in the page cache.
    On a GPU the whole split, still uint8, is copied once and batches are gathered there.
    """

    images: NDArray[np.uint8] | Tensor  # [N, H, W, C]
    labels: NDArray[np.int64] | Tensor  # [N]
    indices: Indices  # the positions, in the stored arrays, of this split's samples

    def __len__(self) -> int:
        return len(self.indices)

    def gather(self, positions: Indices) -> tuple[Tensor, Tensor]:
        """Images uint8 [n, H, W, C] and labels int64 [n] at positions of the stored arrays, on the device."""
        if isinstance(self.images, Tensor):
            where = torch.from_numpy(positions).to(self.images.device)
            assert isinstance(self.labels, Tensor)
            return self.images[where], self.labels[where]
        return torch.from_numpy(self.images[positions]), torch.from_numpy(np.asarray(self.labels[positions]))

    def batches(self, batch_size: int, part: int, parts: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """The whole batches, in order, that fall to one of ``parts``: every parts-th one, starting with ``part``.

        Yields:
            The batch's place within the split, its images and its labels.

        """
        for start in range(part * batch_size, len(self), parts * batch_size):
            place = slice(start, min(start + batch_size, len(self)))
            yield place, *self.gather(self.indices[place])


def on_device(
    device: torch.device, images: NDArray[np.uint8], labels: NDArray[np.int64]
) -> tuple[NDArray[np.uint8] | Tensor, NDArray[np.int64] | Tensor]:
    """Stored arrays as they are for a CPU, copied to the device for a GPU."""
    if device.type == "cpu":
        # The same memory without numpy's memmap class, whose indexing is slower.
        return np.asarray(images), np.asarray(labels)
    return torch.from_numpy(np.array(images)).to(device), torch.from_numpy(np.array(labels)).to(device)
