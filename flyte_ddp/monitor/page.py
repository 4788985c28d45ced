"""The HTML page of a window with verdict, moved columns and the most unusual samples, and the window's CSV tables."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.objectives.table_columns import SHOWN_NUMBERS, format_page_cell
from flyte_ddp.core.text.formatting import format_number, format_p_value, join_first, name_measure
from flyte_ddp.monitor.compare import count_categories, has_categories, replace_nan_by_infinity
from flyte_ddp.monitor.course import draw_window_history
from flyte_ddp.monitor.watch import INPUT, ROW, WatchedModel
from flyte_ddp.monitor.window import Window
from flyte_ddp.predict.sample_columns import SampleColumns
from flyte_ddp.report.figures import BLUE, ORANGE, SIZE, Picture, draw_svg
from flyte_ddp.report.page import render_template, write_html

DRAWN = 8  # columns
BINS = 30
BARS = 10  # categories whose shares differ most
LEAST_P = 0.0001  # the least p-value on the page, because smaller numbers are of no use to a person
ENDS = 0.005, 0.995  # quantiles between which numbers are drawn


def write_window_page(window: Window, watched: WatchedModel, history: Sequence[Window], name: str, path: Path) -> Path:
    """Write the HTML page of a recorded window, replacing an existing file, and return the path.

    Args:
        window: The window, a result of :func:`record_window`.
        watched: The samples of the window and of the reference.
        history: The champion's last windows, oldest first.
        name: The model's name.
        path: The path of the page.
    """
    page = render_template(
        "window.html",
        name=name,
        window=window,
        measure=name_measure(window.measure),
        course=draw_window_history(history),
        rows=[
            (each.column, "\N{EN DASH}", "\N{EN DASH}", f"cannot be compared: {each.untested}")
            if each.untested
            else (
                each.column,
                format_number(each.effect, ".3f"),
                format_p_value(each.p, LEAST_P).removeprefix("= "),
                "yes" if each.moved else "",
            )
            for each in sorted(window.columns, key=lambda each: (-each.moved, bool(each.untested), -each.effect))
        ],
        charts=[
            (each.column + describe_new_categories(*sides), draw_distributions(each.column, *sides))
            for each in window.moved[:DRAWN]
            for sides in [(watched.reference[each.column], watched.columns[each.column])]
        ],
        pictures=[*list_unusual_samples(watched, [each.column for each in window.moved])],
    )
    return write_html(path, page)


def list_unusual_samples(watched: WatchedModel, moved: Sequence[str]) -> Iterator[Picture]:
    """Yield the pictures of the most unusual samples, each with up to SHOWN_NUMBERS (6) inputs.

    Inputs in the columns ``moved`` come first. Names of inputs lose the prefixes "row " and "input ", unless the rest
    is a number.
    """
    for _, picture in watched.unusual:
        values = {name: picture.values[name] for name in (*moved, *picture.values) if name in picture.values}
        shown = dict(islice(values.items(), SHOWN_NUMBERS))
        # Columns without names have numbers. A number alone would say nothing.
        rests = {name: name.removeprefix(ROW).removeprefix(INPUT) for name in shown}
        short = {name: name if rest.isdecimal() else rest for name, rest in rests.items()}
        yield replace(picture, values={short[name]: value for name, value in shown.items()})


def draw_distributions(name: str, reference: NDArray[Any], window: NDArray[Any]) -> str:
    """Return an SVG element with the distribution of a column in the reference and in the window."""

    def plot_shares(axes: Any) -> str:
        """Plot the shares of both sides, and return the label of the y axis."""
        if has_categories(reference):
            labels, counts = pool_new_categories(*count_categories(reference, window))
            shares = counts / counts.sum(1, keepdims=True)
            chosen = np.sort(np.argsort(-np.abs(shares[0] - shares[1]), kind="stable")[:BARS])
            shares, edges = shares[:, chosen], np.arange(len(chosen) + 1) - 0.5
            labels = [labels[place][:14] for place in chosen.tolist()]
            axes.set_xticks(range(len(chosen)), labels, rotation=30 if max(map(len, labels)) > 5 else 0)
        else:
            sides = [replace_nan_by_infinity(side).astype(np.float64) for side in (reference, window)]
            every = np.concatenate(sides)
            low, high = np.quantile(every[np.isfinite(every)], ENDS)
            # Bins of almost equal numbers must be wide enough for edges that differ.
            edges = low + np.linspace(0, max(high - low, 1e-12 * abs(high)) or 1, BINS + 1)
            sides = [side.clip(edges[0], edges[-1]) for side in sides]
            shares = np.stack([np.histogram(side, edges)[0] / len(side) for side in sides])
        for share, label, color in zip(shares, ("held out", "this window"), (BLUE, ORANGE), strict=True):
            axes.stairs(share, edges, fill=True, color=color, alpha=0.45, label=label)
        axes.legend(loc="best")
        return "share of samples"

    return draw_svg(plot_shares, name, (0.125, 0.17, 0.855, 0.75), label_word="by", figsize=SIZE)


def pool_new_categories(values: NDArray[Any], counts: NDArray[np.int64]) -> tuple[list[str], NDArray[np.int64]]:
    """Return the labels and the counts of a chart's bars. All values that the reference lacks share the bar "(new)".

    ``values`` [K] are categories, and ``counts`` [2, K] are their numbers in reference and window.
    """
    known = counts[0] > 0
    labels = [format_page_cell(value) for value in values[known].tolist()]
    if known.all():
        return labels, counts
    return [*labels, "(new)"], np.column_stack([counts[:, known], counts[:, ~known].sum(1)])


def describe_new_categories(reference: NDArray[Any], window: NDArray[Any]) -> str:
    """Return a text with the categories that the reference lacks, most frequent first, or "" without new categories.

    Also returns "" if the values are numbers without categories.
    """
    values, counts = count_categories(reference, window)
    order = np.argsort(-counts[1], kind="stable")
    new = [format_page_cell(value) for value in values[order][counts[0, order] == 0].tolist()]
    return f": new values {join_first(new)}" if new and has_categories(reference) else ""


def write_csv_table(path: Path, columns: SampleColumns, ids: Sequence[str] = ()) -> Path:
    """Write columns as CSV, replacing an existing file, and return the path.

    The first column is the samples' ids, unless ``ids`` is empty.
    """
    given: dict[str, Sequence[Any]] = {"id": ids} if ids else {}
    given |= {name: values.tolist() for name, values in columns.items()}
    # surrogateescape: file names that are not UTF-8 are written unchanged.
    with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([[*given], *zip(*given.values(), strict=True)])
    return path
