"""What a data set's profile says against training on it, and how it differs from what the champion was trained on."""

import itertools
from collections.abc import Iterator

import numpy as np
from scipy.stats import chi2_contingency

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.prepared import class_names
from flyte_ddp.errors import UserError
from flyte_ddp.formatting import counted
from flyte_ddp.loading.facts import few
from flyte_ddp.validation.profile import DataProfile

SHIFT, SIGNIFICANCE = 0.1, 0.001  # from which a difference is worth a warning, if chance does not explain it
STATISTICS = {"labels": "classes", "modes": "colour modes", "sizes": "sizes", "brightness": "brightness"}


def check(found: DataProfile, hp: Hyperparameters, *, max_duplicates: float, max_conflicts: float) -> None:
    """Refuse a data set that should not be trained on.

    Args:
        found: the data set's profile.
        hp: of the training.
        max_duplicates: share of test samples that may have the pixels of a training sample.
        max_conflicts: share of samples that may have the pixels of another one with another label.

    Raises:
        UserError: all that is wrong with the data set, a line each, with examples.
    """
    problems = [*sample_problems(found, hp), *equal_pixels(found, max_duplicates, max_conflicts)]
    if problems:
        raise UserError("\n".join(f"dataset={hp.dataset!r}: {problem}" for problem in problems))


def sample_problems(found: DataProfile, hp: Hyperparameters) -> Iterator[str]:
    """Yield what is wrong with samples and classes, with a remedy each."""
    names = class_names(found.classes, hp)
    bad = found.training.undecodable + found.test.undecodable
    if bad > hp.bad_samples:
        yield (
            f"{counted(bad, 'image')} cannot be decoded, more than bad_samples={hp.bad_samples}: "
            f"{few(found.bad)}; fix or remove them, or raise it"
        )
    outside = {label: sample for label, sample in found.labelled.items() if not 0 <= int(label) < len(names)}
    if outside:
        examples = few(f"{sample} has label {label}" for label, sample in outside.items())
        yield f"{examples}: must be 0..{len(names) - 1} with {len(names)} classes; fix them, or set num_classes"
    for split, counts in {"training": found.training, "test": found.test}.items():
        empty = [name for number, name in enumerate(names) if not counts.labels.get(str(number))]
        if empty:
            remedy = "add some" if split == "training" or hp.test_dataset else "give a test_dataset that has some"
            yield f"no {split} sample that can be decoded is of class {few(empty)}; {remedy}, or take the class out"


def equal_pixels(found: DataProfile, max_duplicates: float, max_conflicts: float) -> Iterator[str]:
    """Yield what is wrong with samples that have the pixels of others, with a remedy each."""
    if found.duplicates > max_duplicates * found.test.samples:
        yield (
            f"{found.duplicates:,} of {counted(found.test.samples, 'test sample')} have the pixels of a training "
            f"sample, more than max_duplicates={max_duplicates:g} of them, such as "
            f"{'; '.join(found.duplicated)}; remove them from one of the two"
        )
    samples = found.training.samples + found.test.samples
    if found.conflicts > max_conflicts * samples:
        remedy = "correct the labels"
        if found.equal > samples / 2:
            remedy = f"{found.equal:,} are one and the same picture: look at it, as decoding may lose what it shows"
        yield (
            f"{found.conflicts:,} of {counted(samples, 'sample')} have the pixels of another one with another label, "
            f"more than max_conflicts={max_conflicts:g} of them, such as {'; '.join(found.conflicting)}; {remedy}"
        )


def differences(found: DataProfile, champions: DataProfile) -> Iterator[str]:
    """Yield warnings: in what the data are unlike those that the champion was trained and tested on.

    The size of a difference is the total variation distance of the two distributions, which is the share of images that
    would have to be others to make them equal. One that chance explains (Pearson's chi-squared test) is left out.
    """
    if found.classes != champions.classes:
        yield "the classes are not the champion's"
    for split, (statistic, name) in itertools.product(("training", "test"), STATISTICS.items()):
        if statistic == "labels" and found.classes != champions.classes:
            continue
        counts = [getattr(getattr(profile, split), statistic) for profile in (found, champions)]
        values = sorted({*counts[0], *counts[1]})
        table = np.array([[of_profile.get(value, 0) for value in values] for of_profile in counts])
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
            f"{value_name(statistic, values[most], found.classes)}: {now:.0%} instead of {before:.0%}"
        )


def value_name(statistic: str, value: str, classes: list[str]) -> str:
    """Return the words for a value of a statistic."""
    if statistic == "labels":
        return f"class {classes[int(value)] if int(value) < len(classes) else value}"
    if statistic == "sizes":
        return f"images of {2 ** int(value):,} to {2 ** (int(value) + 1) - 1:,} pixels"
    if statistic == "brightness":
        return f"images of mean value {16 * int(value)} to {16 * int(value) + 15}"
    return value
