"""Memory through which loader processes pass batches to the rank."""

import math
import mmap
import os
import pickle
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64  # bytes
OPENED: dict[str, mmap.mmap] = {}  # in a loader process: the opened memories of the rank, by path


class Layout(NamedTuple):
    """Layout of a batch's images and targets in a memory."""

    samples: int
    image_bytes: int  # reserved for each image
    dtype: str  # of the targets, as text: an np.dtype takes three times as long to pickle
    shape: tuple[int, ...]  # of one target

    @property
    def start_of_targets(self) -> int:
        return -(-self.samples * self.image_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def size(self) -> int:
        targets_bytes = self.samples * math.prod(self.shape) * int(np.dtype(self.dtype).itemsize)
        return self.start_of_targets + max(1, targets_bytes)  # an empty file cannot be mapped

    def view_targets(self, memory: NDArray[np.uint8]) -> NDArray[Any]:
        """Return a view of the targets, [samples, *shape], in the batch's memory."""
        return np.ndarray((self.samples, *self.shape), self.dtype, memory, self.start_of_targets)

    def view_images(self, memory: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return a view of the images in the batch's memory, [samples, H, W, C]. ``shape`` is [H, W, C].

        An image may be smaller than the ``image_bytes`` that are reserved for an image.
        """
        rows = memory[: self.samples * self.image_bytes].reshape(self.samples, self.image_bytes)
        return rows[:, : math.prod(shape)].reshape(self.samples, *shape)


class BatchMemory:
    """Memory for a batch, in an unnamed file that grows as needed. Linux only.

    Loader processes open the file by its path. The file is closed when this object is deleted.
    """

    def __init__(self) -> None:
        self.file = os.memfd_create("flyte-ddp")  # not in /dev/shm, which has 64 MB in a container
        weakref.finalize(self, os.close, self.file)  # a process that trains many times must not run out of files
        self.path = f"/proc/{os.getpid()}/fd/{self.file}"
        self.memory: mmap.mmap | None = None

    def grow(self, size: int) -> NDArray[np.uint8]:
        """Grow the memory to at least ``size`` bytes if needed, and return a view of the whole memory.

        Call this method only while the memory holds no batch. The memory never shrinks.

        Raises:
            OSError: The system has no room, or a limit of this process is exceeded.
        """
        if self.memory is None or len(self.memory) < size:
            os.ftruncate(self.file, size)
            self.memory = mmap.mmap(self.file, size)
        return np.frombuffer(self.memory, np.uint8)


def write_tree(path: str, tree: Any) -> tuple[int, int]:
    """Write a tree of arrays into the memory at ``path``, and return its position. Grows the memory if needed.

    The tree is pickled, but the content of arrays is stored beside the pickle, so :func:`read_tree` needs no copy.

    Args:
        path: Path of a BatchMemory. The file stays open in this process.
        tree: Any value that can be pickled, such as nested tuples and dicts of arrays.

    Returns:
        The position (start, end) of the index, in bytes. :func:`read_tree` needs the position.
    """
    buffers = list[pickle.PickleBuffer]()
    pickled = pickle.dumps(tree, protocol=5, buffer_callback=buffers.append)
    contents = [buffer.raw() for buffer in buffers]
    places, end = list[tuple[int, int]](), 0
    for content in contents:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + content.nbytes
        places.append((start, end))
    contents.append(memoryview(pickle.dumps((pickled, places))))
    places.append((end, end + contents[-1].nbytes))
    if Path(path).stat().st_size < places[-1][1]:
        os.truncate(path, places[-1][1])
    memory = open_memory(path, places[-1][1])
    for (start, stop), content in zip(places, contents, strict=True):
        memory[start:stop] = np.frombuffer(content, np.uint8)
    return places[-1]


def read_tree(memory: NDArray[np.uint8], place: tuple[int, int]) -> Any:
    """Return the tree that :func:`write_tree` wrote at ``place``, without copying the arrays.

    The arrays are views, which keep the memory in use.
    """
    pickled, places = pickle.loads(memory[slice(*place)].data)
    return pickle.loads(pickled, buffers=[memory[start:stop] for start, stop in places])


def open_memory(path: str, size: int) -> NDArray[np.uint8]:
    """Open the rank's memory at ``path``, which must have at least ``size`` bytes, and return a writable view.

    This process keeps the memory open for later calls.
    """
    if path not in OPENED or len(OPENED[path]) < size:
        with Path(path).open("r+b") as file:
            OPENED[path] = mmap.mmap(file.fileno(), 0)
    return np.frombuffer(OPENED[path], np.uint8)
