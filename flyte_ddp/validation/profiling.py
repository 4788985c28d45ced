"""Compute a data set's profile from all its samples, check it before training, and compare it with the champion's."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
from scipy.stats import chi2_contingency

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.encoded_set import EncodedSet
from flyte_ddp.datasets.prepared import ItemSet, open_prepared, resolve_class_names
from flyte_ddp.datasets.sample_arrays import name_sample
from flyte_ddp.errors import UserError
from flyte_ddp.loading.encoded import ImageReader
from flyte_ddp.loading.facts import FEW, join_few
from flyte_ddp.loading.opening import open_image_reader
from flyte_ddp.machine.resources import count_cores
from flyte_ddp.settings import Settings
from flyte_ddp.text.formatting import format_count
from flyte_ddp.validation.image_profile import measure_encoded_images, measure_image_arrays, sample_numbers
from flyte_ddp.validation.leaf_profile import Compared, PartProfile, add_split, kind_of_targets, measure_item_set
from flyte_ddp.validation.profile import (
    CLASSES,
    LABELS,
    MASKS,
    NUMBERS,
    OTHERS,
    TOKENS,
    DataProfile,
    SplitProfile,
)

LABEL = "classes"  # what a sample's targets are called as a statistic
SHIFT = 0.1  # a warning is for a difference in at least this share of images
SIGNIFICANCE = 0.001  # a warning is for a smaller p-value
SPLITS = ("training", "test")


def compute_profile(folder: Path, settings: Settings | None = None) -> DataProfile:
    """Read and decode all samples of a prepared data set, and return its profile.

    ``loaders`` of ``settings`` is the number of decoding threads, or of processes for items on demand. Raises
    UserError if the data set is damaged, or a sample cannot be read, lacks image or label, or changes when read again.
    """
    data, settings = open_prepared(folder), settings or Settings()
    profile = DataProfile([*data.classes], SplitProfile(), SplitProfile(), 0, 0, [], {}, [], [])
    with ExitStack() as opened:
        readers: dict[str, ImageReader] = {}
        if isinstance(data, EncodedSet):
            for split, source in zip(SPLITS, (data.train, data.test_source), strict=True):
                readers[split] = opened.enter_context(closing(open_image_reader(source, settings)))

        def name_of(split: str, number: int) -> str:
            return readers[split].read_sample(number).name if readers else name_sample(data, split, number)

        if isinstance(data, ItemSet):
            compared = measure_item_set(data, profile, settings, name_of)
        else:
            profile.compared = "pixels"
            parts: dict[str, Iterator[PartProfile]]
            if isinstance(data, EncodedSet):
                threads = settings.loaders or count_cores()
                parts = {
                    split: measure_encoded_images(reader, sample_numbers(data, split), profile, threads)
                    for split, reader in readers.items()
                }
            else:
                profile.target_shape = [*data.train_labels.shape[1:]]
                profile.targets = kind_of_targets(data.train_labels, data.classes, of_pictures=True)
                parts = {split: measure_image_arrays(data, split, profile) for split in SPLITS}
            compared = [add_split(profile, split, parts[split], name_of) for split in SPLITS]
        add_equal_samples(profile, compared, name_of)
        return profile


def add_equal_samples(profile: DataProfile, compared: Sequence[Compared], name_of: Callable[[str, int], str]) -> None:
    """Add duplicates and conflicts among the samples of the training and the test split to the profile."""
    numbers, labels, digests = (np.concatenate(pair) for pair in zip(*compared, strict=True))
    in_test = np.arange(len(numbers)) >= len(compared[0].numbers)
    _, group, sizes = np.unique(digests, return_inverse=True, return_counts=True)
    profile.equal = int(max(sizes, default=0))
    shared = np.flatnonzero(sizes[group] > 1)
    shared = shared[np.lexsort((shared, group[shared]))]  # grouped by pixels; in a group training comes first
    starts = np.flatnonzero(np.diff(group[shared], prepend=-1))

    def name_at(place: int) -> str:
        return name_of(SPLITS[int(in_test[place])], int(numbers[place]))

    for same in np.split(shared, starts[1:]) if len(shared) else []:
        first, last = int(same[0]), int(same[-1])
        if not in_test[first] and in_test[last]:
            profile.duplicates += int(in_test[same].sum())
            if len(profile.duplicated) < FEW:
                profile.duplicated.append(f"{name_at(last)} and {name_at(first)}")
        # Two numbers for equal inputs are noise, as in any measurement; a text may go on in many ways.
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
    """Raise UserError if a data set should not be trained on: a line for each problem, with examples and a remedy."""
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
    test (Bonferroni over the statistics of the inputs, or over all labels).
    """
    ours, theirs = profile.training.statistics, champion.training.statistics
    statistics = [statistic for statistic in ours if statistic in theirs]
    if profile.classes == champion.classes:
        statistics.insert(0, LABEL)
    else:
        yield "the classes are not the champion's"
    if ours.keys() != theirs.keys():
        yield "the inputs and targets have other forms than the champion's"
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
        distance = changes[most] if several else changes.sum() / 2
        if distance < SHIFT:
            continue
        tests = 1 if statistic == LABEL else len(ours)
        if several:  # of the label that changes most: how many samples have it, and have not
            tests, table = len(values), np.hstack((table[:, [most]], totals - table[:, [most]]))
        p = chi2_contingency(table).pvalue
        if p >= SIGNIFICANCE / tests:
            continue
        now, before = shares[:, most]
        named = name_target(values[most], profile.classes) if statistic == LABEL else values[most]
        yield (
            f"{split} split: {statistic} differ from the champion's in {distance:.0%} of samples (p = {p:.1g}), most "
            f"in {named}: {now:.0%} instead of {before:.0%}"
        )


def name_target(value: str, classes: Sequence[str]) -> str:
    known = value.isdecimal() and int(value) < len(classes)
    return f"class {classes[int(value)]}" if known else f"targets of {value}"
