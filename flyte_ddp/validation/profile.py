"""The profile of a data set: counts of targets and samples, examples of bad samples, and a page with both."""

# No "from __future__ import annotations" here: flytekit derives the type of a task's output from real types.
from dataclasses import dataclass, field

from dataclasses_json import DataClassJsonMixin

from flyte_ddp.core.text.formatting import format_count
from flyte_ddp.report.page import render_template

CLASSES, LABELS, MASKS, NUMBERS, TOKENS, OTHERS = "class", "labels", "mask", "numbers", "tokens", "others"
LISTED = 6  # values of a statistic on the page, the most frequent first


@dataclass
class SplitProfile(DataClassJsonMixin):
    """Counts of a split's samples. Only ``samples`` and ``undecodable`` also count undecodable samples."""

    samples: int = 0
    # Number of samples by class number. A sample with several labels, or a mask, counts for each of its classes.
    # Numbers to predict are counted by the range of the first number, and tokens by each range with a token.
    labels: dict[str, int] = field(default_factory=dict)
    undecodable: int = 0
    # Number of samples by the value of each statistic. Statistics of encoded images are "colour modes", "sizes" and
    # "brightness". Other samples have statistics of each leaf, such as "lengths of inputs tokens".
    statistics: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass
class DataProfile(DataClassJsonMixin):
    """Counts of a data set, with up to five examples of each problem. Examples name files, shard samples or indices."""

    classes: list[str]  # empty if the data set does not name classes
    training: SplitProfile  # with the samples for validation
    test: SplitProfile
    duplicates: int  # test samples with the pixels, or the inputs, of a training sample
    conflicts: int  # samples with the pixels, or the inputs, of a sample with another label
    bad: list[str]  # examples of samples that cannot be decoded, or are not finite, with the reason
    labelled: dict[str, str]  # a sample for each label, or token to predict, outside the class numbers
    duplicated: list[str]  # examples of duplicates
    conflicting: list[str]  # examples of conflicts
    targets: str = CLASSES  # the kind of targets: CLASSES, LABELS, MASKS, NUMBERS, TOKENS or OTHERS
    target_shape: list[int] = field(default_factory=list)  # of a training sample; empty for several leaves
    not_finite: int = 0  # samples with NaN or infinity in their inputs, or infinity in their targets; of images 0
    compared: str = "inputs"  # what duplicates have in common: "inputs", or "pixels" of images


def render_profile(profile: DataProfile, dataset: str, warnings: list[str]) -> str:
    """Return the HTML page of a profile. ``dataset`` is the title, and ``warnings`` come first."""
    facts = [("Warning", warning) for warning in warnings]
    called = {NUMBERS: "ranges of numbers", TOKENS: "ranges of tokens"}.get(profile.targets, "classes")
    for name, split in {"Training": profile.training, "Test": profile.test}.items():
        numbers = sorted(split.labels.values())
        classes = f" in {len(numbers):,} {called} of {numbers[0]:,} to {numbers[-1]:,}" if numbers else ""
        bad = f"; {split.undecodable:,} cannot be decoded" if split.undecodable else ""
        facts.append((name, format_count(split.samples, "sample", classes) + bad))
    for statistic, counts in profile.training.statistics.items():
        listed = sorted(counts.items(), key=lambda item: -item[1])[:LISTED]
        more = f", and {len(counts) - LISTED} more" if len(counts) > LISTED else ""
        facts.append((statistic.capitalize(), ", ".join(f"{value}: {number:,}" for value, number in listed) + more))
    facts.append(("Test samples that are also training samples", f"{profile.duplicates:,}"))
    if profile.targets in (CLASSES, LABELS, MASKS):
        facts.append((f"Samples with equal {profile.compared} and different labels", f"{profile.conflicts:,}"))
    return render_template("preview.html", title=dataset, heading="Profile of the data set", facts=facts)
