"""The memory through which loader processes hand batches to their rank."""

import mmap
import os
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64  # bytes


class Layout(NamedTuple):
    """Where the images and the targets of a batch lie in its memory."""

    samples: int
    image_bytes: int  # that are reserved for each image
    dtype: Any  # of the targets
    shape: tuple[int, ...]  # of one target

    @property
    def start_of_targets(self) -> int:
        """The byte at which the targets begin; the images begin at 0."""
        return -(-self.samples * self.image_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def size(self) -> int:
        """The size of the memory in bytes, at least 1."""
        return self.start_of_targets + max(1, self.targets_bytes)

    @property
    def targets_bytes(self) -> int:
        """The size of all targets in bytes."""
        return int(self.samples * np.prod(self.shape, dtype=np.int64) * np.dtype(self.dtype).itemsize)

    def targets(self, memory: NDArray[np.uint8]) -> NDArray[Any]:
        """Return the targets in a batch's memory as an array [samples, ...]."""
        part = memory[self.start_of_targets : self.start_of_targets + self.targets_bytes]
        found: NDArray[Any] = part.view(self.dtype).reshape(self.samples, *self.shape)
        return found

    def images(self, memory: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return the images in a batch's memory as an array [samples, *shape]."""
        rows = memory[: self.samples * self.image_bytes].reshape(self.samples, self.image_bytes)
        return rows[:, : int(np.prod(shape))].reshape(self.samples, *shape)


class BatchMemory:
    """Memory of batches, in an unnamed file that loader processes open by its path; it grows as needed."""

    def __init__(self) -> None:
        self.file = os.memfd_create("flyte-ddp")  # not in /dev/shm, which has 64 MB in a container
        weakref.finalize(self, os.close, self.file)  # a process may train many times
        self.path = f"/proc/{os.getpid()}/fd/{self.file}"
        self.memory: mmap.mmap | None = None

    def resize(self, size: int) -> NDArray[np.uint8]:
        """Return all of the memory, of ``size`` bytes or more. Call it while no batch is in it."""
        if self.memory is None or len(self.memory) < size:
            os.ftruncate(self.file, size)
            self.memory = mmap.mmap(self.file, size)
        return np.frombuffer(self.memory, np.uint8)


def open_memory(opened: dict[str, mmap.mmap], path: str, size: int) -> NDArray[np.uint8]:
    """Return the memory at a path, of at least ``size`` bytes; ``opened`` keeps what was opened before."""
    if path not in opened or len(opened[path]) < size:
        with Path(path).open("r+b") as file:
            opened[path] = mmap.mmap(file.fileno(), 0)
    return np.frombuffer(opened[path], np.uint8)
