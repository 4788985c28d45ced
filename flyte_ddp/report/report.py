"""The report of a run, made from the run's folder: a self-contained HTML page, which is also the task's deck."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.checks.arrays import read_arrays
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.files import SIDECAR
from flyte_ddp.core.models.sidecar import read_sidecar
from flyte_ddp.core.runs.metrics import FunctionEnd, StepRecord, TrainingStart
from flyte_ddp.core.runs.run_folder import METRICS, PREDICTIONS
from flyte_ddp.core.text.formatting import format_measure, format_value, name_measure
from flyte_ddp.core.text.sections import Section, decode_sections
from flyte_ddp.report.figures import BLUE, GREEN, ORANGE, Picture, Series, draw_line_chart, make_section_views
from flyte_ddp.report.page import RunRecords, convert_backticks_to_html, render_template

PARTS = {  # of rank 0's time: name and colour
    "data": ("Data", "#8fb4f0"),
    "forward_backward": ("Forward and backward", BLUE),
    "communication": ("Communication", ORANGE),
    "evaluation": ("Evaluation", GREEN),
    "other": ("Other", "#a3adba"),
}
PREDICTIONS_BYTES = 2**32
SPLITS = {"validation": GREEN, "test": ORANGE}


@dataclass(frozen=True)
class LineChart:
    """A chart of lines, with the arguments of :func:`draw_line_chart`."""

    title: str
    lines: Sequence[Series]
    x_label: str
    y_label: str
    scale: str
    x_from: int | None


class Run:
    """The records and results in a training's folder so far. Records are in the order of steps."""

    def __init__(self, folder: Path, name: str = "") -> None:
        """Read the run's files. ``name`` is the run's name, by default the folder's name.

        Raises:
            UserError: ``metrics.jsonl`` cannot be read, is damaged or has no start record. The sidecar or
                ``predictions.npz`` exists, and is damaged.
        """
        records = RunRecords(folder)
        self.attempts, start, end = records.attempts, records.attempts[-1].start, records.end
        if not isinstance(start, TrainingStart) or isinstance(end, FunctionEnd):
            raise UserError(f"{folder / METRICS} is of a user-defined function; give the folder of a training")
        self.start, self.end = start, end  # of the last attempt
        self.name = name or folder.name
        self.train = [record for _, record in sorted(records.train.items())]
        self.evaluations = [record for _, record in sorted(records.evaluations.items())]
        # Whether "higher" or "lower" is better, by the objective's measures, the main measure first.
        self.measures = {"accuracy": "higher"} if start.measures is None else start.measures
        self.sidecar = read_sidecar(path) if (path := folder / SIDECAR).exists() else None
        self.sections: list[Section] = []  # the objective's sections about the test split
        self.pictures: dict[int, Picture] = {}  # by the number of the sample in the test split
        try:
            if (path := folder / PREDICTIONS).exists():
                self.sections, self.pictures = read_sections_and_pictures(path)
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise UserError(f"cannot read {path}: {error}; remove the file or train again") from error
        steps: list[StepRecord] = [*self.evaluations, *self.train]
        self.steps = max((record.step for record in steps), default=0)  # optimiser steps done
        times = [record.time or 0.0 for record in steps]
        # Seconds from the start of the last attempt to its end or last record; None without a record.
        self.seconds = max(0.0, max(times) - (max(times) if start.time is None else start.time)) if times else None
        if end is not None and end.seconds is not None:
            self.seconds = end.seconds.total
        epoch = self.sidecar.metrics.kept_epoch if self.sidecar else None
        kept = [record for record in self.evaluations if epoch in (None, record.epoch)] or self.evaluations
        # The evaluation of the returned weights: the last evaluation, unless the sidecar names another epoch.
        self.kept_evaluation = kept[-1] if kept else None


