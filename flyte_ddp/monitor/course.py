"""Charts of a champion's last windows: scores, and numbers of moved columns."""

from collections.abc import Callable, Sequence
from typing import Any

from flyte_ddp.core.text.formatting import name_measure
from flyte_ddp.monitor.window import Window
from flyte_ddp.report.figures import BLUE, MUTED, ORANGE, SIZE, draw_svg


def draw_window_history(windows: Sequence[Window]) -> list[tuple[str, str]]:
    """Return the title and the SVG element of each chart over the ``windows``, oldest first.

    The charts are the score, and the number of moved columns. Each chart needs at least two windows with a score, or
    with compared columns.
    """
    measured = [window for window in windows if window.score is not None]
    judged = [window for window in windows if window.columns]
    charts = []
    if len(measured) > 1:
        name = name_measure(measured[-1].measure)
        charts.append((name[:1].upper() + name[1:], draw_over_windows(lambda axes: plot_scores(axes, measured, name))))
    if len(judged) > 1:
        charts.append(("Columns that moved", draw_over_windows(lambda axes: plot_moved(axes, judged))))
    return charts


def draw_over_windows(plot: Callable[[Any], str]) -> str:
    """Return the SVG element of a chart whose x axis shows the numbers of the windows.

    ``plot(axes)`` draws on matplotlib's axes, and returns the label of the y axis.
    """
    from matplotlib.ticker import MaxNLocator

    def plot_over_numbers(axes: Any) -> str:
        label = plot(axes)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
        return label

    return draw_svg(
        plot_over_numbers, "number of the window", (0.125, 0.17, 0.855, 0.75), label_word="by", figsize=SIZE
    )


def plot_scores(axes: Any, windows: Sequence[Window], name: str) -> str:
    """Plot the windows' scores with intervals, and the held-out measure as a line. Return the label ``name``."""
    axes.axhline(windows[-1].held_out, color=MUTED, linestyle="--", label="held out")
    ranges = [(each.number, each.low, each.high) for each in windows if each.low is not None and each.high is not None]
    if ranges:
        axes.vlines(*zip(*ranges, strict=True), color=BLUE, alpha=0.45, linewidth=3, label="95 % interval")
    axes.plot([each.number for each in windows], [each.score for each in windows], "o-", color=BLUE)
    if worse := [(each.number, each.score) for each in windows if each.worse]:
        axes.plot(*zip(*worse, strict=True), "o", markersize=6, color=ORANGE, label="worse than held out")
    axes.legend(loc="best")
    return name


def plot_moved(axes: Any, windows: Sequence[Window]) -> str:
    """Plot a bar of each window's number of moved columns, and return the label of the y axis."""
    from matplotlib.ticker import MaxNLocator

    for alarm, color in ((False, BLUE), (True, ORANGE)):
        chosen = [(each.number, len(each.moved)) for each in windows if each.alarm == alarm]
        if chosen:
            axes.bar(*zip(*chosen, strict=True), color=color, label="alarm" if alarm else "no alarm")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_ylim(0, max(1, *(len(each.moved) for each in windows)) * 1.05)
    axes.legend(loc="best")
    return "columns"
