"""What a data set is like: counts of its classes and images, and examples of samples that something is wrong with."""

# No "from __future__ import annotations" here: flytekit derives the type of a task's output from real types.
from dataclasses import dataclass, field

from dataclasses_json import DataClassJsonMixin


@dataclass
class SplitProfile(DataClassJsonMixin):
    """Counts of the samples of a split. What is counted by a value is of samples that can be decoded."""

    samples: int = 0
    labels: dict[str, int] = field(default_factory=dict)  # samples of each, by the class's number
    undecodable: int = 0
    modes: dict[str, int] = field(default_factory=dict)  # as stored, in Pillow's words: RGB, L, ...
    sizes: dict[str, int] = field(default_factory=dict)  # by the power of two that height times width reaches
    brightness: dict[str, int] = field(default_factory=dict)  # by the bin of the mean value


@dataclass
class DataProfile(DataClassJsonMixin):
    """Counts of a data set. Examples name files, samples of shards, or indices: five of each kind at most."""

    classes: list[str]  # empty where the data set does not name them
    training: SplitProfile  # with the samples for validation
    test: SplitProfile
    duplicates: int  # test samples that have the pixels of a training sample
    conflicts: int  # samples that have the pixels of another one with another label
    bad: list[str]  # examples of samples that cannot be decoded, with the reason
    labelled: dict[str, str]  # a sample for each label that is not the number of one of the classes
    duplicated: list[str]  # examples
    conflicting: list[str]  # examples
    equal: int = 0  # the most samples that have the same pixels