def read_sections_and_pictures(path: Path) -> tuple[list[Section], dict[int, Picture]]:
    """Read ``predictions.npz``: the sections of the report, and by number the samples that the sections show.

    If the sections show no samples, the second result is {}.

    Raises:
        ValueError, TypeError, LookupError, OSError: The file is damaged or cannot be read.
    """
    arrays = read_arrays(path, PREDICTIONS_BYTES)
    first = int(arrays["table_rows"])  # the rows before are for wandb's table
    sections = decode_sections(str(arrays["sections"]))
    if len(arrays["index"]) == first:
        return sections, {}
    columns = [arrays[key][first:] for key in ("index", "prediction", "truth", "score", "loss")]
    images = arrays["images"][first:] if "images" in arrays else [None] * len(columns[0])
    names = decode_sample_names(arrays)[first:]
    masks = [*zip(arrays["true_masks"], arrays["masks"], strict=True)] if "masks" in arrays else [()] * len(names)
    called = arrays["value_columns"].tolist() if "value_columns" in arrays else []
    values = [dict(zip(called, row, strict=True)) for row in arrays["values"].tolist()] if called else []
    pictures = {}
    beside = zip(names, masks, images, values or [{}] * len(names), strict=True)
    for (name, each, image, inputs), index, prediction, truth, score, loss in zip(beside, *columns, strict=True):
        facts = name or f"sample {index}", image, str(prediction), str(truth)
        # The loss is shown if the objective gives no score.
        shown = (None, float(loss)) if np.isnan(score) else (float(score), None)
        pictures[int(index)] = Picture(*facts, score=shown[0], loss=shown[1], masks=each, values=inputs)
    return sections, pictures


def decode_sample_names(predictions: Mapping[str, NDArray[Any]]) -> list[str]:
    """Return the names of the samples in the arrays of ``predictions.npz``. A missing name is "".

    Bytes that are not UTF-8 become U+FFFD.
    """
    if "names" not in predictions or not len(predictions["names"]):
        return [""] * len(predictions["index"])
    names = predictions["names"].tolist()
    return [name.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for name in names]


def render_report(run_folder: Path, name: str = "", failure: str = "") -> str:
    """Return the report of a training, which may still be running, as a self-contained HTML document.

    Reads the files of the run folder. ``name`` is the run's name, by default the folder's name. ``failure`` is the
    reason if the run has failed.

    Raises:
        UserError: ``metrics.jsonl`` has no start record, or a file is damaged.
    """
    run = Run(run_folder, name)
    recorded = run.end.seconds if run.end else None
    seconds = {key: max(0.0, getattr(recorded, key)) for key in PARTS} if recorded else {}
    total = sum(seconds.values())
    charts = [*make_line_charts(run)]
    return render_template(
        "report.html",
        run=run,
        failure=failure,
        charts=[
            (
                each.title,
                draw_line_chart(
                    each.lines, x_label=each.x_label, y_label=each.y_label, scale=each.scale, x_from=each.x_from
                ),
            )
            for each in charts
            if any(map(varies, each.lines))
        ],
        constants=[
            describe_constant_lines(each.title, each.lines) for each in charts if not any(map(varies, each.lines))
        ],
        tiles=[*list_measure_tiles(run)],
        sections=[*make_section_views(run.sections, run.pictures, run.start.classes)],
        time_spent=[(*PARTS[key], spent, spent / total) for key, spent in seconds.items()] if total else [],
        settings=make_hyperparameter_rows(run.start.hyperparameters),
    )


def list_measure_tiles(run: Run) -> Iterator[tuple[str, str, str]]:
    """Yield label, value and detail of each tile at the top of the report.

    A tile shows the loss. If the objective has measures, another tile shows the main measure. Both are of the test
    split.
    """
    kept = run.kept_evaluation
    tested, validated = (kept.test, kept.validation) if kept else ({}, {})
    tested = {**tested, **(run.end.test if run.end else {})}

    def format_test(measure: str) -> str:
        return format_measure(measure, tested[measure]) if measure in tested else "n/a"

    if run.measures:
        main, *others = run.measures
        detail = ", ".join(f"{name_measure(name)} {format_test(name)}" for name in others)
        if main == "accuracy" and (accuracy := tested.get("accuracy")) is not None and run.start.test_samples:
            correct = f"{accuracy * run.start.test_samples:,.0f} of {run.start.test_samples:,} correct"
            detail = f"{correct}, {detail}" if "auroc" in others else correct
        yield f"Test {name_measure(main)}", format_test(main), detail
    validation = format_measure("loss", validated["loss"]) if "loss" in validated else ""
    yield "Test loss", format_test("loss"), f"validation loss {validation}" if validation else ""


