"""The report's charts of an objective's sections, as SVG; matplotlib is imported when it is first used."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from flyte_ddp.report.figures import BLUE, MUTED, export_svg, use_report_style
from flyte_ddp.text.sections import Curve, Histogram, Scatter

SIZE = 5.0, 3.4  # inches
POINT = re.compile(r'<use xlink:href="[^"]*" x="(\d+\.?\d?)\d*" y="(\d+\.?\d?)\d*" style="[^"]*fill-opacity[^"]*"/>\s*')
PLACE = 0.125, 0.13, 0.855, 0.79  # of the axes: left, bottom, width and height, in parts of the figure


def draw_curve(section: Curve) -> str:
    """Draw a line in the unit square, and one to compare it with; return the chart as an SVG element."""
    from matplotlib.figure import Figure

    with use_report_style():
        figure = Figure(figsize=SIZE)
        axes = figure.add_axes(PLACE)
        axes.plot((0, 1), section.chance, "-", color=MUTED, linewidth=0.8)
        axes.plot(np.array(section.x, dtype=float), np.array(section.y, dtype=float), "-", color=BLUE)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.02)
        axes.set_xlabel(section.x_label)
        axes.set_title(section.y_label, loc="left", color=MUTED)
        return export_svg(figure, f"{section.y_label} against {section.x_label}")


def draw_scatter(section: Scatter) -> str:
    """Draw points in equal scales, with the diagonal; return the chart as an SVG element."""
    from matplotlib.figure import Figure

    x, y = np.array(section.x, dtype=float), np.array(section.y, dtype=float)
    values = np.concatenate([x, y])
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    room = 0.04 * (high - low) or 0.5
    limits = low - room, high + room
    with use_report_style():
        figure = Figure(figsize=SIZE)
        axes = figure.add_axes(PLACE)
        axes.plot(limits, limits, "-", color=MUTED, linewidth=0.8)
        size, alpha = (4.5, 0.8) if len(x) <= 100 else (2.6, 0.35)  # of many points, the crowds are to be seen
        axes.plot(x, y, "o", color=BLUE, markersize=size, markeredgewidth=0, alpha=alpha)
        axes.set_xlim(limits)
        axes.set_ylim(limits)
        axes.set_xlabel(section.x_label)
        axes.set_title(section.y_label, loc="left", color=MUTED)
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_major_formatter("{x:,g}")
        drawn = export_svg(figure, f"{section.y_label} against {section.x_label}")
    # matplotlib gives each point its style and six decimals, three quarters of the page: their group has the style.
    drawn = POINT.sub(rf'<circle cx="\1" cy="\2" r="{size / 2}"/>', drawn)
    return re.sub(r'(<g clip-path="[^"]*")(>\s*<circle)', rf'\1 fill="{BLUE}" fill-opacity="{alpha}"\2', drawn)


def draw_histogram(section: Histogram) -> str:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    edges = np.array(section.edges, dtype=float)
    with use_report_style():
        figure = Figure(figsize=SIZE)
        axes = figure.add_axes(PLACE)
        axes.stairs(section.counts, edges, fill=True, color=BLUE, alpha=0.75)
        if edges[0] < 0 < edges[-1]:
            axes.axvline(0, color=MUTED, linewidth=0.8)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.set_xlabel(section.x_label)
        axes.set_title("samples", loc="left", color=MUTED)
        return export_svg(figure, f"histogram of {section.x_label}")


DRAWINGS: dict[Any, Callable[[Any], str]] = {Scatter: draw_scatter, Histogram: draw_histogram, Curve: draw_curve}
