"""Values for the report's template: sections, and charts and confusion matrices as SVG."""

import html
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.text.formatting import format_column, format_percent, format_setting
from flyte_ddp.core.text.sections import Chart, Confusions, Curve, Histogram, Pictures, Scatter, Section, Table
from flyte_ddp.report.page import TEMPLATES, choose_class_colors, encode_png_data_uri, render_template

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, MUTED = "#2457c5", "#d9660f", "#1b8a5a", "#5d6878"
LARGEST = 1e250  # charts skip larger values, because matplotlib cannot draw a range beyond all floats
MAX_POINTS = 300  # of a line; for longer lines, means and ranges of neighbouring points are drawn
NAMED_CLASSES = 20  # most classes of a confusion matrix with numbers in cells
LABELLED_CLASSES = 50  # most classes of a confusion matrix with names
PICTURED_CLASSES = 1000  # with more, a cell of the picture would be less than half a pixel wide on the page
LISTED, LISTED_ALONE = 8, 25  # rows of a list beside the picture, and without one
FEW_POINTS = 12  # most points of a curve with marks
FILLED_CLASSES = 4  # most classes of a confusion matrix with zeros in empty cells
SIZE = 5.0, 3.4  # of a section's chart, in inches
PLACE = 0.125, 0.13, 0.855, 0.79  # of its axes
WIDE = 2 * SIZE[0], SIZE[1]  # of a chart over the whole page
SCALE = 1.6  # pixels of the page in a unit of a confusion matrix, whatever the number of its classes
LEAST_SPAN = 0.01  # of an axis, as a share of the largest value: noise must not look like a trend


@dataclass(frozen=True)
class Series:
    """A line of a chart."""

    label: str  # in the legend; empty: no legend
    x: Sequence[float]  # increasing
    y: Sequence[float]
    color: str


@dataclass(frozen=True)
class Picture:
    """An image or another sample, and facts about it."""

    name: str
    image: NDArray[np.uint8] | None  # [H, W, C]; None if the sample is no image
    prediction: str = ""
    truth: str = ""
    score: float | None = None  # the probability that the model gave to its prediction
    loss: float | None = None
    masks: Sequence[NDArray[Any]] = ()  # [H, W] each: the true classes of its pixels, if known, and the predicted ones
    values: Mapping[str, str] = field(default_factory=dict)  # of some inputs, by the column's name


def draw_svg(
    plot: Callable[[Any], str], x_label: str, place: tuple[float, ...], *, label_word: str, **options: Any
) -> str:
    """Draw with ``plot(axes)`` in the report's style, and return an SVG element.

    ``plot`` returns the label of the y axis. ``place`` is left, bottom, width and height of the axes, as parts of the
    figure. A description for screen readers joins both labels by ``label_word``. ``options`` are arguments of
    matplotlib's Figure.
    """
    from matplotlib import style  # imported late, because the import takes a second
    from matplotlib.figure import Figure

    with style.context(TEMPLATES / "report.mplstyle", after_reset=True):  # whatever the user's settings are
        figure: Any = Figure(**options)
        axes = figure.add_axes(place)
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_major_formatter("{x:,g}")
        y_label = plot(axes)
        axes.set_xlabel(x_label)
        axes.set_title(y_label, loc="left", color=MUTED)  # reads better than a label on its side
        return convert_figure_to_svg(figure, f"{y_label} {label_word} {x_label}")


