"""Make the profile of a data set by a look at all its samples."""

import hashlib
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flyte_ddp.datasets.arrays import ImageArrays
from flyte_ddp.datasets.prepared import PreparedSet, open_prepared, order_of_tests
from flyte_ddp.hardware import cores
from flyte_ddp.loading.decoding import DecodingError, Pixels, opened
from flyte_ddp.loading.encoded import Encoded, decoded, in_order
from flyte_ddp.loading.facts import FEW
from flyte_ddp.loading.opening import reader
from flyte_ddp.order.sampling import Indices
from flyte_ddp.settings import Settings
from flyte_ddp.shards.index import ShardIndex
from flyte_ddp.validation.profile import DataProfile, SplitProfile

BRIGHTNESSES = 16  # bins of an image's mean value, which is from 0 to 255
AHEAD = 512  # samples that are in work at a time, and whose files or shards are on their way
MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's names for so many channels


class Sample(NamedTuple):
    """The facts about a sample that are counted."""

    name: str
    label: int
    failure: str = ""  # why it cannot be decoded; then nothing else is known
    mode: str = ""
    size: int = 0
    brightness: int = 0
    digest: int = 0  # 64 bits of shape and pixels: among a million samples one in 10^7 is taken for another


class Decoded(NamedTuple):
    """The samples of a split that can be decoded, to be compared with others: [n] each."""

    numbers: Indices
    labels: Indices
    digests: Indices


def profile(folder: Path, settings: Settings | None = None) -> DataProfile:
    """Read and decode all samples of a prepared data set, and return its profile.

    Args:
        folder: that :func:`flyte_ddp.datasets.fetch` has made.
        settings: for shards: where they are cached, and how many threads decode.

    Raises:
        UserError: the data set is damaged, or a sample cannot be read, or has no image or no label.
    """
    data, settings = open_prepared(folder), settings or Settings()
    found = DataProfile([*data.classes], SplitProfile(), SplitProfile(), 0, 0, [], {}, [], [])

    def sample_name(split: str, number: int) -> str:
        with closing(samples_of(data, split, np.array([number]), settings)) as one:
            return next(one).name

    training, test = (
        count_samples(samples_of(data, split, numbers, settings), split, numbers, found)
        for split, numbers in split_numbers(data).items()
    )
    compare(training, test, found, sample_name)
    return found


def split_numbers(data: PreparedSet) -> dict[str, Indices]:
    """Return the samples of the splits training and test, each once; those for validation are among the former."""
    test = order_of_tests(data)
    tests = test.samples(slice(0, len(test)))
    if isinstance(data, ImageArrays):
        return {"training": np.arange(len(data.train_labels)), "test": tests}
    numbers = np.arange(int(data.train.counts.sum()) if isinstance(data.train, ShardIndex) else len(data.train.names))
    return {"training": np.setdiff1d(numbers, tests) if data.test is None else numbers, "test": tests}


def samples_of(data: PreparedSet, split: str, numbers: Indices, settings: Settings) -> Generator[Sample, None, None]:
    """Yield the facts about samples of a split, in the order of ``numbers``; encoded images are decoded by threads."""
    if isinstance(data, ImageArrays):
        pixels, labels = (data.train_images, data.train_labels)
        if split == "test":
            pixels, labels = (data.test_images, data.test_labels)
        mode = MODES.get(pixels.shape[3], f"{pixels.shape[3]} channels")
        for number in numbers.tolist():
            yield measure(Sample(f"{split} sample {number}", int(labels[number]), mode=mode), pixels[number])
        return
    images = data.tested if split == "test" else data.train

    def decode(number: int, found: Encoded) -> Sample:
        try:
            pixels, found = decoded(source, number, found)
            with opened(found.content) as image:
                return measure(Sample(found.name, found.label, mode=image.mode), pixels)
        except DecodingError as error:
            return Sample(found.name, found.label, failure=str(error))

    with closing(reader(images, settings)) as source:
        yield from in_order(source, numbers, settings.loader_threads or cores(), decode, AHEAD)


def measure(sample: Sample, pixels: Pixels) -> Sample:
    """Return a sample with size, brightness and digest of its pixels [H, W, C]."""
    height, width, _ = pixels.shape
    digest = hashlib.blake2b(str(pixels.shape).encode(), digest_size=8)
    digest.update(np.ascontiguousarray(pixels).data)
    return sample._replace(
        size=(height * width).bit_length() - 1,
        brightness=int(pixels.mean() * BRIGHTNESSES / 256),
        digest=int.from_bytes(digest.digest(), "little"),
    )


def count_samples(samples: Iterable[Sample], split: str, numbers: Indices, found: DataProfile) -> Decoded:
    """Count the samples of a split into the profile ``found``; return those that can be decoded."""
    counts: SplitProfile = getattr(found, split)
    labels, digests = np.zeros(len(numbers), dtype=np.int64), np.zeros(len(numbers), dtype=np.uint64)
    good = np.zeros(len(numbers), dtype=np.bool_)
    for place, sample in enumerate(samples):
        labels[place], digests[place], good[place] = sample.label, sample.digest, not sample.failure
        counts.samples += 1
        if not 0 <= sample.label < len(found.classes):
            found.labelled.setdefault(str(sample.label), sample.name)
        if sample.failure:
            counts.undecodable += 1
            found.bad += [f"{sample.name} ({sample.failure})"] if len(found.bad) < FEW else []
            continue
        for counted, value in (
            (counts.labels, sample.label),
            (counts.modes, sample.mode),
            (counts.sizes, sample.size),
            (counts.brightness, sample.brightness),
        ):
            counted[str(value)] = counted.get(str(value), 0) + 1
    return Decoded(numbers[good], labels[good], digests[good])


def compare(training: Decoded, test: Decoded, found: DataProfile, sample_name: Callable[[str, int], str]) -> None:
    """Find samples with the same pixels, and put their numbers and a few examples into the profile ``found``."""
    numbers, labels, digests = (np.concatenate(pair) for pair in zip(training, test, strict=True))
    in_test = np.arange(len(numbers)) >= len(training.numbers)
    _, group, sizes = np.unique(digests, return_inverse=True, return_counts=True)
    found.equal = int(max(sizes, default=0))
    shared = np.flatnonzero(sizes[group] > 1)
    shared = shared[np.lexsort((shared, group[shared]))]  # those with the same pixels side by side, training's first
    starts = np.flatnonzero(np.diff(group[shared], prepend=-1))

    def name(place: int) -> str:
        return sample_name("test" if in_test[place] else "training", int(numbers[place]))

    for same in np.split(shared, starts[1:]) if len(shared) else []:
        first, last = int(same[0]), int(same[-1])
        if not in_test[first] and in_test[last]:
            found.duplicates += int(in_test[same].sum())
            if len(found.duplicated) < FEW:
                found.duplicated.append(f"{name(last)} and {name(first)}")
        other = same[labels[same] != labels[first]]
        if len(other):
            found.conflicts += len(same)
            if len(found.conflicting) < FEW:
                pair = (first, int(other[0]))
                found.conflicting.append(" and ".join(f"{name(place)} (label {labels[place]})" for place in pair))
