"""Compute the profile of a data set from all its samples."""

import hashlib
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flyte_ddp.datasets.arrays import ImageArrays
from flyte_ddp.datasets.prepared import PreparedSet, open_prepared, order_test_split
from flyte_ddp.hardware import count_cores
from flyte_ddp.loading.decoding import DecodingError, Pixels, open_with_pillow
from flyte_ddp.loading.encoded import Encoded, decode_or_refetch, map_samples
from flyte_ddp.loading.facts import FEW
from flyte_ddp.loading.opening import open_image_reader
from flyte_ddp.order.sampling import Indices
from flyte_ddp.settings import Settings
from flyte_ddp.shards.index import ShardIndex
from flyte_ddp.validation.profile import DataProfile, SplitProfile

BRIGHTNESSES = 16  # bins for an image's mean value, which is 0 to 255
AHEAD = 512  # samples that are read or decoded at a time
MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's mode by number of channels


class SampleFacts(NamedTuple):
    """What is counted of one sample."""

    name: str
    label: int
    failure: str = ""  # why it cannot be decoded; the values below are then unset
    mode: str = ""
    size: int = 0  # largest power of two, as exponent, that height times width reaches
    brightness: int = 0  # bin of the mean value
    digest: int = 0  # 64 bits of shape and pixels; two of a million samples collide with probability 3e-8


def compute_profile(folder: Path, settings: Settings | None = None) -> DataProfile:
    """Read and decode all samples of a prepared data set, and return its profile.

    Encoded images use the shard cache and the number of decoding threads of ``settings``. Raises a UserError if the
    data set is damaged, or a sample cannot be read, has no image or has no label.
    """
    data, settings = open_prepared(folder), settings or Settings()
    profile = DataProfile([*data.classes], SplitProfile(), SplitProfile(), 0, 0, [], {}, [], [])
    training, test = (add_split_to_profile(data, split, profile, settings) for split in ("training", "test"))
    numbers, labels, digests = (np.concatenate(pair) for pair in zip(training, test, strict=True))
    in_test = np.arange(len(numbers)) >= len(training[0])
    _, group, sizes = np.unique(digests, return_inverse=True, return_counts=True)
    profile.equal = int(max(sizes, default=0))
    shared = np.flatnonzero(sizes[group] > 1)
    shared = shared[np.lexsort((shared, group[shared]))]  # grouped by pixels; in a group training comes first
    starts = np.flatnonzero(np.diff(group[shared], prepend=-1))

    def read_name(place: int) -> str:
        """Read one sample again, and return its name."""
        split, number = "test" if in_test[place] else "training", numbers[place : place + 1]
        with closing(measure_samples(data, split, number, settings)) as one:
            return next(one).name

    for same in np.split(shared, starts[1:]) if len(shared) else []:
        first, last = int(same[0]), int(same[-1])
        if not in_test[first] and in_test[last]:
            profile.duplicates += int(in_test[same].sum())
            if len(profile.duplicated) < FEW:
                profile.duplicated.append(f"{read_name(last)} and {read_name(first)}")
        other = same[labels[same] != labels[first]]
        if len(other):
            profile.conflicts += len(same)
            if len(profile.conflicting) < FEW:
                pair = (first, int(other[0]))
                profile.conflicting.append(
                    " and ".join(f"{read_name(place)} (label {labels[place]})" for place in pair)
                )
    return profile


def add_split_to_profile(
    data: PreparedSet, split: str, profile: DataProfile, settings: Settings
) -> tuple[Indices, Indices, Indices]:
    """Read and decode all samples of a split, and add them to the profile's counts and examples.

    Returns number, label and digest of the pixels of each sample that can be decoded: [n] each.
    """
    numbers, counts = sample_numbers(data, split), getattr(profile, split)
    labels, digests = np.zeros(len(numbers), dtype=np.int64), np.zeros(len(numbers), dtype=np.uint64)
    good = np.zeros(len(numbers), dtype=np.bool_)
    for place, sample in enumerate(measure_samples(data, split, numbers, settings)):
        labels[place], digests[place], good[place] = sample.label, sample.digest, not sample.failure
        counts.samples += 1
        if not 0 <= sample.label < len(profile.classes):
            profile.labelled.setdefault(str(sample.label), sample.name)
        if sample.failure:
            counts.undecodable += 1
            profile.bad += [f"{sample.name} ({sample.failure})"] if len(profile.bad) < FEW else []
            continue
        values = {"labels": sample.label, "modes": sample.mode, "sizes": sample.size, "brightness": sample.brightness}
        for statistic, value in values.items():
            counted = getattr(counts, statistic)
            counted[str(value)] = counted.get(str(value), 0) + 1
    return numbers[good], labels[good], digests[good]


def sample_numbers(data: PreparedSet, split: str) -> Indices:
    """Return the numbers of the samples of the split "training", which includes validation, or "test", each once."""
    order = order_test_split(data)
    tests = order.samples(slice(0, len(order)))
    if split == "test":
        return tests
    if isinstance(data, ImageArrays):
        return np.arange(len(data.train_labels))
    numbers = np.arange(int(data.train.counts.sum()) if isinstance(data.train, ShardIndex) else len(data.train.names))
    return np.setdiff1d(numbers, tests) if data.test is None else numbers


def measure_samples(
    data: PreparedSet, split: str, numbers: Indices, settings: Settings
) -> Generator[SampleFacts, None, None]:
    """Read and decode the samples ``numbers`` of a split, encoded images in threads, and yield facts of each, in order.

    Downloads remote shards into the cache. The facts of an undecodable image say why. UserError if one cannot be read.
    """
    if isinstance(data, ImageArrays):
        tests, training = (data.test_images, data.test_labels), (data.train_images, data.train_labels)
        pixels, labels = tests if split == "test" else training
        mode = MODES.get(pixels.shape[3], f"{pixels.shape[3]} channels")
        for number in numbers.tolist():
            yield measure_pixels(f"{split} sample {number}", int(labels[number]), mode, pixels[number])
        return

    def decode_and_measure(number: int, encoded: Encoded) -> SampleFacts:
        """Decode a sample, reading it again if that fails; return its facts, or why it cannot be decoded."""
        try:
            pixels, encoded = decode_or_refetch(source, number, encoded)
            with open_with_pillow(encoded.content) as image:
                return measure_pixels(encoded.name, encoded.label, image.mode, pixels)
        except DecodingError as error:
            return SampleFacts(encoded.name, encoded.label, failure=str(error))

    with closing(open_image_reader(data.test_source if split == "test" else data.train, settings)) as source:
        yield from map_samples(source, numbers, settings.loader_threads or count_cores(), decode_and_measure, AHEAD)


def measure_pixels(name: str, label: int, mode: str, pixels: Pixels) -> SampleFacts:
    """Return the facts of a sample: those given, and size, brightness and digest of its pixels uint8 [H, W, C]."""
    height, width, _ = pixels.shape
    digest = hashlib.blake2b(str(pixels.shape).encode(), digest_size=8)
    digest.update(np.ascontiguousarray(pixels).data)
    size, brightness = (height * width).bit_length() - 1, int(pixels.mean() * BRIGHTNESSES / 256)
    return SampleFacts(name, label, "", mode, size, brightness, int.from_bytes(digest.digest(), "little"))
