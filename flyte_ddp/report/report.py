"""The report of a run, from the files of its folder: one HTML page that needs no other file; also the task's deck."""

import dataclasses
import html
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UserError
from flyte_ddp.json_lines import read_records
from flyte_ddp.report.figures import BLUE, GREEN, ORANGE, Picture, Series, confusion_section, draw_line_chart
from flyte_ddp.report.page import render_template, write_html

Record = dict[str, Any]
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


class Run:
    """What the files of a run folder say so far; records are in the order of their steps."""

    def __init__(self, folder: Path, name: str = "") -> None:
        """Read ``metrics.jsonl`` and, where they exist, ``model.json`` and ``predictions.npz`` whole.

        ``name`` is the run's; by default the folder's name. Raises UserError if a file is damaged, or there is no start
        record.
        """
        self.name = name or folder.name
        self.starts: list[Record] = []  # of all attempts, oldest first
        self.end: Record = {}  # empty: the last attempt has not finished
        by_step: dict[str, dict[int, Record]] = {"train": {}, "evaluation": {}}
        for record in read_records(folder / "metrics.jsonl"):
            kind = record.get("kind")
            if kind == "start":
                self.starts.append(record)
                self.end = {}
            elif kind == "end":
                self.end = record
            elif kind in by_step:
                # A retry appends to the same file: its record of a step replaces that of the attempt before.
                by_step[kind][record["step"]] = record
        if not self.starts:
            raise UserError(
                f"{folder / 'metrics.jsonl'} has no start record: give the folder of a run that began training"
            )
        self.start = self.starts[-1]  # of the last attempt
        self.train, self.evaluations = ([of[step] for step in sorted(of)] for of in by_step.values())
        self.classes = [str(each) for each in self.start.get("classes", [])]  # in the order of the labels
        self.sidecar: Record = {}  # empty: there is no model.json yet
        self.confusion: NDArray[np.int64] | None = None  # [K, 3] truth, prediction and number of samples
        self.mistakes: list[Picture] = []  # largest loss first
        try:
            if (path := folder / "model.json").exists():
                self.sidecar = dict(json.loads(path.read_bytes()))
            if (path := folder / "predictions.npz").exists():
                self.confusion, self.mistakes = read_predictions(path, self.classes)
        except (OSError, ValueError, TypeError, LookupError, EOFError, zipfile.BadZipFile) as error:
            raise UserError(f"cannot read {path}: {error}; remove it or train again") from error
        # Of the last step its evaluation, if there is one; empty before any.
        last: Record = max((*self.evaluations, *self.train), key=lambda record: int(record["step"]), default={})
        self.last_record = self.end or last
        self.steps = int(last.get("step", 0))  # optimiser steps done
        time = max((record.get("time", 0.0) for record in (*self.train, *self.evaluations)), default=None)
        # From the start of the last attempt to its end or last record; None without any.
        self.seconds = None if time is None else max(0.0, time - self.start.get("time", time))
        if "seconds" in self.end:
            self.seconds = float(self.end["seconds"]["total"])
        epoch = self.sidecar.get("metrics", {}).get("kept_epoch")
        kept = [record for record in self.evaluations if epoch in (None, record["epoch"])] or self.evaluations
        # Of the returned weights: the last one, unless the sidecar names another epoch.
        self.kept_evaluation: Record = kept[-1] if kept else {}


def read_predictions(path: Path, classes: list[str]) -> tuple[NDArray[np.int64], list[Picture]]:
    """Read ``predictions.npz``; return the counts of confusions [K, 3], and the mistakes with images, worst first.

    Leaves out the samples of wandb's table. A damaged file raises OSError, ValueError, LookupError or zipfile's errors.
    """
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        first = int(arrays["table_rows"])  # the rows before are those of wandb's table
        columns = [arrays[key][first:] for key in ("images", "index", "truth", "scores")]
        names, confusion = sample_names(arrays)[first:], arrays["confusion_counts"]
    mistakes = []
    for name, image, index, truth, scores in zip(names, *columns, strict=True):
        prediction = scores.argmax()
        if prediction != truth:
            called = name or f"sample {index}"
            mistakes.append(Picture(called, image, classes[prediction], classes[truth], float(scores[prediction])))
    return confusion, mistakes


def sample_names(predictions: Mapping[str, NDArray[Any]]) -> list[str]:
    """Return the names of the samples in ``predictions.npz``; "" if unnamed. Bytes that are not UTF-8 become U+FFFD."""
    if "names" not in predictions or not len(predictions["names"]):
        return [""] * len(predictions["index"])
    names = predictions["names"].tolist()
    return [name.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for name in names]


def write_report(run_folder: Path, name: str = "") -> Path:
    """Read a run folder, write its report to ``report.html`` in it, and return the path. Imports matplotlib.

    ``name`` is the run's; by default the folder's name. Raises UserError if a file is missing, damaged or unwritable.
    """
    return write_html(run_folder / "report.html", render_report(run_folder, name))


def render_report(run_folder: Path, name: str = "", failure: str = "") -> str:
    """Read the folder of a run that may still be training; return its report as an HTML document without other files.

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
