"""The report's pictures: matplotlib figures as SVG, and thumbnails as PNG.

matplotlib is imported where it is first used: that takes a second, which only a finished run should pay.
"""

from __future__ import annotations

import base64
import html
import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

BLUE, ORANGE, GREEN = "#2457c5", "#d9660f", "#1b8a5a"
INK, MUTED, GRID = "#1f2733", "#5d6878", "#e4e8ee"
MAX_POINTS = 300  # more cannot be told apart at the size of a chart
NAMED_CLASSES = 20  # up to here a confusion matrix has room for numbers
LABELLED_CLASSES = 50  # and up to here for names

STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],  # comes with matplotlib; the page's own font is narrower and takes its place there
    "font.size": 8.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "flyte-ddp",  # equal runs give equal files
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "text.color": INK,
    "lines.linewidth": 1.6,
}


@dataclass(frozen=True)
class Series:
    """One line of a chart; ``x`` increases, and the label is empty where there is no need for a legend."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: str


@contextmanager
def styled() -> Iterator[None]:
    """The report's look for the figures made inside, whatever the user's own matplotlib settings are."""
    from matplotlib import rc_context, rcdefaults, rcParams

    with rc_context(), warnings.catch_warnings():
        rcdefaults()
        rcParams.update(STYLE)
        # The browser draws the text, so a class name may well have letters that matplotlib's font lacks.
        warnings.filterwarnings("ignore", message="(?s)Glyph .* missing from")
        yield


def line_chart(
    series: Sequence[Series], *, x_label: str, y_label: str, scale: str = "linear", x_from: float | None = None
) -> str:
    """Lines over a common x, as an SVG element; long series as their means in bands from smallest to largest.

    Args:
        series: at least one, each with at least one point.
        x_label: what x is, with its unit.
        y_label: what y is, with its unit.
        x_from: where the x axis begins; at the first point if it is not given.
        scale: of y: ``linear``, ``from 0``, or ``log``, which takes effect where the values differ enough to need it.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

    values = np.concatenate([np.asarray(line.y, dtype=float) for line in series])
    values = values[np.isfinite(values)]
    with styled():
        figure = Figure(figsize=(5.0, 2.7))
        axes = figure.add_axes((0.125, 0.16, 0.855, 0.74))
        for line in series:
            draw(axes, line)
        if len({x for line in series for x in line.x}) == 1:
            axes.set_xlim(series[0].x[0] - 1, series[0].x[0] + 1)
        if x_from is not None:
            axes.set_xlim(left=x_from)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        if scale == "from 0":
            axes.set_ylim(0, max(1e-12, float(values.max(initial=0.0))) * 1.08)
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        elif scale == "log" and values.size and values.max() > 5 * values.min() > 0:
            axes.set_yscale("log")
            wide = values.max() > 1000 * values.min()
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.yaxis.set_minor_locator(NullLocator())
            y_label += ", logarithmic"
        axes.set_xlabel(x_label)
        axes.set_title(y_label, loc="left", fontsize=8.5, color=MUTED)  # reads better than a label on its side
        if any(line.label for line in series):
            axes.legend(loc="best", labelcolor=INK)
        return as_svg(figure, f"{y_label} over {x_label}")


def draw(axes: Axes, line: Series) -> None:
    """One line, with its points where they are few."""
    x, y = np.asarray(line.x, dtype=float), np.asarray(line.y, dtype=float)
    if len(x) <= MAX_POINTS:
        style = "o-" if len(x) <= 40 else "-"
        axes.plot(x, y, style, color=line.color, label=line.label, markersize=3.2)
        return
    x, low, mean, high = thinned(x, y)
    axes.fill_between(x, low, high, color=line.color, alpha=0.18, linewidth=0)
    axes.plot(x, mean, color=line.color, label=line.label)


def thinned(x: Floats, y: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Cuts a long series into ``MAX_POINTS`` runs: the mean x, and the smallest, mean and largest y of each."""
    starts = np.linspace(0, len(x), MAX_POINTS, endpoint=False).astype(np.int64)
    counts = np.diff(np.append(starts, len(x)))
    return (
        np.add.reduceat(x, starts) / counts,
        np.minimum.reduceat(y, starts),
        np.add.reduceat(y, starts) / counts,
        np.maximum.reduceat(y, starts),
    )


def confusion_heatmap(confusion: NDArray[np.int64], classes: Sequence[str]) -> str:
    """Truth (rows) against guess (columns), as an SVG element: right answers blue, mistakes orange.

    A cell's depth is its share of the row; that of mistakes is stretched to the largest, as they are few.
    """
    from matplotlib.figure import Figure

    names = [short(name) for name in classes]
    shares = confusion / np.maximum(1, confusion.sum(axis=1, keepdims=True))
    right = np.eye(len(classes), dtype=bool)
    wrong_depth = np.sqrt(shares / max(1e-12, float(shares[~right].max(initial=0.0))))
    depth = np.where(right, shares, np.minimum(1.0, wrong_depth))
    colors = np.where(right[:, :, None], (0.14, 0.34, 0.77), (0.90, 0.45, 0.10))
    pixels = 1.0 - depth[:, :, None] * (1.0 - colors)

    with styled():
        labelled = len(classes) <= LABELLED_CLASSES
        margin = 0.45 + (0.075 * max(map(len, names), default=0) if labelled else 0.3)  # inches
        body = min(6.4, max(1.8, 0.45 * len(classes)))
        side = margin + body + 0.1
        figure = Figure(figsize=(side, side))
        axes = figure.add_axes((margin / side, margin / side, body / side, body / side))
        axes.grid(visible=False)
        axes.imshow(pixels, interpolation="none", aspect="equal")
        if labelled:
            ticks, turn = range(len(names)), 0 if max(map(len, names)) <= 3 else 90
            size = 8.5 if len(names) <= NAMED_CLASSES else 6.5
            axes.set_xticks(ticks, labels=names, rotation=turn, parse_math=False, fontsize=size)
            axes.set_yticks(ticks, labels=names, parse_math=False, fontsize=size)
        if len(names) <= NAMED_CLASSES:
            for row, column in zip(*np.nonzero(confusion), strict=True):
                ink = "white" if depth[row, column] > 0.55 and right[row, column] else INK
                text = f"{confusion[row, column]:,}"
                axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=8)
        axes.set_xlabel("guess" if labelled else "guess (number of the class)")
        axes.set_ylabel("truth" if labelled else "truth (number of the class)")
        return as_svg(figure, "confusion matrix: truth by guess")


def short(name: str, limit: int = 18) -> str:
    """A class name on one line that fits an axis."""
    name = " ".join(name.split())
    return name if len(name) <= limit else name[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}"


def as_svg(figure: Figure, label: str) -> str:
    """The figure as an SVG element for an HTML page, which gives it its width."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)  # nothing refers to them, and several figures share the page
    width, height = (f"{72 * inches:g}" for inches in figure.get_size_inches())
    opening = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(label)}">'
    return opening + text[text.index(">", text.index("<svg")) + 1 :]


def thumbnail(image: NDArray[np.uint8], side: int = 112) -> str:
    """A uint8 [H, W, C] image as a data URI: small ones in whole multiples with hard pixels, large ones scaled down."""
    from PIL import Image

    pixels = image[:, :, :3] if image.shape[2] >= 3 else image[:, :, 0]
    picture = Image.fromarray(np.ascontiguousarray(pixels))
    longest = max(picture.size)
    if longest < side:
        times = side // longest
        picture = picture.resize((picture.width * times, picture.height * times), Image.Resampling.NEAREST)
    else:
        picture.thumbnail((side, side))
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
