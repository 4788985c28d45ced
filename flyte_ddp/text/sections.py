"""Sections of a run's report: plain data that an objective computes on the test split and the report draws."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import get_args

from flyte_ddp.checks.forms import COUNT, require_form
from flyte_ddp.checks.parsing import parse_json
from flyte_ddp.text.json_lines import replace_non_finite

Numbers = Sequence[float | None]  # None if not defined


@dataclass(frozen=True)
class Table:
    """A table. Columns of numbers are aligned right, and an undefined number is shown as a dash."""

    title: str
    text: str
    header: Sequence[str]
    rows: Sequence[Sequence[str | float | None]]


@dataclass(frozen=True)
class Chart:
    """A chart. Consecutive charts with the same title are shown as one section."""

    title: str
    text: str
    name: str  # of this chart
    x_label: str


@dataclass(frozen=True)
class Scatter(Chart):
    """Points, with the diagonal where x and y are equal."""

    y_label: str
    x: Numbers
    y: Numbers


@dataclass(frozen=True)
class Histogram(Chart):
    """The number of values between each two neighbouring edges."""

    edges: Numbers  # one edge more than counts
    counts: Sequence[int]


@dataclass(frozen=True)
class Curve(Chart):
    """A line in the unit square."""

    y_label: str
    x: Numbers
    y: Numbers
    chance: Sequence[float]  # y at x = 0 and at x = 1 of a line to compare with


@dataclass(frozen=True)
class Confusions:
    """The number of samples for each pair of true and predicted class, [K, 3]: truth, prediction, number of samples."""

    classes: Sequence[str]  # names of all classes
    counts: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Pictures:
    """Samples of the test split with picture, prediction and truth. ``samples`` are positions in the split's order."""

    title: str
    text: str
    samples: Sequence[int]


Section = Table | Scatter | Curve | Histogram | Confusions | Pictures
NUMBERS = [(float, None)]
FORMS = {
    **dict.fromkeys(["title?", "text?", "name?", "x_label?", "y_label?"], str),
    **dict.fromkeys(["x?", "y?", "edges?"], NUMBERS),
    "header?": [str],
    "rows?": [[(str, float, None)]],
    "counts?": ([COUNT], [[COUNT]]),
    "chance?": [float],
    "classes?": [str],
    "samples?": [COUNT],
}
KINDS: dict[str, type[Section]] = {kind.__name__.lower(): kind for kind in get_args(Section)}


def encode_sections(sections: Iterable[Section]) -> str:
    return json.dumps([replace_non_finite({"kind": type(each).__name__.lower(), **asdict(each)}) for each in sections])


def decode_sections(text: str) -> list[Section]:
    """Return the sections in a text of :func:`encode_sections`. NaN and infinite numbers have become None.

    Raises:
        ValueError: The text is not JSON, or a value has another type.
        TypeError: A section lacks a field, or has a field of another kind.
    """
    found = parse_json(text)
    require_form(found, [{"kind": {*KINDS}, **FORMS}], "sections")
    return [KINDS[values.pop("kind")](**values) for values in found]
