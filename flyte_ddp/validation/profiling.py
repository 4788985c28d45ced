"""Computes the profile of all samples of a data set, checks the profile, and compares it with the champion's."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.stats import chi2_contingency

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.machine.resources import count_cores
from flyte_ddp.core.order.sampling import Indices
from flyte_ddp.core.settings import Settings
from flyte_ddp.core.text.formatting import format_count, format_p_value, join_first
from flyte_ddp.datasets.encoded.decoding import DecodingError, decode_image, open_with_pillow
from flyte_ddp.datasets.encoded.encoded_set import EncodedSet
from flyte_ddp.datasets.encoded.readers import Encoded, ImageReader, map_samples
from flyte_ddp.datasets.item_set import ItemSet
from flyte_ddp.datasets.prepared import open_prepared, resolve_class_names
from flyte_ddp.validation.leaf_profile import FEW, PartProfile, SampleDigests, add_split_to_profile, profile_item_set
from flyte_ddp.validation.leaf_statistics import count_samples_by_target, digest_leaves, find_labels_out_of_range
from flyte_ddp.validation.profile import CLASSES, LABELS, MASKS, NUMBERS, OTHERS, TOKENS, DataProfile, SplitProfile

LABEL = "classes"  # the name of the targets as a statistic
SHIFT = 0.05  # the least share of samples in a difference that gives a warning
SIGNIFICANCE = 0.001  # only smaller p-values give a warning
SPLITS = ("training", "test")
STATISTICS = ("colour modes", "sizes", "brightness")  # of encoded images
AHEAD = 512  # images that are read or decoded at a time


def compute_profile(folder: Path, settings: Settings | None = None) -> DataProfile:
    """Read and decode all samples of a prepared data set, and return the profile.

    Runs the user's code for items on demand. ``settings.loaders`` is the number of threads that decode, or of processes
    for items on demand. The default is one per core.

    Raises:
        UserError: The data set is damaged, or a sample cannot be read, lacks image or label, or changes when read
            again.
    """
    data, settings = open_prepared(folder), settings or Settings()
    profile = DataProfile([*data.classes], SplitProfile(), SplitProfile(), 0, 0, [], {}, [], [])
    if isinstance(data, ItemSet):
        if data.pictures and data.stored_leaves("train") is not None:
            profile.compared = "pixels"
        add_duplicates_and_conflicts(
            profile, profile_item_set(data, profile, settings, data.name_sample), data.name_sample
        )
        return profile
    assert isinstance(data, EncodedSet)
    profile.compared = "pixels"
    with ExitStack() as opened:
        readers, compared = dict[str, ImageReader](), list[SampleDigests]()
        for split, source in zip(SPLITS, (data.train, data.test_source), strict=True):
            readers[split] = opened.enter_context(closing(data.open_reader(source, settings)))

        def name_image(split: str, number: int) -> str:
            return readers[split].read_sample(number).name

        for split, reader in readers.items():
            order, threads = data.make_test_order(), settings.loaders or count_cores()
            numbers = data.list_training() if split == "training" else order.samples_at(slice(0, len(order)))
            parts = measure_encoded_images(reader, numbers, len(data.classes), threads)
            compared.append(add_split_to_profile(profile, split, parts, name_image))
        add_duplicates_and_conflicts(profile, compared, name_image)
    return profile


def measure_encoded_images(source: ImageReader, numbers: Indices, classes: int, threads: int) -> Iterator[PartProfile]:
    """Yield the counts and problems of the images with these ``numbers``, in parts of up to AHEAD (512) images.

    ``threads`` threads decode images ahead. ``classes`` is the number of named classes. Undecodable images are recorded
    in the part.
    """

    def measure_image(number: int, encoded: Encoded) -> tuple[int, int, int, tuple[str, ...], str]:
        """Return number, label, digest, values of STATISTICS, and why decoding failed, or "" for no failure."""
        try:
            pixels = decode_image(encoded.content)
            with open_with_pillow(encoded.content) as image:
                mode = image.mode
        except DecodingError as error:
            return number, encoded.label, 0, (), str(error)
        area, darkest = 2 ** ((pixels.shape[0] * pixels.shape[1]).bit_length() - 1), 16 * int(pixels.mean() / 16)
        size, brightness = f"{area:,} to {2 * area - 1:,} pixels", f"mean value {darkest} to {darkest + 15}"
        facts = mode, f"images of {size}", f"images of {brightness}"
        return number, encoded.label, digest_leaves([pixels]), facts, ""

    found = map_samples(source, numbers, threads, measure_image, AHEAD)
    while part := [*islice(found, AHEAD)]:  # a part for each image would take far more memory
        images = [image for image in part if not image[-1]]
        compared = SampleDigests._make(np.array([image[place] for image in images], np.int64) for place in range(3))
        counted = zip(*(facts for *_, facts, _ in images), strict=True)
        yield PartProfile(
            compared,
            count_samples_by_target(compared.labels, CLASSES),
            dict(zip(STATISTICS, map(np.array, counted), strict=False)),
            find_labels_out_of_range(compared.numbers.tolist(), compared.labels, classes) if images else {},
            undecodable={number: reason for number, *_, reason in part if reason},
        )


def add_duplicates_and_conflicts(
    profile: DataProfile, compared: Sequence[SampleDigests], name_of: Callable[[str, int], str]
) -> None:
    """Count duplicates and conflicts, and add the counts and a few examples to the profile.

    A duplicate is a test sample with the inputs of a training sample. A conflict is a sample with the inputs of a
    sample with another label. Targets that are numbers or tokens have no conflicts. ``compared`` has the training
    split, then the test split. ``name_of(split, sample)`` names a sample in messages.
    """
    numbers, labels, digests = (np.concatenate(pair) for pair in zip(*compared, strict=True))
    in_test = np.arange(len(numbers)) >= len(compared[0].numbers)
    _, group, sizes = np.unique(digests, return_inverse=True, return_counts=True)
    shared = np.flatnonzero(sizes[group] > 1)
    shared = shared[np.lexsort((shared, group[shared]))]  # grouped by digest; in a group training comes first
    starts = np.flatnonzero(np.diff(group[shared], prepend=-1))

    def name_at(place: int) -> str:
        return name_of(SPLITS[int(in_test[place])], int(numbers[place]))

    for same in np.split(shared, starts[1:]) if len(shared) else []:
        first, last = int(same[0]), int(same[-1])
        if not in_test[first] and in_test[last]:
            profile.duplicates += int(in_test[same].sum())
            if len(profile.duplicated) < FEW:
                profile.duplicated.append(f"{name_at(last)} and {name_at(first)}")
        # Different numbers for equal inputs are noise, as in any measurement. A text may continue in many ways.
        is_noise = profile.targets in (NUMBERS, TOKENS, OTHERS)
        other = same[:0] if is_noise else same[labels[same] != labels[first]]
        if len(other):
            profile.conflicts += len(same)
            if len(profile.conflicting) < FEW:
                pair = (first, int(other[0]))
                shown = (f" (label {labels[place]})" if profile.targets == CLASSES else "" for place in pair)
                named = (f"{name_at(place)}{label}" for place, label in zip(pair, shown, strict=True))
                profile.conflicting.append(" and ".join(named))


def check_profile(profile: DataProfile, hp: Hyperparameters, *, max_duplicates: float, max_conflicts: float) -> None:
    """Raise UserError if a data set should not be trained on.

    The error has a line for each problem, with examples and a remedy. ``max_duplicates`` is a share of the test
    samples, and ``max_conflicts`` a share of all samples.
    """
    what = profile.compared
    # User-defined objectives of samples other than images may need no classes. Otherwise training reports it.
    may_be_empty = profile.targets in (LABELS, NUMBERS) or what == "inputs"
    names, problems = resolve_class_names(profile.classes, hp, may_be_empty=may_be_empty), list[str]()
    bad = join_first(sorted(profile.bad))
    undecodable = profile.training.undecodable + profile.test.undecodable
    if undecodable > hp.bad_samples:
        problem = f"{format_count(undecodable, 'image')} cannot be decoded, more than bad_samples={hp.bad_samples}"
        problems.append(f"{problem}: {bad}; fix or remove them, or raise bad_samples")
    if profile.not_finite:
        fix = "remove the samples, or replace the values, for instance with the mean and an extra input that marks them"
        problems.append(f"{format_count(profile.not_finite, 'sample')} with NaN or infinity: {bad}; {fix}")
    outside = {label: sample for label, sample in profile.labelled.items() if not 0 <= int(label) < len(names)}
    if outside and names:
        kind = "token" if profile.targets == TOKENS else "label"
        examples = join_first(sorted(f"{sample} has {kind} {label}" for label, sample in outside.items()))
        limits = f"must be 0..{len(names) - 1} with {len(names)} classes; correct the data, or set num_classes"
        problems.append(f"{examples}: {limits}")
    for split, counts in {"training": profile.training, "test": profile.test}.items():
        empty = sorted(name for number, name in enumerate(names) if not counts.labels.get(str(number)))
        if empty and profile.targets in (CLASSES, LABELS, MASKS):
            remedy = "add samples" if split == "training" or hp.test_dataset else "give a test_dataset with samples"
            usable = "decodable " if what == "pixels" else ""
            problems.append(f"no {usable}{split} sample is of class {join_first(empty)}; {remedy}, or remove the class")
    normal = "; this is normal for few categories or short texts: raise {} in --policy" if what == "inputs" else ""
    tests = format_count(profile.test.samples, "test sample")
    samples = profile.training.samples + profile.test.samples
    if profile.duplicates > max_duplicates * profile.test.samples:
        problem = f"{profile.duplicates:,} of {tests} have the {what} of a training sample"
        limit = f"more than the share max_duplicates={max_duplicates:g}, such as {'; '.join(profile.duplicated)}"
        problems.append(f"{problem}, {limit}; remove them from one split{normal.format('max_duplicates')}")
    if profile.conflicts > max_conflicts * samples:
        problem = f"{profile.conflicts:,} of {format_count(samples, 'sample')} have the {what} of a sample"
        limit = f"more than the share max_conflicts={max_conflicts:g}, such as {'; '.join(profile.conflicting)}"
        fix = f"correct the labels{normal.format('max_conflicts')}"
        problems.append(f"{problem} with another label, {limit}; {fix}")
    if problems:
        raise UserError("\n".join(f"dataset={hp.dataset!r}: {problem}" for problem in problems))


class Difference(NamedTuple):
    """A difference between a statistic of a split and the same statistic of the champion's data."""

    share: float  # of samples that differ, 0 to 1
    text: str


