"""Measure images: their mode, size, brightness and pixels, and their targets."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.datasets.encoded_set import EncodedSet
from flyte_ddp.datasets.images import ImageArrays
from flyte_ddp.datasets.prepared import order_test_split
from flyte_ddp.loading.decoding import DecodingError, Pixels, decode_image, open_with_pillow
from flyte_ddp.loading.encoded import Encoded, ImageReader, map_samples
from flyte_ddp.order.sampling import Indices
from flyte_ddp.shards.index import ShardIndex
from flyte_ddp.validation.leaf_profile import PartProfile, count_targets, digest_leaves, digest_samples, find_unnamed
from flyte_ddp.validation.profile import CLASSES, DataProfile

AHEAD = 512  # samples that are read or decoded at a time
MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's mode by number of channels


class Measured(NamedTuple):
    """What is counted and compared of one image."""

    statistics: tuple[str, str, str]  # colour mode, size and brightness
    digest: int


def measure_image_arrays(data: ImageArrays, split: str, profile: DataProfile) -> Iterator[PartProfile]:
    tests, training = (data.test_images, data.test_labels), (data.train_images, data.train_labels)
    images, targets = tests if split == "test" else training
    mode = MODES.get(images.shape[3], f"{images.shape[3]} channels")
    for start in range(0, len(images), AHEAD):
        part = slice(start, min(start + AHEAD, len(images)))
        found = [measure_pixels(mode, pixels) for pixels in images[part]]
        yield make_part(range(part.start, part.stop), targets[part], found, profile)


def measure_encoded_images(
    source: ImageReader, numbers: Indices, profile: DataProfile, threads: int
) -> Iterator[PartProfile]:
    def decode_and_measure(number: int, encoded: Encoded) -> tuple[int, int, Measured | str]:
        try:
            pixels = decode_image(encoded.content)
            with open_with_pillow(encoded.content) as image:
                return number, encoded.label, measure_pixels(image.mode, pixels)
        except DecodingError as error:
            return number, encoded.label, str(error)

    found = map_samples(source, numbers, threads, decode_and_measure, AHEAD)
    while part := [*islice(found, AHEAD)]:  # a part for each image would take far more memory
        images = [(number, label, image) for number, label, image in part if isinstance(image, Measured)]
        labels = np.array([label for _, label, _ in images], np.int64)
        undecodable = {number: reason for number, _, reason in part if isinstance(reason, str)}
        measured = [image for _, _, image in images]
        yield make_part([number for number, *_ in images], labels, measured, profile, undecodable)


def sample_numbers(data: EncodedSet, split: str) -> Indices:
    """Return the numbers of the samples of the split "training", which includes validation, or "test", each once."""
    order = order_test_split(data)
    tests = order.samples(slice(0, len(order)))
    if split == "test":
        return tests
    numbers = np.arange(int(data.train.counts.sum()) if isinstance(data.train, ShardIndex) else len(data.train.names))
    return np.setdiff1d(numbers, tests) if data.test is None else numbers


def make_part(
    numbers: Sequence[int],
    targets: NDArray[Any],
    found: Sequence[Measured],
    profile: DataProfile,
    undecodable: Mapping[int, str] | None = None,
) -> PartProfile:
    is_class = profile.targets == CLASSES
    counted = zip(*(image.statistics for image in found), strict=True)
    return PartProfile(
        numbers,
        targets.astype(np.int64) if is_class else digest_samples(len(targets), [targets]),
        np.array([image.digest for image in found], np.int64),
        count_targets(targets, profile.targets) if found else Counter(),
        dict(zip(("colour modes", "sizes", "brightness"), map(Counter, counted), strict=False)),
        find_unnamed(numbers, targets, len(profile.classes)) if is_class and found else {},
        undecodable=dict(undecodable or {}),
    )


def measure_pixels(mode: str, pixels: Pixels) -> Measured:
    area = 2 ** ((pixels.shape[0] * pixels.shape[1]).bit_length() - 1)
    darkest = 16 * int(pixels.mean() / 16)
    size, brightness = f"{area:,} to {2 * area - 1:,} pixels", f"mean value {darkest} to {darkest + 15}"
    return Measured((mode, f"images of {size}", f"images of {brightness}"), digest_leaves([pixels]))