def make_line_charts(run: Run) -> Iterator[LineChart]:
    """Yield the report's line charts that have values: loss, measures, learning rate, gradient norm and speed."""
    lines = [make_chart_line("training", BLUE, ((record.step, record.loss) for record in run.train))]
    for split, color in SPLITS.items():
        points = ((record.step, getattr(record, split).get("loss")) for record in run.evaluations)
        lines.append(make_chart_line(split, color, points))
    yield from make_chart_if_any_line(
        "Loss", lines, x_label="optimiser step", y_label=run.start.loss_unit, scale="log", x_from=0
    )
    for measure, better in run.measures.items():
        name, factor = name_measure(measure), 100 if measure == "accuracy" else 1
        title = name[:1].upper() + name[1:]
        y_label = "correct predictions (%)" if measure == "accuracy" else f"{title}, {better} is better"
        lines = []
        for split, color in SPLITS.items():
            points = ((record.epoch, getattr(record, split).get(measure)) for record in run.evaluations)
            lines.append(make_chart_line(split, color, points, factor))
        yield from make_chart_if_any_line(title, lines, x_label="epoch", y_label=y_label)
    for title, y_label, key in (
        ("Learning rate", "learning rate", "learning_rate"),
        ("Gradient norm", "L2 norm of the gradient before clipping", "gradient_norm"),
        ("Training speed", "samples per second, all ranks", "samples_per_second"),
        ("Tokens per second", "tokens per second, all ranks", "tokens_per_second"),
    ):
        lines = [make_chart_line("", BLUE, ((record.step, getattr(record, key)) for record in run.train))]
        yield from make_chart_if_any_line(
            title, lines, x_label="optimiser step", y_label=y_label, scale="from 0", x_from=0
        )


def make_chart_line(label: str, color: str, points: Iterable[tuple[float, float | None]], factor: int = 1) -> Series:
    """Return a line through the points (x, y) whose y is not None. Each y is multiplied by ``factor``.

    The line may have no points.
    """
    defined = [(x, factor * y) for x, y in points if y is not None]
    return Series(label, [x for x, _ in defined], [y for _, y in defined], color)


def make_chart_if_any_line(
    title: str, lines: Sequence[Series], *, x_label: str, y_label: str, scale: str = "linear", x_from: int | None = None
) -> Iterator[LineChart]:
    """Yield a chart of the lines that have points, or nothing without such lines."""
    if kept := [line for line in lines if line.x]:
        yield LineChart(title, kept, x_label, y_label, scale, x_from)


def varies(line: Series) -> bool:
    return len({*line.y}) > 1


def describe_constant_lines(title: str, lines: Sequence[Series]) -> str:
    """Return the last value of each line as text, such as "accuracy 97.5 % (validation), 96.33 % (test)".

    Replaces a chart of constant lines. ``title`` is the title of the chart. Only values of the title "Accuracy" have a
    percent sign.
    """
    unit = "\N{NO-BREAK SPACE}%" if title == "Accuracy" else ""
    values = [f"{format_value(line.y[-1])}{unit}" + f" ({line.label})" * bool(line.label) for line in lines]
    return f"{title[:1].lower() + title[1:] if title[1:2].islower() else title} {', '.join(values)}"


def make_hyperparameter_rows(given: Mapping[str, Any]) -> dict[str, list[tuple[str, ...]]]:
    """Return table rows (name, value, default, meaning) of the hyperparameters in ``given``.

    If the value is not the default, the row is under ``changed``, else under ``others``. Value and default are JSON,
    and the meaning is safe HTML.
    """
    rows: dict[str, list[tuple[str, ...]]] = {"changed": [], "others": []}
    for field in dataclasses.fields(Hyperparameters):
        if field.name in given:
            value, default = given[field.name], field.default
            shown = (json.dumps(each, ensure_ascii=False, default=str) for each in (value, default))
            row = field.name, *shown, convert_backticks_to_html(field.metadata["doc"])
            rows["changed" if value != default else "others"].append(row)
    return rows
