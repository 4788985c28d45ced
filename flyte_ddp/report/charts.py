"""The values with which the report's template shows an objective's sections: charts as SVG, numbers as texts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from flyte_ddp.report.figures import BLUE, MUTED, Picture, confusion_section, export_svg, use_report_style
from flyte_ddp.report.page import class_colors
from flyte_ddp.text.formatting import format_column
from flyte_ddp.text.sections import Chart, Confusions, Curve, Histogram, Pictures, Scatter, Section, Table

SIZE = 5.0, 3.4  # inches
PLACE = 0.125, 0.13, 0.855, 0.79  # of the axes: left, bottom, width and height, in parts of the figure


def draw_chart(section: Chart) -> str:
    """Draw a curve, points or a histogram; return the chart as an SVG element."""
    from matplotlib.figure import Figure

    with use_report_style():
        figure = Figure(figsize=SIZE)
        axes = figure.add_axes(PLACE)
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.set_xlabel(section.x_label)
        y_label = PLOTS[type(section)](axes, section)
        axes.set_title(y_label, loc="left", color=MUTED)
        return export_svg(figure, f"{y_label} against {section.x_label}")


def plot_curve(axes: Any, section: Curve) -> str:
    """Plot a line in the unit square, and one to compare it with; return what y is."""
    axes.plot((0, 1), section.chance, "-", color=MUTED, linewidth=0.8)
    axes.plot(np.array(section.x, dtype=float), np.array(section.y, dtype=float), "-", color=BLUE)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    return section.y_label


def plot_scatter(axes: Any, section: Scatter) -> str:
    """Plot points in equal scales, with the diagonal; return what y is."""
    x, y = np.array(section.x, dtype=float), np.array(section.y, dtype=float)
    values = np.concatenate([x, y])
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    room = 0.04 * (high - low) or 0.5
    limits = low - room, high + room
    axes.plot(limits, limits, "-", color=MUTED, linewidth=0.8)
    size, alpha = (4.5, 0.8) if len(x) <= 100 else (2.6, 0.35)  # of many points, the crowds are to be seen
    # As pixels: matplotlib gives each point its style and six decimals, most of the page.
    axes.plot(x, y, "o", color=BLUE, markersize=size, markeredgewidth=0, alpha=alpha, rasterized=True)
    axes.set_xlim(limits)
    axes.set_ylim(limits)
    return section.y_label


def plot_histogram(axes: Any, section: Histogram) -> str:
    from matplotlib.ticker import MaxNLocator

    edges = np.array(section.edges, dtype=float)
    axes.stairs(section.counts, edges, fill=True, color=BLUE, alpha=0.75)
    if edges[0] < 0 < edges[-1]:
        axes.axvline(0, color=MUTED, linewidth=0.8)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    return "samples"


PLOTS: dict[Any, Callable[[Any, Any], str]] = {Scatter: plot_scatter, Histogram: plot_histogram, Curve: plot_curve}


def list_section_values(
    sections: Sequence[Section], pictures: Mapping[int, Picture], classes: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the template's values of each section; charts in a row with one title are one section."""
    for _, grouped in groupby(sections, lambda each: each.title if isinstance(each, Chart) else id(each)):
        group = [*grouped]
        try:
            yield _describe_group(group, pictures, classes)
        except Exception as error:  # an own objective's numbers may be any; they must not cost a training that is done
            title = getattr(group[0], "title", "Confusions")
            yield {"title": title, "text": f"This section could not be drawn ({type(error).__name__}: {error})."}


def _describe_group(
    group: Sequence[Section], pictures: Mapping[int, Picture], classes: Sequence[str]
) -> dict[str, Any]:
    section = group[0]
    if isinstance(section, Confusions):
        counts = np.array(section.counts, dtype=np.int64).reshape(-1, 3)
        return {"confusion": confusion_section(counts, section.classes), "classes": len(section.classes)}
    values: dict[str, Any] = {"title": section.title, "text": section.text}
    if isinstance(section, Pictures):
        values["pictures"] = [pictures[sample] for sample in section.samples if sample in pictures]
        if any(picture.masks for picture in values["pictures"]):
            values["legend"] = [*zip(classes, class_colors(len(classes)), strict=True)]
    elif isinstance(section, Table):
        columns = [*zip(*section.rows, strict=True)]
        texts = [any(isinstance(cell, str) for cell in column) for column in columns]
        values |= {"header": section.header, "numeric": [place for place, text in enumerate(texts) if not text]}
        values["rows"] = [*zip(*map(format_column, columns), strict=True)]
    else:
        values["charts"] = [(each.name, draw_chart(each)) for each in group if isinstance(each, Chart)]
    return values