def draw_line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    scale: str = "linear",
    x_from: float | None = None,
    wide: bool = False,
) -> str:
    """Return an SVG element with a line for each of ``series``. Each line needs at least one point.

    Lines of more than MAX_POINTS (300) points are drawn as means and ranges of neighbouring points.

    Args:
        series: The lines.
        x_label: The label of the x axis.
        y_label: The label of the y axis.
        scale: "linear", "log" or "from 0". A logarithmic scale is used only for positive values, the largest more than
            5 times the smallest.
        x_from: The left end of the x axis.
        wide: Whether the chart is as wide as the page, with the legend beside the lines.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    values = np.concatenate([np.asarray(line.y, dtype=float) for line in series])
    values = values[np.abs(values) < LARGEST]

    def plot_lines(axes: Any) -> str:
        """Plot the lines, set the scales, and return the label of the y axis."""
        for line in series:
            x, y = np.asarray(line.x, dtype=float), np.asarray(line.y, dtype=float)
            y = np.where(np.abs(y) < LARGEST, y, np.nan)
            if len(x) > MAX_POINTS:
                starts = np.linspace(0, len(x), MAX_POINTS, endpoint=False).astype(np.int64)
                counts = np.diff(np.append(starts, len(x)))
                low, high = np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)
                x, y = (np.add.reduceat(each, starts) / counts for each in (x, y))
                axes.fill_between(x, low, high, color=line.color, alpha=0.18, linewidth=0)
            axes.plot(x, y, "o-" if len(x) <= 40 else "-", color=line.color, label=line.label)
        if len({x for line in series for x in line.x}) == 1:
            axes.set_xlim(series[0].x[0] - 1, series[0].x[0] + 1)
        if x_from is not None:
            axes.set_xlim(left=x_from)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        if any(line.label for line in series):
            axes.legend(**({"loc": "upper left", "bbox_to_anchor": (1, 1)} if wide else {"loc": "best"}))
        if scale == "from 0":
            axes.set_ylim(0, 1.08 * max(1e-12, float(values.max(initial=0.0))))
        elif values.size and values.max() - values.min() < (least := LEAST_SPAN * float(np.abs(values).max())):
            axes.set_ylim(*((values.max() + values.min()) / 2 + least * np.array([-0.55, 0.55])))
        # A logarithmic scale is for positive values, the largest more than 5 times the smallest.
        if scale != "log" or not values.size or not values.max() > 5 * values.min() > 1 / LARGEST:
            return y_label
        axes.set_yscale("log")
        is_large = values.max() > 1000 * values.min()
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if is_large else (1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:,g}")
        return f"{y_label}, logarithmic"

    place = (0.0625, 0.13, 0.77, 0.79) if wide else (0.125, 0.16, 0.855, 0.74)
    return draw_svg(plot_lines, x_label, place, label_word="over", **({"figsize": WIDE} if wide else {}))


def draw_parallel_coordinates(names: Sequence[str], rows: Sequence[Sequence[Any]], colors: Sequence[str]) -> str:
    """Return an SVG element with a line for each row, through the ranks of the row's values in each column.

    ``names`` are the names of the columns. ``colors`` has the colour of each row. The first rows are drawn in front. At
    least one row is needed.
    """
    places, labels = [], []
    for name, *column in zip(names, *rows, strict=True):
        numeric = all(type(each) in (int, float) for each in column)
        values, ranks = np.unique(column if numeric else [*map(str, column)], return_inverse=True)
        places.append(ranks / max(1, len(values) - 1))
        labels.append(f"{name}\n{' to '.join(format_setting(values[at].item()) for at in (0, -1))}")

    def plot_rows(axes: Any) -> str:
        """Plot a line for each row, the first row in front, and return the label of the y axis."""
        for row, line in reversed([*enumerate(np.transpose(places))]):
            axes.plot(line, "o-", color=colors[row], linewidth=1.1)
        axes.set_xticks(range(len(labels)), labels)
        axes.set_yticks([])
        return "lowest to highest"

    return draw_svg(plot_rows, "", (0.08, 0.16, 0.86, 0.74), label_word="by", figsize=WIDE)


def convert_figure_to_svg(figure: "Figure", label: str) -> str:
    """Return a matplotlib figure as an SVG element without a width. ``label`` is its text for screen readers."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", dpi=200, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    # The page sets the width. Nothing refers to the groups' ids, which several figures on a page would repeat.
    drawn = re.sub(r'<g id="[^"]*">', "<g>", buffer.getvalue())
    body, view = drawn[drawn.index(">", drawn.index("<svg")) + 1 :], re.search('viewBox="[^"]*"', drawn)
    return f'<svg {view and view[0]} role="img" aria-label="{html.escape(label)}">{body}'


