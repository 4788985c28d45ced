"""Looking at all samples of a data set, which makes its profile."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.arrays import ImageArrays, Images, Labels
from flyte_ddp.datasets.image_folder import ImageList
from flyte_ddp.datasets.prepared import PreparedSet, open_prepared, orders_of
from flyte_ddp.hardware import cores
from flyte_ddp.loading.decoding import DecodingError, Pixels, opened
from flyte_ddp.loading.encoded import Encoded, Reader, decoded, in_order
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
    """What is seen of a sample."""

    name: str
    label: int
    failure: str = ""  # why it cannot be decoded; then nothing else is known
    mode: str = ""
    size: int = 0
    brightness: int = 0
    digest: int = 0  # 64 bits of shape and pixels: among a million samples one in 10^7 is taken for another


class Seen(NamedTuple):
    """The samples of a split that can be decoded, to be compared with others: [n] each."""

    numbers: Indices
    labels: Indices
    digests: Indices


class Arrays:
    """The samples of a split that is held as arrays."""

    def __init__(self, split: str, images: Images, labels: Labels) -> None:
        self.split, self.images, self.labels = split, images, labels

    def samples(self, numbers: Indices) -> Iterator[Sample]:
        """What is seen of each."""
        mode = MODES.get(self.images.shape[3], f"{self.images.shape[3]} channels")
        for number in numbers.tolist():
            yield seen(Sample(self.name(number), int(self.labels[number]), mode=mode), self.images[number])

    def name(self, number: int) -> str:
        """What a sample is called."""
        return f"{self.split} sample {number}"

    def close(self) -> None:
        """Does nothing."""


class EncodedSamples:
    """The samples of encoded images, which threads decode."""

    def __init__(self, images: Reader, threads: int) -> None:
        self.reader, self.threads = images, threads

    def samples(self, numbers: Indices) -> Iterator[Sample]:
        """What is seen of each, in their order."""
        return in_order(self.reader, numbers, self.threads, self.sample, AHEAD)

    def sample(self, number: int, found: Encoded) -> Sample:
        """What is seen of one."""
        try:
            pixels, found = decoded(self.reader, number, found)
            with opened(found.content) as image:
                return seen(Sample(found.name, found.label, mode=image.mode), pixels)
        except DecodingError as error:
            return Sample(found.name, found.label, failure=str(error))

    def name(self, number: int) -> str:
        """What a sample is called."""
        return self.reader.read(number).name

    def close(self) -> None:
        """Closes files."""
        self.reader.close()


def seen(sample: Sample, pixels: Pixels) -> Sample:
    """A sample with what its pixels [H, W, C] say."""
    height, width, _ = pixels.shape
    digest = hashlib.blake2b(str(pixels.shape).encode(), digest_size=8)
    digest.update(np.ascontiguousarray(pixels).data)
    return sample._replace(
        size=(height * width).bit_length() - 1,
        brightness=int(pixels.mean() * BRIGHTNESSES / 256),
        digest=int.from_bytes(digest.digest(), "little"),
    )


def profile(folder: Path, settings: Settings | None = None) -> DataProfile:
    """Looks at all samples of a prepared data set.

    Args:
        folder: that :func:`flyte_ddp.datasets.fetch` has made.
        settings: for shards: where they are cached, and how many threads decode.

    Raises:
        UserError: the data set is damaged, or a sample cannot be read, or has no image or no label.
    """
    data, settings = open_prepared(folder), settings or Settings()
    found = DataProfile([*data.classes], SplitProfile(), SplitProfile(), 0, 0, [], {}, [], [])
    training, test = (counted(data, split, numbers, found, settings) for split, numbers in split_numbers(data).items())
    compare(training, test, found, lambda split, number: name_of(data, split, number, settings))
    return found


def split_numbers(data: PreparedSet) -> dict[str, Indices]:
    """The samples of the splits training and test, each once; those for validation are among the former."""
    test = orders_of(data, Hyperparameters(dataset=data.name, validation_fraction=0.0))["test"]
    tests = test.samples(slice(0, len(test)))
    if isinstance(data, ImageArrays):
        return {"training": np.arange(len(data.train_labels)), "test": tests}
    numbers = np.arange(int(data.train.counts.sum()) if isinstance(data.train, ShardIndex) else len(data.train.names))
    return {"training": np.setdiff1d(numbers, tests) if data.test is None else numbers, "test": tests}


def source_of(data: PreparedSet, split: str, settings: Settings) -> Arrays | EncodedSamples:
    """Where the samples of a split are."""
    if isinstance(data, ImageArrays):
        arrays = (data.train_images, data.train_labels), (data.test_images, data.test_labels)
        return Arrays(split, *arrays[split == "test"])
    images: ShardIndex | ImageList = data.test if split == "test" and data.test is not None else data.train
    hp = Hyperparameters(dataset=data.name)
    return EncodedSamples(reader(images, hp, settings), settings.loader_threads or cores())


def counted(data: PreparedSet, split: str, numbers: Indices, found: DataProfile, settings: Settings) -> Seen:
    """Counts the samples of a split into the profile."""
    counts: SplitProfile = getattr(found, split)
    labels, digests = np.zeros(len(numbers), dtype=np.int64), np.zeros(len(numbers), dtype=np.uint64)
    good = np.zeros(len(numbers), dtype=np.bool_)
    with closing(source_of(data, split, settings)) as source:
        for place, sample in enumerate(source.samples(numbers)):
            labels[place], digests[place], good[place] = sample.label, sample.digest, not sample.failure
            counts.samples += 1
            if not 0 <= sample.label < len(data.classes):
                found.labelled.setdefault(str(sample.label), sample.name)
            if sample.failure:
                counts.undecodable += 1
                found.bad += [f"{sample.name} ({sample.failure})"] if len(found.bad) < FEW else []
                continue
            add(counts.labels, sample.label)
            add(counts.modes, sample.mode)
            add(counts.sizes, sample.size)
            add(counts.brightness, sample.brightness)
    return Seen(numbers[good], labels[good], digests[good])


def add(counts: dict[str, int], value: object) -> None:
    """Counts one more."""
    counts[str(value)] = counts.get(str(value), 0) + 1


def name_of(data: PreparedSet, split: str, number: int, settings: Settings) -> str:
    """What a sample is called where it is."""
    with closing(source_of(data, split, settings)) as source:
        return source.name(number)


def compare(training: Seen, test: Seen, found: DataProfile, name: Callable[[str, int], str]) -> None:
    """Finds samples with the same pixels, and puts them into the profile.

    Args:
        name: of a sample, by its split and number.
    """
    numbers, labels, digests = (np.concatenate(pair) for pair in zip(training, test, strict=True))
    in_test = np.arange(len(numbers)) >= len(training.numbers)
    _, group, sizes = np.unique(digests, return_inverse=True, return_counts=True)
    found.equal = int(max(sizes, default=0))
    shared = np.flatnonzero(sizes[group] > 1)
    shared = shared[np.lexsort((shared, group[shared]))]  # those with the same pixels side by side, training's first
    starts = np.flatnonzero(np.diff(group[shared], prepend=-1))

    def called(place: int) -> str:
        return name("test" if in_test[place] else "training", int(numbers[place]))

    for same in np.split(shared, starts[1:]) if len(shared) else []:
        first, last = int(same[0]), int(same[-1])
        if not in_test[first] and in_test[last]:
            found.duplicates += int(in_test[same].sum())
            if len(found.duplicated) < FEW:
                found.duplicated.append(f"{called(last)} and {called(first)}")
        other = same[labels[same] != labels[first]]
        if len(other):
            found.conflicts += len(same)
            if len(found.conflicting) < FEW:
                pair = (first, int(other[0]))
                found.conflicting.append(" and ".join(f"{called(place)} (label {labels[place]})" for place in pair))
