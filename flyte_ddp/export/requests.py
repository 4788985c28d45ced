"""The images of a test split as they come to a server: decoded, and nothing else."""

from collections.abc import Iterator
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.datasets.arrays import ImageArrays
from flyte_ddp.datasets.prepared import PreparedSet, order_of_tests
from flyte_ddp.export.served import Served
from flyte_ddp.hardware import cores
from flyte_ddp.loading.cropping import squared
from flyte_ddp.loading.decoding import DecodingError, Pixels
from flyte_ddp.loading.encoded import Encoded, decoded, in_order
from flyte_ddp.loading.opening import reader
from flyte_ddp.settings import Settings


def raw_images(data: PreparedSet, channels: int, settings: Settings) -> Iterator[NDArray[np.uint8]]:
    """All that can be decoded [H, W, channels], in the split's order; grey ones as RGB where the model takes that."""
    if isinstance(data, ImageArrays):
        for image in data.test_images:
            yield np.repeat(image, channels // image.shape[2], axis=2)
        return
    order = order_of_tests(data)
    with closing(reader(data.tested, settings)) as images:

        def pixels(sample: int, found: Encoded) -> Pixels | None:
            try:
                return decoded(images, sample, found)[0]
            except DecodingError:
                return None

        samples, threads = order.samples(slice(0, len(order))), settings.loader_threads or cores()
        ahead = 2 * threads  # of images that may be large
        yield from (image for image in in_order(images, samples, threads, pixels, ahead) if image is not None)


def canvas(image: NDArray[np.uint8], served: Served) -> NDArray[np.uint8]:
    """An image in a form that is of one size for all images, so that they make batches; the model finds the same in it.

    One of which the model takes the middle comes as the middle of a larger square, in the size that the model works
    with. Others are of one size already.
    """
    if not served.middle:
        return image
    side = served.height
    square = np.zeros((round(side * 8 / 7), round(side * 8 / 7), served.channels), dtype=np.uint8)
    start = (len(square) - side) // 2
    square[start : start + side, start : start + side] = squared(image, side)
    return square
