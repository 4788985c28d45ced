"""Load single samples into the memory of their batch."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.loading.batch_memory import Layout, open_memory
from flyte_ddp.core.loading.split import SampleFacts, TargetSpec
from flyte_ddp.core.loading.user_functions import NO_AUGMENTATION, Sample
from flyte_ddp.core.machine.waiting import limit_wait


class Loaded(NamedTuple):
    """Names and image shape of samples that were loaded into the memory of their batch."""

    names: list[str]
    shape: tuple[int, ...]  # of the images
    report: Any = None  # what SampleLoader.take_report() returned


class SampleLoader(SampleFacts):
    """Base class of loaders of single samples.

    A loader works in a single process, and can be pickled before its first use.
    """

    targets: TargetSpec
    sizes: tuple[tuple[int, ...], ...]  # allowed shapes [H, W, C] of images; all images of a batch have one shape
    augmentation = NO_AUGMENTATION  # whose batches are augmented after loading

    def make_load_functions(self, samples: Sequence[int], epoch: int | None) -> Sequence[Callable[[], Sample]]:
        """Return a function for each sample. The function loads and returns the sample.

        Samples are augmented for an ``epoch`` of training, and not for None. A slow reader starts to read in this call,
        in other threads.
        """
        raise NotImplementedError

    def load_part_of_batch(
        self, samples: Sequence[int], epoch: int | None, first: int, layout: Layout, path: str
    ) -> Loaded:
        """Load some samples of a batch into the batch's memory, from position ``first`` on. Runs in a loader process.

        Args:
            epoch: Epoch of training, for which samples are augmented, or None.
            first: Position of the first of these samples in the batch.
            layout: Layout of the whole batch in the memory.
            path: Path of the memory, which has at least ``layout.size`` bytes.

        Raises:
            UserError: Images have different sizes, or a sample is unfit.
        """
        loaded = load_into_memory(
            open_memory(path, layout.size), layout, first, self.make_load_functions(samples, epoch)
        )
        return loaded._replace(report=self.take_report())

    def take_report(self) -> Any:
        """Return a report of damaged samples and the like since the last call, or None. Each is reported once."""

    def add_report(self, report: Any) -> None:
        """Record what :meth:`take_report` returned in another process.

        Raises:
            UserError: There are too many bad samples.
        """

    def close(self) -> None:
        """Close files."""


def load_into_memory(
    memory: NDArray[np.uint8], layout: Layout, first: int, loads: Sequence[Callable[[], Sample]]
) -> Loaded:
    """Call ``loads``, and write the loaded images and targets into a batch's memory, from position ``first`` on.

    Returns the samples' names and the images' shape.

    Raises:
        UserError: Images have different sizes.
        MachineError: In the main thread, a sample is not loaded within FLYTE_DDP_TIMEOUT.
    """
    targets, names = layout.view_targets(memory), []
    shapes = set[tuple[int, ...]]()
    with limit_wait("a picture"):
        for place, load in enumerate(loads, first):
            image, targets[place], name = load()
            shapes.add(image.shape)
            start = place * layout.image_bytes
            copy_image(image, memory[start : start + image.size].reshape(image.shape))
            names.append(name)
    return Loaded(names, require_common_shape(shapes))


def copy_image(image: NDArray[np.uint8], to: NDArray[np.uint8]) -> None:
    """Copy ``image`` [H, W, C] into ``to``. If pixels are not contiguous, copies by channel, which is faster."""
    if image.flags.c_contiguous:
        to[...] = image
    else:
        for channel in range(image.shape[2]):
            to[..., channel] = image[..., channel]


def require_common_shape(shapes: Collection[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of images, if all ``shapes`` (at least one) are equal.

    Raises:
        UserError: The shapes differ.
    """
    if len({*shapes}) > 1:
        found = " and ".join(str(list(shape)) for shape in sorted({*shapes}))
        raise UserError(f"augment: images of one batch have the shapes {found}; return images of one size")
    return next(iter(shapes))
