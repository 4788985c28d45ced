"""Compute a data set's profile from all its samples, check it before training, and compare it with the champion's."""

import hashlib
import itertools
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2_contingency

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.encoded_set import EncodedSet
from flyte_ddp.datasets.images import ImageArrays
from flyte_ddp.datasets.prepared import ItemSet, PreparedSet, open_prepared, order_test_split, resolve_class_names
from flyte_ddp.datasets.sample_arrays import name_sample
from flyte_ddp.errors import UserError
from flyte_ddp.formatting import format_count
from flyte_ddp.loading.decoding import DecodingError, Pixels, decode_image, open_with_pillow
from flyte_ddp.loading.encoded import Encoded, map_samples
from flyte_ddp.loading.facts import FEW, join_few
from flyte_ddp.loading.opening import open_image_reader
from flyte_ddp.machine import count_cores
from flyte_ddp.order.sampling import Indices
from flyte_ddp.settings import Settings
from flyte_ddp.shards.index import ShardIndex
from flyte_ddp.validation.leaf_profile import Compared, count_targets, digest_samples, kind_of_targets, measure_item_set
from flyte_ddp.validation.profile import CLASSES, LABELS, MASKS, NUMBERS, OTHERS, TOKENS, DataProfile, SplitProfile

BRIGHTNESSES = 16  # bins for an image's mean value, which is 0 to 255
AHEAD = 512  # samples that are read or decoded at a time
MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's mode by number of channels
SHIFT = 0.1  # a warning is for a difference in at least this share of images
SIGNIFICANCE = 0.001  # a warning is for a smaller p-value
SPLITS = ("training", "test")
STATISTICS = {"labels": "classes", "modes": "colour modes", "sizes": "sizes", "brightness": "brightness"}


class SampleFacts(NamedTuple):
    """What is counted of one sample."""

    name: str
    label: int  # the class number; 0 of other targets
    failure: str = ""  # why it cannot be decoded; the values below are then unset
    mode: str = ""
    size: int = 0  # largest power of two, as exponent, that height times width reaches
    brightness: int = 0  # bin of the mean value
    digest: int = 0  # 64 bits of shape and pixels; two of a million samples collide with probability 3e-8


def compute_profile(folder: Path, settings: Settings | None = None) -> DataProfile:
    """Read and decode all samples of a prepared data set, and return its profile.

    ``loaders`` of ``settings`` is the number of decoding threads, or of processes for items on demand. Raises
    UserError if the data set is damaged, or a sample cannot be read, lacks image or label, or changes when read again.
    """
    data, settings = open_prepared(folder), settings or Settings()
    profile = DataProfile([*data.classes], SplitProfile(), SplitProfile(), 0, 0, [], {}, [], [])
    if isinstance(data, ItemSet):
        training, test = measure_item_set(data, profile, settings)
    else:
        if isinstance(data, ImageArrays):
            profile.target_shape = [*data.train_labels.shape[1:]]
            profile.targets = kind_of_targets(data.train_labels, data.classes, of_pictures=True)
        training, test = [add_split_to_profile(data, split, profile, settings) for split in SPLITS]
    numbers, labels, digests = (np.concatenate(pair) for pair in zip(training, test, strict=True))
    in_test = np.arange(len(numbers)) >= len(training[0])
    _, group, sizes = np.unique(digests, return_inverse=True, return_counts=True)
    profile.equal = int(max(sizes, default=0))
    shared = np.flatnonzero(sizes[group] > 1)
    shared = shared[np.lexsort((shared, group[shared]))]  # grouped by pixels; in a group training comes first
    starts = np.flatnonzero(np.diff(group[shared], prepend=-1))

    def read_name(place: int) -> str:
        split, number = SPLITS[int(in_test[place])], numbers[place : place + 1]
        if isinstance(data, ItemSet):
            return name_sample(data, split, numbers[place])
        with closing(measure_images(data, split, number, settings)) as one:
            return next(one).name

    for same in np.split(shared, starts[1:]) if len(shared) else []:
        first, last = int(same[0]), int(same[-1])
        if not in_test[first] and in_test[last]:
            profile.duplicates += int(in_test[same].sum())
            if len(profile.duplicated) < FEW:
                profile.duplicated.append(f"{read_name(last)} and {read_name(first)}")
        # Two numbers for equal inputs are noise, as in any measurement; a text may go on in many ways.
        is_noise = profile.targets in (NUMBERS, TOKENS, OTHERS)
        other = same[:0] if is_noise else same[labels[same] != labels[first]]
        if len(other):
            profile.conflicts += len(same)
            if len(profile.conflicting) < FEW:
                pair = (first, int(other[0]))
                shown = (f" (label {labels[place]})" if profile.targets == CLASSES else "" for place in pair)
                named = (f"{read_name(place)}{label}" for place, label in zip(pair, shown, strict=True))
                profile.conflicting.append(" and ".join(named))
    return profile


