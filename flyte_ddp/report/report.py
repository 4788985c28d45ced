"""The report of a run: one HTML page that needs no other file; it is also the deck of the task."""

import dataclasses
import html
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flyte_ddp.config import Hyperparameters
from flyte_ddp.report.figures import BLUE, GREEN, ORANGE, Series, confusion_section, draw_line_chart
from flyte_ddp.report.page import render_template, write_html
from flyte_ddp.report.run_records import Record, Run

PARTS = {  # of rank 0's time: name and colour
    "data": ("Data", "#8fb4f0"),
    "forward_backward": ("Forward and backward", BLUE),
    "communication": ("Communication", ORANGE),
    "evaluation": ("Evaluation", GREEN),
    "other": ("Other", "#a3adba"),
}
CHARTS: tuple[Any, ...] = (  # title, x, label and scale of y, and the lines: label, colour, kind of record, value
    (
        *("Loss", "step", "cross-entropy (nats)", "log"),
        ("training", BLUE, "train", "loss"),
        ("validation", GREEN, "evaluations", "validation_loss"),
        ("test", ORANGE, "evaluations", "test_loss"),
    ),
    (
        *("Accuracy", "epoch", "correct predictions (%)", "linear"),
        ("validation", GREEN, "evaluations", "validation_accuracy"),
        ("test", ORANGE, "evaluations", "test_accuracy"),
    ),
    ("Learning rate", "step", "learning rate", "from 0", ("", BLUE, "train", "learning_rate")),
    ("Training speed", "step", "samples per second, all ranks", "from 0", ("", BLUE, "train", "samples_per_second")),
)


def write_report(run_folder: Path, name: str = "") -> Path:
    """Read a run folder, write its report to ``report.html`` in it, and return the path. Imports matplotlib.

    ``name`` is the run's; by default the folder's name. Raises UserError if a file is missing, damaged or unwritable.
    """
    return write_html(run_folder / "report.html", render_report(run_folder, name))


def render_report(run_folder: Path, name: str = "", failure: str = "") -> str:
    """Read the folder of a run that may still be training; return its report as HTML, which may be put into a page.

    ``name`` is the run's; by default the folder's name. ``failure`` is why the run has failed, if it has. Imports
    matplotlib. Raises UserError if ``metrics.jsonl`` has no record of a start, or a file is damaged.
    """
    run = Run(run_folder, name)
    seconds = {key: max(0.0, run.end.get("seconds", {}).get(key, 0.0)) for key in PARTS}
    total = sum(seconds.values())
    return render_template(
        "report.html",
        run=run,
        failure=failure,
        result={**run.kept_evaluation, **run.end},
        charts=[*draw_charts(run)],
        confusion={} if run.confusion is None else confusion_section(run.confusion, run.classes),
        time_spent=[(*PARTS[key], spent, spent / total) for key, spent in seconds.items()] if total else [],
        settings=hyperparameter_rows(run.start.get("hyperparameters", {})),
        last_record=json.dumps(run.last_record),
    )


def parse_last_record(page: str) -> Record | None:
    """Return the last record of metrics in a report's HTML: empty if it had none yet; None if the page is no report."""
    found = re.search('<data class="ddp-last-record" value="([^"]*)"', page)
    return None if found is None else json.loads(html.unescape(found[1]))


def draw_charts(run: Run) -> Iterator[tuple[str, str]]:
    """Draw the charts of losses, accuracies, learning rate and speed; yield title and SVG of each that has values."""
    for title, kind_of_x, y_label, scale, *lines in CHARTS:
        drawn = []
        for label, color, kind, key in lines:
            unit = 100 if key.endswith("accuracy") else 1
            records = [record for record in getattr(run, kind) if key in record]
            x, y = [record[kind_of_x] for record in records], [unit * record[key] for record in records]
            drawn += [Series(label, x, y, color)] if records else []
        if drawn:
            x_label, x_from = ("epoch", None) if kind_of_x == "epoch" else ("optimiser step", 0)
            yield title, draw_line_chart(drawn, x_label=x_label, y_label=y_label, scale=scale, x_from=x_from)


def hyperparameter_rows(given: Mapping[str, Any]) -> dict[str, list[tuple[str, ...]]]:
    """Return rows (name, value, default, meaning) of the given hyperparameters, by keys ``changed`` and ``others``."""
    rows: dict[str, list[tuple[str, ...]]] = {"changed": [], "others": []}
    for field in dataclasses.fields(Hyperparameters):
        if field.name in given:
            value, default = given[field.name], field.default
            shown = (json.dumps(each, ensure_ascii=False, default=str) for each in (value, default))
            rows["changed" if value != default else "others"].append((field.name, *shown, field.metadata["doc"]))
    return rows