def draw_confusion_heatmap(confusion: NDArray[np.int64], classes: Sequence[str]) -> str:
    """Return a confusion matrix as an SVG element, with truth in rows and prediction in columns.

    Correct predictions are blue, and mistakes are orange. A cell is darker if it has a larger share of the row. The
    mistake with the largest share has the darkest orange, even if mistakes are rare.

    Args:
        confusion: The number of samples of each truth and prediction, [classes, classes].
        classes: The names of the classes.
    """
    from PIL import Image

    count = len(classes)
    labelled = count <= LABELLED_CLASSES
    step = 10 ** (len(str(count // 2)) - 1)
    numbers = [str(k) if k % step == 0 else "" for k in range(count)]
    lines = [" ".join(name.split()) for name in classes]
    shortened = [line if len(line) <= 18 else line[:17] + "\N{HORIZONTAL ELLIPSIS}" for line in lines]
    names = shortened if labelled else numbers
    shares = confusion / np.maximum(1, confusion.sum(axis=1, keepdims=True))
    correct = np.eye(count, dtype=bool)
    wrong_depth = np.sqrt(shares / max(1e-12, float(shares[~correct].max(initial=0.0))))
    depth = np.where(correct, shares, np.minimum(1.0, wrong_depth))
    channels = [  # one at a time, because there may be thousands of classes
        np.rint(255 * (1.0 - depth * (1.0 - np.where(correct, blue, orange)))).astype(np.uint8)
        for blue, orange in zip((0.14, 0.34, 0.77), (0.90, 0.45, 0.10), strict=True)
    ]
    size, body = 8.5 if count <= NAMED_CLASSES else 6.5, min(460, max(130, 32 * count))
    longest = 0.62 * size * max(map(len, names))
    turned = labelled and longest > 0.9 * body / count
    shown = np.ones_like(confusion) if count <= FILLED_CLASSES else confusion * (count <= NAMED_CLASSES)
    cells = zip(*np.nonzero(shown), strict=True)  # numbers, white on dark cells
    return render_template(
        "confusion.svg",
        image=encode_png_data_uri(Image.fromarray(np.stack(channels, axis=2))),
        names=names,
        cells=[(*cell, confusion[cell], correct[cell] and depth[cell] > 0.55) for cell in cells],
        unit="" if labelled else " (number of the class)",
        turned=turned,
        size=size,  # in points, as the next three
        margin=22 + round(longest),
        below=(22 + round(longest)) if turned else 34,
        body=body,
        scale=SCALE,
    )


@dataclass(frozen=True)
class ConfusionView:
    """A confusion matrix for the templates."""

    picture: str  # as SVG; empty for more than PICTURED_CLASSES (1,000) classes
    is_large: bool
    mistakes: Sequence[tuple[str, ...]]  # the most frequent mistakes: truth, prediction, samples, share of the class
    hardest: Sequence[tuple[str, ...]]  # the classes of lowest recall: name, recall, samples


@dataclass(frozen=True)
class SectionView:
    """A section of a page for the templates: a text with charts, a table, pictures, or confusions."""

    title: str = ""
    text: str = ""
    charts: Sequence[tuple[str, str]] = ()  # name and SVG
    header: Sequence[str] = ()  # of a table
    rows: Sequence[tuple[str, ...]] = ()
    numeric: Sequence[int] = ()  # the places of columns of numbers
    pictures: Sequence[Picture] = ()
    legend: Sequence[tuple[str, str]] = ()  # name and colour of each class, for masks
    confusion: ConfusionView | None = None
    classes: int = 0  # of the confusions


def make_confusion_view(counts: NDArray[np.int64], names: Sequence[str]) -> ConfusionView | None:
    """Return a confusion matrix, as the templates show it, or None if ``counts`` is empty.

    A row of ``counts`` [K, 3] is truth, prediction and number of samples. ``names`` are the names of the classes.
    """
    if not len(counts):
        return None
    classes, pictured = len(names), len(names) <= PICTURED_CLASSES
    listed = LISTED if pictured else LISTED_ALONE
    is_right = counts[:, 0] == counts[:, 1]
    wrong, right = counts[~is_right], counts[is_right]
    totals, correct = (np.bincount(rows[:, 0], rows[:, 2], classes).astype(np.int64) for rows in (counts, right))
    recall = correct / np.maximum(1, totals)
    hardest = np.argsort(np.where(totals, recall, 2.0), kind="stable")[:listed].tolist()
    picture = ""
    if pictured:
        matrix = np.zeros((classes, classes), dtype=np.int64)
        matrix[counts[:, 0], counts[:, 1]] = counts[:, 2]
        picture = draw_confusion_heatmap(matrix, names)
    return ConfusionView(
        picture=picture,
        is_large=classes > NAMED_CLASSES,
        mistakes=[
            (names[truth], names[prediction], f"{samples:,}", format_percent(samples / totals[truth]))
            for truth, prediction, samples in wrong[np.argsort(-wrong[:, 2], kind="stable")[:listed]].tolist()
        ],
        hardest=[(names[k], format_percent(recall[k]), f"{totals[k]:,}") for k in hardest if totals[k]],
    )


def plot_curve(axes: Any, section: Curve, color: str = BLUE, label: str = "") -> str:
    """Plot a curve in the unit square with the line of chance, and return the label of the y axis.

    ``label`` is the curve's name in a legend. The caller draws the legend.
    """
    axes.plot((0, 1), section.chance, "-", color=MUTED, linewidth=0.8)
    line = "o-" if len(section.x) <= FEW_POINTS else "-"
    axes.plot(np.array(section.x, dtype=float), np.array(section.y, dtype=float), line, color=color, label=label)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    return section.y_label


def plot_scatter(axes: Any, section: Scatter) -> str:
    """Plot points with the diagonal, in equal scales, and return the label of the y axis."""
    x, y = np.array(section.x, dtype=float), np.array(section.y, dtype=float)
    values = np.concatenate([x, y])
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    room = 0.04 * (high - low) or 0.5
    limits = low - room, high + room
    axes.plot(limits, limits, "-", color=MUTED, linewidth=0.8)
    size, alpha = (4.5, 0.8) if len(x) <= 100 else (2.6, 0.35)  # among many points, dense regions must be visible
    # As pixels, because points with style and six decimals would make up most of the page.
    axes.plot(x, y, "o", color=BLUE, markersize=size, markeredgewidth=0, alpha=alpha, rasterized=True)
    axes.set_xlim(limits)
    axes.set_ylim(limits)
    return section.y_label


def plot_histogram(axes: Any, section: Histogram) -> str:
    """Plot counts between edges, and return the label of the y axis ("samples"). If 0 is inside, a line is at 0."""
    from matplotlib.ticker import MaxNLocator

    edges = np.array(section.edges, dtype=float)
    axes.stairs(section.counts, edges, fill=True, color=BLUE, alpha=0.75)
    if edges[0] < 0 < edges[-1]:
        axes.axvline(0, color=MUTED, linewidth=0.8)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    return "samples"


PLOTS: dict[Any, Callable[[Any, Any], str]] = {Scatter: plot_scatter, Histogram: plot_histogram, Curve: plot_curve}


def draw_chart(section: Chart) -> str:
    plot = PLOTS[type(section)]
    return draw_svg(lambda axes: plot(axes, section), section.x_label, PLACE, label_word="against", figsize=SIZE)


def draw_two_curves(curves: Mapping[str, Curve]) -> str:
    """Return an SVG element with the first two ``curves``, by name, and a legend. The curves have the same axes."""

    def plot_curves(axes: Any) -> str:
        """Plot the first two curves with a legend, and return the label of the y axis."""
        for (name, curve), color in zip(curves.items(), (BLUE, ORANGE), strict=False):
            plot_curve(axes, curve, color, name)
        axes.legend(loc="best")
        return curve.y_label

    x_label = next(iter(curves.values())).x_label
    return draw_svg(plot_curves, x_label, PLACE, label_word="against", figsize=SIZE)


def make_section_views(
    sections: Sequence[Section], pictures: Mapping[int, Picture], classes: Sequence[str]
) -> Iterator[SectionView]:
    """Yield each section of a report as the template shows it. Charts are drawn as SVG.

    Neighbouring charts with the same title become a single section. If a section cannot be drawn, its text is the
    error.

    Args:
        sections: The sections of the objective, in order.
        pictures: The samples that sections may show, by number. Other samples are skipped.
        classes: The names of the classes, for the legend of masks.
    """
    for _, grouped in groupby(sections, lambda each: each.title if isinstance(each, Chart) else id(each)):
        group = [*grouped]
        try:
            yield _make_group_view(group, pictures, classes)
        except Exception as error:  # a user-defined objective must not fail a finished training
            title = getattr(group[0], "title", "Confusions")
            yield SectionView(title, f"This section could not be drawn ({type(error).__name__}: {error}).")


def _make_group_view(group: Sequence[Section], pictures: Mapping[int, Picture], classes: Sequence[str]) -> SectionView:
    """Return a section, or several charts with the same title, as the template shows them."""
    section = group[0]
    if isinstance(section, Confusions):
        counts = np.array(section.counts, dtype=np.int64).reshape(-1, 3)
        return SectionView(confusion=make_confusion_view(counts, section.classes), classes=len(section.classes))
    title, text = section.title, section.text
    if isinstance(section, Pictures):
        shown = [pictures[sample] for sample in section.samples if sample in pictures]
        masked = any(picture.masks for picture in shown)
        legend = [*zip(classes, choose_class_colors(len(classes)), strict=True)] if masked else []
        return SectionView(title, text, pictures=shown, legend=legend)
    if isinstance(section, Table):
        columns = [*zip(*section.rows, strict=True)]
        numeric = [at for at, column in enumerate(columns) if not any(isinstance(cell, str) for cell in column)]
        rows = [*zip(*map(format_column, columns), strict=True)]
        return SectionView(title, text, header=section.header, rows=rows, numeric=numeric)
    return SectionView(title, text, [(each.name, draw_chart(each)) for each in group if isinstance(each, Chart)])
