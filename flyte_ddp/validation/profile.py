"""The profile of a data set: counts of its classes and images, examples of bad samples, and the page that shows it."""

# No "from __future__ import annotations" here: flytekit derives the type of a task's output from real types.
from dataclasses import dataclass, field

from dataclasses_json import DataClassJsonMixin

from flyte_ddp.formatting import format_count
from flyte_ddp.report.page import render_template

CLASSES, LABELS, MASKS, NUMBERS = "class", "labels", "mask", "numbers"


@dataclass
class SplitProfile(DataClassJsonMixin):
    """Counts of a split's samples. All but ``samples`` and ``undecodable`` count decodable samples only."""

    samples: int = 0
    # Number of samples by class number; a sample of several labels, or a mask, counts for each class that it has. Of
    # numbers to predict: number of samples by the range of the first one.
    labels: dict[str, int] = field(default_factory=dict)
    undecodable: int = 0
    modes: dict[str, int] = field(default_factory=dict)  # number of samples by Pillow's mode of the file: RGB, L, ...
    sizes: dict[str, int] = field(default_factory=dict)  # by exponent of the largest power of two in height * width
    brightness: dict[str, int] = field(default_factory=dict)  # number of samples by bin (of 16) of the mean value


@dataclass
class DataProfile(DataClassJsonMixin):
    """Counts of a data set, with up to five examples of each problem. Examples name files, shard samples or indices."""

    classes: list[str]  # empty where the data set does not name them
    training: SplitProfile  # with the samples for validation
    test: SplitProfile
    duplicates: int  # test samples with the pixels of a training sample
    conflicts: int  # samples with the pixels of a sample with another label
    bad: list[str]  # examples of samples that cannot be decoded, with the reason
    labelled: dict[str, str]  # for each label that is no class's number: a sample
    duplicated: list[str]  # examples of duplicates
    conflicting: list[str]  # examples of conflicts
    equal: int = 0  # size of the largest group of samples with equal pixels
    targets: str = CLASSES  # what a sample's target is: CLASSES, LABELS, MASKS or NUMBERS


def render_profile(profile: DataProfile, dataset: str, warnings: list[str]) -> str:
    """Return the HTML page of a data set's profile as text. It begins with the warnings."""
    facts = [("Warning", warning) for warning in warnings]
    for name, split in {"Training": profile.training, "Test": profile.test}.items():
        numbers = sorted(split.labels.values()) or [0]
        called = "ranges of numbers" if profile.targets == NUMBERS else "classes"
        classes = f"{len(numbers):,} {called} of {numbers[0]:,} to {numbers[-1]:,}"
        modes = ", ".join(f"{mode} {number:,}" for mode, number in split.modes.items())
        unusable = f"; {split.undecodable:,} cannot be decoded" if split.undecodable else ""
        facts.append((name, f"{format_count(split.samples, 'sample')} in {classes}; {modes}{unusable}"))
    facts.append(("Test samples that are training samples, too", f"{profile.duplicates:,}"))
    facts.append(("Samples with equal pixels and different labels", f"{profile.conflicts:,}"))
    return render_template("preview.html", title=dataset, heading="What the data set is like", facts=facts)
