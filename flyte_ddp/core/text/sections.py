"""Sections of a run's report: plain data that an objective computes on the test split and the report draws."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

from flyte_ddp.core.checks.parsing import parse_json
from flyte_ddp.core.checks.records import Count, JsonRecord
from flyte_ddp.core.text.json_lines import replace_non_finite

Numbers = Sequence[float | None]  # None if not defined


@dataclass(frozen=True)
class Table(JsonRecord):
    """A table. Columns of numbers are aligned right, and an undefined number is shown as a dash."""

    kind = "table"
    title: str
    text: str
    header: Sequence[str]
    rows: Sequence[Sequence[str | float | None]]


@dataclass(frozen=True)
class Chart(JsonRecord):
    """A chart. Consecutive charts with the same title are shown as one section."""

    title: str
    text: str
    name: str  # of this chart
    x_label: str


@dataclass(frozen=True)
class Scatter(Chart):
    """Points, with the diagonal where x and y are equal."""

    kind = "scatter"
    y_label: str
    x: Numbers
    y: Numbers


@dataclass(frozen=True)
class Histogram(Chart):
    """The number of values between each two neighbouring edges."""

    kind = "histogram"
    edges: Numbers  # one edge more than counts
    counts: Sequence[Count]


@dataclass(frozen=True)
class Curve(Chart):
    """A line in the unit square."""

    kind = "curve"
    y_label: str
    x: Numbers
    y: Numbers
    chance: Sequence[float]  # y at x = 0 and at x = 1 of a line to compare with


@dataclass(frozen=True)
class Confusions(JsonRecord):
    """The number of samples for each pair of true and predicted class, [K, 3]: truth, prediction, number of samples."""

    kind = "confusions"
    classes: Sequence[str]  # names of all classes
    counts: Sequence[Sequence[Count]]


@dataclass(frozen=True)
class Pictures(JsonRecord):
    """Samples of the test split with picture, prediction and truth. ``samples`` are positions in the split's order."""

    kind = "pictures"
    title: str
    text: str
    samples: Sequence[Count]


Section = Table | Scatter | Curve | Histogram | Confusions | Pictures
KINDS: dict[str, type[Section]] = {kind.kind: kind for kind in get_args(Section)}


def encode_sections(sections: Iterable[Section]) -> str:
    return json.dumps([replace_non_finite(section.to_json_value()) for section in sections])


def decode_sections(text: str) -> list[Section]:
    """Return the report's sections from a text of :func:`encode_sections`. NaN and infinite numbers become None.

    Raises:
        ValueError: The text is not JSON, or a section lacks a field or has a value of another type.
        LookupError, TypeError: The text is no list of sections.
    """
    return [KINDS[values["kind"]].from_json_value(values, "sections") for values in parse_json(text)]
