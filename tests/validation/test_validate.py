"""What is refused, and what is warned of."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chi2, fisher_exact

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.validation.leaf_profile import count_by_range
from flyte_ddp.validation.profile import LABELS, DataProfile, SplitProfile
from flyte_ddp.validation.profiling import check_profile, iterate_differences_from_champion

HP = Hyperparameters(dataset="image_folder:x")

STATISTICS = {"colour modes": {"RGB": 100}, "sizes": {"large": 100}, "brightness": {"dark": 100}}


def split(statistics: dict[str, dict[str, int]] | None = None, **values: object) -> SplitProfile:
    counts = {"samples": 100, "labels": {"0": 50, "1": 50}, "statistics": {**STATISTICS, **(statistics or {})}}
    return SplitProfile(**{**counts, **values})


GOOD = DataProfile(["cat", "dog"], split(), split(), 0, 0, [], {}, [], [], compared="pixels")


def problems(found: DataProfile, hp: Hyperparameters = HP, duplicates: float = 0.01) -> list[str]:
    with pytest.raises(UserError) as raised:
        check_profile(found, hp, max_duplicates=duplicates, max_conflicts=0.01)
    return [line.removeprefix("dataset='image_folder:x': ") for line in str(raised.value).splitlines()]


def test_all_problems_are_in_one_error_with_examples() -> None:
    bad = replace(
        GOOD,
        training=split(labels={"0": 99, "5": 1}, undecodable=2),
        test=split(samples=10),
        duplicates=1,
        conflicts=3,
        bad=["image a.jpg (truncated)", "image b.jpg (truncated)"],
        labelled={"5": "sample 'k' in shard s.tar"},
        duplicated=["test sample 3 and training sample 9"],
        conflicting=["a.png (label 0) and b.png (label 1)"],
    )
    *others, conflicts = problems(bad)
    assert others == [
        (
            "2 images cannot be decoded, more than bad_samples=0: image a.jpg (truncated), "
            "image b.jpg (truncated); fix or remove them, or raise bad_samples"
        ),
        "sample 'k' in shard s.tar has label 5: must be 0..1 with 2 classes; correct the data, or set num_classes",
        "no decodable training sample is of class dog; add samples, or remove the class",
        (
            "1 of 10 test samples have the pixels of a training sample, more than the share max_duplicates=0.01, such "
            "as test sample 3 and training sample 9; remove them from one split"
        ),
    ]
    assert conflicts == (
        "3 of 110 samples have the pixels of a sample with another label, more than the share max_conflicts=0.01, "
        "such as a.png (label 0) and b.png (label 1); correct the labels"
    )


def test_shares_at_the_limit_are_allowed() -> None:
    check_profile(GOOD, HP, max_duplicates=0, max_conflicts=0)
    ten = replace(GOOD, duplicates=10, conflicts=2, training=split(undecodable=3), bad=["x (y)"])
    check_profile(ten, replace(HP, bad_samples=3), max_duplicates=0.1, max_conflicts=0.01)
    assert len(problems(ten, replace(HP, bad_samples=2), duplicates=0.09)) == 2


def test_a_difference_is_named_with_its_size() -> None:
    changed = {"colour modes": {"RGB": 75, "L": 25}, "sizes": {"small": 100}}
    now = replace(GOOD, training=split(changed, labels={"0": 80, "1": 20}))
    expected_p = chi2.sf(200 * (30 * 100) ** 2 / (130 * 70 * 100 * 100), 1)  # before Yates' correction
    classes, modes, sizes = (each.text for each in iterate_differences_from_champion(now, GOOD))
    assert classes.startswith("training split: classes differ from the champion's in 30% of samples (p = ")
    assert classes.endswith("most in class cat: 80% instead of 50%")
    found = float(classes.partition("p = ")[2].partition(")")[0])
    assert abs(math.log10(found) - math.log10(expected_p)) < 1
    assert modes.startswith("training split: colour modes differ from the champion's in 25% of samples")
    assert sizes.endswith(("in large: 0% instead of 100%", "in small: 100% instead of 0%"))
    assert not [*iterate_differences_from_champion(GOOD, GOOD)]
    [renamed] = iterate_differences_from_champion(replace(now, classes=["cat", "dog", "cow"]), now)
    assert renamed == (1.0, "the classes differ from the champion's, and are cat, dog, cow")
    few = replace(GOOD, training=split(labels={"0": 4, "1": 1}))
    assert not [*iterate_differences_from_champion(few, GOOD)], "which chance explains"
    small = replace(GOOD, training=split(labels={"0": 58_000, "1": 50_000}))
    assert not [*iterate_differences_from_champion(small, GOOD)], "which is too small to matter, though no chance"


def test_a_change_to_both_sides_and_missing_rare_classes_are_found() -> None:
    """Distribution functions would show half of the first change, and pooled rare classes none of the second."""
    random = np.random.default_rng(0)
    before, now = random.normal(size=(2, 3000))
    now[:240] *= 1000
    numbers = [replace(GOOD, training=split({"column size": dict(count_by_range(each))})) for each in (before, now)]
    [(share, warning)] = iterate_differences_from_champion(numbers[1], numbers[0])
    assert share == pytest.approx(0.08, abs=0.02)
    assert warning.startswith("training split: column size differs from the champion's in ")
    many = [Counter(map(str, random.integers(low, 1000, size).tolist())) for low, size in ((0, 10_000), (300, 1000))]
    classes = [replace(GOOD, training=split(labels=dict(each))) for each in many]
    [(share, _)] = iterate_differences_from_champion(classes[1], classes[0])
    assert share >= 0.3


def test_labels_of_which_a_sample_may_have_several_are_compared_by_shares_of_samples() -> None:
    before = replace(GOOD, targets=LABELS, training=split(labels={"0": 10, "1": 10}))
    now = replace(before, training=split(labels={"0": 40, "1": 41}))
    [(share, warning)] = iterate_differences_from_champion(now, before)
    assert share == pytest.approx(0.31)
    assert "differ from the champion's in 31% of samples (p = " in warning
    assert warning.endswith("most in class dog: 41% instead of 10%")
    found = float(warning.partition("p = ")[2].partition(")")[0])
    expected = fisher_exact([[41, 59], [10, 90]]).pvalue
    assert abs(math.log10(found) - math.log10(expected)) < 1
    assert not [*iterate_differences_from_champion(before, before)]
    gone = replace(before, training=split(labels={}))
    [(_, warning)] = iterate_differences_from_champion(gone, replace(before, training=split(labels={"0": 40, "1": 10})))
    assert warning.endswith("most in class cat: 0% instead of 40%")
    several = replace(now, training=split(labels={"0": 100, "1": 81}))
    assert (
        len([*iterate_differences_from_champion(several, replace(now, training=split(labels={"0": 100, "1": 41})))])
        == 1
    )
