"""Check a data set's profile before training, and compare it with the profile of the champion's data."""

import itertools
from collections.abc import Iterator

import numpy as np
from scipy.stats import chi2_contingency

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.prepared import resolve_class_names
from flyte_ddp.errors import UserError
from flyte_ddp.formatting import format_count
from flyte_ddp.loading.facts import join_few
from flyte_ddp.validation.profile import DataProfile

SHIFT = 0.1  # a warning is for a difference in at least this share of images
SIGNIFICANCE = 0.001  # a warning is for a smaller p-value
STATISTICS = {"labels": "classes", "modes": "colour modes", "sizes": "sizes", "brightness": "brightness"}


def check_profile(profile: DataProfile, hp: Hyperparameters, *, max_duplicates: float, max_conflicts: float) -> None:
    """Raise a UserError if a data set should not be trained on: one line for each problem, with examples and a remedy.

    ``max_duplicates`` is the allowed share of test samples that have the pixels of a training sample, and
    ``max_conflicts`` that of samples that have the pixels of a sample with another label. Also raises a UserError if
    the class names are unknown, or ``hp.num_classes`` is not their number.
    """
    names, problems = resolve_class_names(profile.classes, hp), list[str]()
    bad = profile.training.undecodable + profile.test.undecodable
    if bad > hp.bad_samples:
        problems.append(
            f"{format_count(bad, 'image')} cannot be decoded, more than bad_samples={hp.bad_samples}: "
            f"{join_few(profile.bad)}; fix or remove them, or raise bad_samples"
        )
    outside = {label: sample for label, sample in profile.labelled.items() if not 0 <= int(label) < len(names)}
    if outside:
        examples = join_few(f"{sample} has label {label}" for label, sample in outside.items())
        limits = f"must be 0..{len(names) - 1} with {len(names)} classes; correct them, or set num_classes"
        problems.append(f"{examples}: {limits}")
    for split, counts in {"training": profile.training, "test": profile.test}.items():
        empty = [name for number, name in enumerate(names) if not counts.labels.get(str(number))]
        if empty:
            remedy = "add some" if split == "training" or hp.test_dataset else "give a test_dataset that has some"
            problems.append(f"no decodable {split} sample is of class {join_few(empty)}; {remedy}, or remove the class")
    if profile.duplicates > max_duplicates * profile.test.samples:
        problems.append(
            f"{profile.duplicates:,} of {format_count(profile.test.samples, 'test sample')} have the pixels of a "
            f"training sample, more than max_duplicates={max_duplicates:g} of them, such as "
            f"{'; '.join(profile.duplicated)}; remove them from one of the two"
        )
    samples = profile.training.samples + profile.test.samples
    if profile.conflicts > max_conflicts * samples:
        remedy = "correct the labels"
        if profile.equal > samples / 2:
            remedy = f"{profile.equal:,} are one and the same picture: look at it, as decoding may lose what it shows"
        problems.append(
            f"{profile.conflicts:,} of {format_count(samples, 'sample')} have the pixels of another one with another "
            f"label, more than max_conflicts={max_conflicts:g} of them, such as {'; '.join(profile.conflicting)}; "
            f"{remedy}"
        )
    if problems:
        raise UserError("\n".join(f"dataset={hp.dataset!r}: {problem}" for problem in problems))


def describe_differences(profile: DataProfile, champion: DataProfile) -> Iterator[str]:
    """Yield a warning if the classes differ from the champion's, and for each other statistic that differs.

    The size of a difference is the total variation distance of the two distributions: the share of images that would
    have to change to make them equal. Warns from SHIFT (10 %) on, if the p-value of Pearson's chi-squared test is below
    SIGNIFICANCE (0.001).
    """
    statistics = dict(STATISTICS)
    if profile.classes != champion.classes:
        yield "the classes are not the champion's"
        del statistics["labels"]
    for split, (statistic, name) in itertools.product(("training", "test"), statistics.items()):
        counts = [getattr(getattr(each, split), statistic) for each in (profile, champion)]
        values = sorted({*counts[0], *counts[1]})
        table = np.array([[of_values.get(value, 0) for value in values] for of_values in counts])
        if len(values) < 2 or not table.any(axis=1).all():
            continue
        shares = table / table.sum(axis=1, keepdims=True)
        changes = np.abs(shares[0] - shares[1])
        distance, p = changes.sum() / 2, chi2_contingency(table).pvalue
        if distance < SHIFT or p >= SIGNIFICANCE:
            continue
        now, before = shares[:, most := int(changes.argmax())]
        yield (
            f"{split} split: {name} differ from the champion's in {distance:.0%} of images (p = {p:.1g}), most in "
            f"{describe_value(statistic, values[most], profile.classes)}: {now:.0%} instead of {before:.0%}"
        )


def describe_value(statistic: str, value: str, classes: list[str]) -> str:
    """Return a value of a statistic in words, such as "class cat"."""
    if statistic == "labels":
        return f"class {classes[int(value)] if int(value) < len(classes) else value}"
    if statistic == "sizes":
        return f"images of {2 ** int(value):,} to {2 ** (int(value) + 1) - 1:,} pixels"
    if statistic == "brightness":
        return f"images of mean value {16 * int(value)} to {16 * int(value) + 15}"
    return value