def add_split_to_profile(data: PreparedSet, split: str, profile: DataProfile, settings: Settings) -> Compared:
    """Add all samples of a split to the profile; return what those that can be decoded are compared by."""
    numbers, counts = sample_numbers(data, split), getattr(profile, split)
    labels, digests = np.zeros(len(numbers), dtype=np.int64), np.zeros(len(numbers), dtype=np.uint64)
    good = np.zeros(len(numbers), dtype=np.bool_)
    for place, sample in enumerate(measure_images(data, split, numbers, settings)):
        labels[place], digests[place], good[place] = sample.label, sample.digest, not sample.failure
        counts.samples += 1
        if profile.targets == CLASSES and not 0 <= sample.label < len(profile.classes):
            profile.labelled.setdefault(str(sample.label), sample.name)
        if sample.failure:
            counts.undecodable += 1
            profile.bad += [f"{sample.name} ({sample.failure})"] if len(profile.bad) < FEW else []
            continue
        values = {"modes": sample.mode, "sizes": str(sample.size), "brightness": str(sample.brightness)}
        for statistic, value in values.items():
            counted = getattr(counts, statistic)
            counted[value] = counted.get(value, 0) + 1
    targets: NDArray[Any] = labels[good]
    if isinstance(data, ImageArrays) and profile.targets != CLASSES:
        targets = data.test_labels if split == "test" else data.train_labels
        labels = digest_samples(len(targets), [targets])
    counts.labels = dict(count_targets(targets, profile.targets))
    return Compared(numbers[good], labels[good], digests[good])


def sample_numbers(data: PreparedSet, split: str) -> Indices:
    """Return the numbers of the samples of the split "training", which includes validation, or "test", each once."""
    order = order_test_split(data)
    tests = order.samples(slice(0, len(order)))
    if split == "test":
        return tests
    if not isinstance(data, EncodedSet):
        return np.arange(data.train_samples)
    numbers = np.arange(int(data.train.counts.sum()) if isinstance(data.train, ShardIndex) else len(data.train.names))
    return np.setdiff1d(numbers, tests) if data.test is None else numbers


def measure_images(
    data: PreparedSet, split: str, numbers: Indices, settings: Settings
) -> Generator[SampleFacts, None, None]:
    """Yield facts of the samples ``numbers`` of a split, in order; encoded images are decoded in threads."""
    if isinstance(data, ImageArrays):
        tests, training = (data.test_images, data.test_labels), (data.train_images, data.train_labels)
        pixels, labels = tests if split == "test" else training
        mode = MODES.get(pixels.shape[3], f"{pixels.shape[3]} channels")
        for number in numbers.tolist():
            label = int(labels[number]) if labels.ndim == 1 and labels.dtype.kind in "iu" else 0
            yield measure_pixels(f"{split} sample {number}", label, mode, pixels[number])
        return

    def decode_and_measure(_: int, encoded: Encoded) -> SampleFacts:
        try:
            pixels = decode_image(encoded.content)
            with open_with_pillow(encoded.content) as image:
                return measure_pixels(encoded.name, encoded.label, image.mode, pixels)
        except DecodingError as error:
            return SampleFacts(encoded.name, encoded.label, failure=str(error))

    assert isinstance(data, EncodedSet)
    with closing(open_image_reader(data.test_source if split == "test" else data.train, settings)) as source:
        yield from map_samples(source, numbers, settings.loaders or count_cores(), decode_and_measure, AHEAD)


def measure_pixels(name: str, label: int, mode: str, pixels: Pixels) -> SampleFacts:
    """Return the facts of a sample: those given, and size, brightness and digest of its pixels uint8 [H, W, C]."""
    height, width, _ = pixels.shape
    digest = hashlib.blake2b(str(pixels.shape).encode(), digest_size=8)
    digest.update(np.ascontiguousarray(pixels).data)
    size, brightness = (height * width).bit_length() - 1, int(pixels.mean() * BRIGHTNESSES / 256)
    return SampleFacts(name, label, "", mode, size, brightness, int.from_bytes(digest.digest(), "little"))