def iterate_differences_from_champion(
    profile: DataProfile, champion: DataProfile, least: float = SHIFT
) -> Iterator[Difference]:
    """Yield the statistics that differ from the champion's data in at least a share ``least`` of the samples.

    Each split is compared with the champion's same split. Only differences with p < 0.001 by Pearson's chi-squared test
    (Bonferroni) are yielded. The share is the total variation distance of the two distributions. If samples have
    several labels, mask classes or tokens, the share is the largest change of a value's share.

    A changed list of classes, all new statistics together, and all missing statistics together are a Difference each,
    with the share 1 and without a test.
    """
    ours, theirs = profile.training.statistics, champion.training.statistics
    statistics = [statistic for statistic in ours if statistic in theirs]
    if profile.classes == champion.classes:
        statistics.insert(0, LABEL)
    else:
        yield Difference(1.0, f"the classes differ from the champion's, and are {join_first(profile.classes)}")
    for what, names in (("new", ours.keys() - theirs.keys()), ("missing", theirs.keys() - ours.keys())):
        if names:
            yield Difference(
                1.0, f"the forms of inputs and targets differ from the champion's, {what}: {join_first(sorted(names))}"
            )
    for split, statistic in itertools.product(SPLITS, statistics):
        sides: list[SplitProfile] = [getattr(each, split) for each in (profile, champion)]
        counts = [side.labels if statistic == LABEL else side.statistics.get(statistic, {}) for side in sides]
        values = sorted({*counts[0], *counts[1]})
        table = np.array([[of_values.get(value, 0) for value in values] for of_values in counts])
        several = statistic == LABEL and profile.targets in (LABELS, MASKS, TOKENS)
        totals = np.array([[side.samples - side.undecodable] for side in sides]) if several else table.sum(1)[:, None]
        if len(values) < 2 - several or not totals.all():
            continue
        shares = table / totals
        changes = np.abs(shares[0] - shares[1])
        most = int(changes.argmax())
        distance = float(changes[most] if several else changes.sum() / 2)
        if distance < least:
            continue
        tests = 1 if statistic == LABEL else len(ours)
        if several:  # numbers of samples with and without the label that changes most
            tests, table = len(values), np.hstack((table[:, [most]], totals - table[:, [most]]))
        p = chi2_contingency(table).pvalue
        if p >= SIGNIFICANCE / tests:
            continue
        now, before = shares[:, most]
        named = values[most]
        if statistic == LABEL:
            is_class = named.isdecimal() and int(named) < len(profile.classes)
            named = f"class {profile.classes[int(named)]}" if is_class else f"targets of {named}"
        verb = "differs" if statistic.startswith("column ") else "differ"
        difference = f"{statistic} {verb} from the champion's in {distance:.0%} of samples (p {format_p_value(p)})"
        text = f"{split} split: {difference}, most in {named or 'missing values'}: {now:.0%} instead of {before:.0%}"
        yield Difference(distance, text)
