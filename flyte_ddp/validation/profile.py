"""The profile of a data set: counts of its classes and images, and examples of bad samples."""

# No "from __future__ import annotations" here: flytekit derives the type of a task's output from real types.
from dataclasses import dataclass, field

from dataclasses_json import DataClassJsonMixin


@dataclass
class SplitProfile(DataClassJsonMixin):
    """Counts of a split's samples. All but ``samples`` and ``undecodable`` count decodable samples only."""

    samples: int = 0
    labels: dict[str, int] = field(default_factory=dict)  # number of samples by class number
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