def check_profile(profile: DataProfile, hp: Hyperparameters, *, max_duplicates: float, max_conflicts: float) -> None:
    """Raise a UserError if a data set should not be trained on: one line for each problem, with examples and a remedy.

    ``max_duplicates`` is the allowed share of test samples with the pixels, or inputs, of a training sample.
    ``max_conflicts`` is the allowed share of samples with those of a sample with another label.
    """
    what = profile.compared
    # Own objectives of samples that are no images may need no classes; others say so when training begins.
    of_numbers = profile.targets in (LABELS, NUMBERS) or what == "inputs"
    names, problems = resolve_class_names(profile.classes, hp, of_numbers=of_numbers), list[str]()
    bad = profile.training.undecodable + profile.test.undecodable
    if bad > hp.bad_samples:
        problems.append(
            f"{format_count(bad, 'image')} cannot be decoded, more than bad_samples={hp.bad_samples}: "
            f"{join_few(profile.bad)}; fix or remove them, or raise bad_samples"
        )
    if profile.not_finite:
        problems.append(
            f"{format_count(profile.not_finite, 'sample')} with NaN or infinity: {join_few(profile.bad)}; remove them, "
            "or replace the values, for instance with the mean and one more input that says where"
        )
    outside = {label: sample for label, sample in profile.labelled.items() if not 0 <= int(label) < len(names)}
    if outside and names:
        kind = "token" if profile.targets == TOKENS else "label"
        examples = join_few(f"{sample} has {kind} {label}" for label, sample in outside.items())
        limits = f"must be 0..{len(names) - 1} with {len(names)} classes; correct them, or set num_classes"
        problems.append(f"{examples}: {limits}")
    for split, counts in {"training": profile.training, "test": profile.test}.items():
        empty = [name for number, name in enumerate(names) if not counts.labels.get(str(number))]
        if empty and profile.targets in (CLASSES, LABELS, MASKS):
            remedy = "add some" if split == "training" or hp.test_dataset else "give a test_dataset that has some"
            usable = "decodable " if what == "pixels" else ""
            problems.append(f"no {usable}{split} sample is of class {join_few(empty)}; {remedy}, or remove the class")
    normal = "; of few categories, or short texts, that is normal: raise {} in --policy" if what == "inputs" else ""
    if profile.duplicates > max_duplicates * profile.test.samples:
        problems.append(
            f"{profile.duplicates:,} of {format_count(profile.test.samples, 'test sample')} have the {what} of a "
            f"training sample, more than max_duplicates={max_duplicates:g} of them, such as "
            f"{'; '.join(profile.duplicated)}; remove them from one of the two{normal.format('max_duplicates')}"
        )
    samples = profile.training.samples + profile.test.samples
    if profile.conflicts > max_conflicts * samples:
        remedy = "correct the labels"
        if profile.equal > samples / 2 and what == "pixels":
            remedy = f"{profile.equal:,} are one and the same picture: look at it, as decoding may lose what it shows"
        problems.append(
            f"{profile.conflicts:,} of {format_count(samples, 'sample')} have the {what} of another one with another "
            f"label, more than max_conflicts={max_conflicts:g} of them, such as {'; '.join(profile.conflicting)}; "
            f"{remedy}{normal.format('max_conflicts')}"
        )
    if problems:
        raise UserError("\n".join(f"dataset={hp.dataset!r}: {problem}" for problem in problems))


def describe_differences(profile: DataProfile, champion: DataProfile) -> Iterator[str]:
    """Yield a warning for each split and statistic that differs from the champion's: by 10 %, with p < 0.001.

    The difference is the total variation distance of the two distributions. Of labels, classes of masks, and tokens it
    is the largest change of a share of samples, as a sample may have several. The p-value is of Pearson's chi-squared
    test (Bonferroni over the leaves' statistics, or over all labels).
    """
    statistics = dict(STATISTICS)
    if profile.classes != champion.classes:
        yield "the classes are not the champion's"
        del statistics["labels"]
    ours, theirs = profile.training.leaves, champion.training.leaves
    if ours.keys() != theirs.keys():
        yield "the inputs and targets have other forms than the champion's"
    statistics |= {statistic: statistic for statistic in ours if statistic in theirs}
    for split, (statistic, name) in itertools.product(SPLITS, statistics.items()):
        counts = [find_counts(getattr(each, split), statistic) for each in (profile, champion)]
        values = sorted({*counts[0], *counts[1]})
        table = np.array([[of_values.get(value, 0) for value in values] for of_values in counts])
        several = statistic == "labels" and profile.targets in (LABELS, MASKS, TOKENS)
        sides = [getattr(each, split) for each in (profile, champion)]
        totals = np.array([[side.samples - side.undecodable] for side in sides]) if several else table.sum(1)[:, None]
        if len(values) < 2 - several or not totals.all():
            continue
        shares = table / totals
        changes = np.abs(shares[0] - shares[1])
        most = int(changes.argmax())
        distance = changes[most] if several else changes.sum() / 2
        if distance < SHIFT:
            continue
        tests = len(ours) if statistic in ours else 1
        if several:  # of the label that changes most: how many samples have it, and have not
            tests, table = len(values), np.hstack((table[:, [most]], totals - table[:, [most]]))
        p = chi2_contingency(table).pvalue
        if p >= SIGNIFICANCE / tests:
            continue
        now, before = shares[:, most]
        yield (
            f"{split} split: {name} differ from the champion's in {distance:.0%} of samples (p = {p:.1g}), most in "
            f"{describe_value(statistic, values[most], profile.classes)}: {now:.0%} instead of {before:.0%}"
        )


def find_counts(split: SplitProfile, statistic: str) -> dict[str, int]:
    found: dict[str, int] = getattr(split, statistic) if statistic in STATISTICS else split.leaves.get(statistic, {})
    return found


def describe_value(statistic: str, value: str, classes: list[str]) -> str:
    if statistic == "labels":
        known = value.isdecimal() and int(value) < len(classes)
        return f"class {classes[int(value)]}" if known else f"targets of {value}"
    if statistic == "sizes":
        return f"images of {2 ** int(value):,} to {2 ** (int(value) + 1) - 1:,} pixels"
    if statistic == "brightness":
        return f"images of mean value {16 * int(value)} to {16 * int(value) + 15}"
    return value
