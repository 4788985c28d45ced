"""The report of a run, made from the run's folder: a self-contained HTML page, which is also the task's deck."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.checks.arrays import read_arrays
from flyte_ddp.checks.forms import COUNT, require_form
from flyte_ddp.checks.parsing import parse_json
from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UserError
from flyte_ddp.files import SIDECAR
from flyte_ddp.report.figures import BLUE, GREEN, ORANGE, Picture, Series, draw_line_chart, list_section_values
from flyte_ddp.report.page import Record, RunRecords, mark_code, render_template
from flyte_ddp.runs.run_folder import METRICS
from flyte_ddp.text.formatting import format_measure, format_value, name_measure
from flyte_ddp.text.sections import Section, decode_sections

PARTS = {  # of rank 0's time: name and colour
    "data": ("Data", "#8fb4f0"),
    "forward_backward": ("Forward and backward", BLUE),
    "communication": ("Communication", ORANGE),
    "evaluation": ("Evaluation", GREEN),
    "other": ("Other", "#a3adba"),
}
PREDICTIONS_BYTES = 2**32
NUMBER = (float, None)
TRAINED = ("epoch", "loss", "learning_rate", "gradient_norm", "samples_per_second", "tokens_per_second")
FACTS = {  # of a start record that the page shows
    **dict.fromkeys(["steps", "parameters", "num_ranks", "num_nodes", "threads_per_rank"], COUNT),
    **dict.fromkeys(["device", "backend", "strategy", "precision"], str),
    "hyperparameters": {"model": str, "dataset": str},
}
FORMS: dict[Any, dict[str, Any]] = {  # of records, by their kind
    "start": {
        **dict.fromkeys(["training_samples?", "validation_samples?", "test_samples?"], (COUNT, None)),
        "measures?": {str: {"higher", "lower"}},
        "classes?": [str],
        "loss_unit?": str,
        "hyperparameters?": {},
    },
    "train": dict.fromkeys([f"{name}?" for name in TRAINED], NUMBER),
    "evaluation": {"epoch": float},
    "end": {
        "seconds?": {"total": float, **dict.fromkeys([f"{part}?" for part in PARTS], float)},
        "notes?": [str],
        "stopped?": (str, None),
        "samples_per_second?": NUMBER,
    },
}
SIDECAR_FORM = {"metrics?": {"kept_epoch?": (float, None)}, "digests?": {str: str}, "versions?": {str: str}}
SPLITS = {"validation": GREEN, "test": ORANGE}


class Run(RunRecords):
    """The records and results in a run's folder so far. Records are in the order of steps."""

    def __init__(self, folder: Path, name: str = "") -> None:
        """Read the run's files. ``name`` is the run's name, by default the folder's name.

        Raises:
            UserError: ``metrics.jsonl`` cannot be read, is damaged or has no start record. The sidecar or
                ``predictions.npz`` exists, and is damaged.
        """
        super().__init__(folder)
        for record in (*self.starts, *self.by_step["train"].values(), *self.by_step["evaluation"].values(), self.end):
            measured = {f"{key}?": NUMBER for key in record if key.startswith(("validation_", "test_"))}
            require_form(record, FORMS.get(record.get("kind"), {}) | measured, f"{folder / METRICS} is damaged")
        self.name = name or folder.name
        self.start = self.starts[-1]  # of the last attempt
        self.train, self.evaluations = (
            [record for _, record in sorted(self.by_step[kind].items())] for kind in ("train", "evaluation")
        )
        self.classes = [str(each) for each in self.start.get("classes", [])]  # in the order of the labels
        # Whether "higher" or "lower" is better, by the objective's measures, the main measure first.
        self.measures: dict[str, str] = self.start.get("measures", {"accuracy": "higher"})
        self.sidecar: Record = {}  # empty: model.json does not exist yet
        self.sections: list[Section] = []  # the objective's sections about the test split
        self.pictures: dict[int, Picture] = {}  # by the number of the sample in the test split
        try:
            if (path := folder / SIDECAR).exists():
                self.sidecar = parse_json(path.read_bytes())
                require_form(self.sidecar, SIDECAR_FORM, path.name)
            if (path := folder / "predictions.npz").exists():
                self.sections, self.pictures = read_predictions(path)
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise UserError(f"cannot read {path}: {error}; remove the file or train again") from error
        # The last step's evaluation, or else the training record; empty without any record.
        last: Record = max((*self.evaluations, *self.train), key=lambda record: int(record["step"]), default={})
        self.steps = int(last.get("step", 0))  # optimiser steps done
        time = max((record.get("time", 0.0) for record in (*self.train, *self.evaluations)), default=None)
        # Seconds from the start of the last attempt to its end or last record; None without a record.
        self.seconds = None if time is None else max(0.0, time - self.start.get("time", time))
        if "seconds" in self.end:
            self.seconds = float(self.end["seconds"]["total"])
        epoch = self.sidecar.get("metrics", {}).get("kept_epoch")
        kept = [record for record in self.evaluations if epoch in (None, record["epoch"])] or self.evaluations
        # The evaluation of the returned weights: the last evaluation, unless the sidecar names another epoch.
        self.kept_evaluation: Record = kept[-1] if kept else {}


def read_predictions(path: Path) -> tuple[list[Section], dict[int, Picture]]:
    """Return the sections of ``predictions.npz``, and the samples shown in sections, by number and with images.

    If the file has no such samples, the second result is {}. Raises ValueError, TypeError, LookupError or OSError if
    the file is damaged or cannot be read.
    """
    arrays = read_arrays(path, PREDICTIONS_BYTES)
    first = int(arrays["table_rows"])  # the rows before are for wandb's table
    sections = decode_sections(str(arrays["sections"]))
    if len(arrays["index"]) == first:
        return sections, {}
    columns = [arrays[key][first:] for key in ("index", "prediction", "truth", "score", "loss")]
    images = arrays["images"][first:] if "images" in arrays else [None] * len(columns[0])
    names = sample_names(arrays)[first:]
    masks = [*zip(arrays["true_masks"], arrays["masks"], strict=True)] if "masks" in arrays else [()] * len(names)
    called = arrays["value_columns"].tolist() if "value_columns" in arrays else []
    values = [dict(zip(called, row, strict=True)) for row in arrays["values"].tolist()] if called else []
    pictures = {}
    beside = zip(names, masks, images, values or [{}] * len(names), strict=True)
    for (name, each, image, inputs), index, prediction, truth, score, loss in zip(beside, *columns, strict=True):
        shown: dict[str, Any] = {"loss": float(loss)} if np.isnan(score) else {"score": float(score)}
        facts = name or f"sample {index}", image, str(prediction), str(truth)
        pictures[int(index)] = Picture(*facts, masks=each, values=inputs, **shown)
    return sections, pictures


def sample_names(predictions: Mapping[str, NDArray[Any]]) -> list[str]:
    """Return the names of the samples in ``predictions.npz``, given as arrays by name. A missing name is "".

    Bytes that are not UTF-8 become U+FFFD.
    """
    if "names" not in predictions or not len(predictions["names"]):
        return [""] * len(predictions["index"])
    names = predictions["names"].tolist()
    return [name.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for name in names]


def render_report(run_folder: Path, name: str = "", failure: str = "") -> str:
    """Return the report of a run, which may still be training, as a self-contained HTML document.

    ``name`` is the run's name, by default the folder's name. ``failure`` is the reason if the run has failed.

    Raises:
        UserError: ``metrics.jsonl`` has no start record, or a file is damaged.
    """
    run = Run(run_folder, name)
    require_form(run.start, FACTS, f"{run_folder / METRICS} is damaged")
    recorded = run.end.get("seconds", {})
    seconds = {key: max(0.0, recorded[key]) for key in PARTS if key in recorded}
    total = sum(seconds.values())
    charts = [*list_charts(run)]
    return render_template(
        "report.html",
        run=run,
        failure=failure,
        charts=[
            (title, draw_line_chart(lines, **options)) for title, lines, options in charts if any(map(varies, lines))
        ],
        constants=[describe_constant(title, lines) for title, lines, _ in charts if not any(map(varies, lines))],
        tiles=[*list_tiles(run)],
        sections=[*list_section_values(run.sections, run.pictures, run.classes)],
        time_spent=[(*PARTS[key], spent, spent / total) for key, spent in seconds.items()] if total else [],
        settings=hyperparameter_rows(run.start.get("hyperparameters", {})),
    )


def list_tiles(run: Run) -> Iterator[tuple[str, str, str]]:
    """Yield label, value and detail of the tiles: the main measure, if any, and the loss on the test split."""
    result: Record = {**run.kept_evaluation, **run.end}

    def format_test(measure: str) -> str:
        key = f"test_{measure}"
        return format_measure(measure, result[key]) if key in result else "n/a"

    if run.measures:
        main, *others = run.measures
        detail = ", ".join(f"{name_measure(name)} {format_test(name)}" for name in others)
        if main == "accuracy" and result.get("test_accuracy") is not None:
            samples = run.start["test_samples"]
            correct = f"{result['test_accuracy'] * samples:,.0f} of {samples:,} correct"
            detail = f"{correct}, {detail}" if "auroc" in others else correct
        yield f"Test {name_measure(main)}", format_test(main), detail
    validation = format_measure("loss", result["validation_loss"]) if "validation_loss" in result else ""
    yield "Test loss", format_test("loss"), f"validation loss {validation}" if validation else ""


def list_charts(run: Run) -> Iterator[tuple[str, list[Series], dict[str, Any]]]:
    """Yield title, lines and options of the charts of loss, measures, rates, norm and speed that have values.

    The options are arguments of :func:`draw_line_chart`.
    """
    unit, evaluations = run.start.get("loss_unit", "cross-entropy (nats)"), run.evaluations
    lines = [make_line("training", BLUE, run.train, ("step", "loss"))]
    lines += [make_line(name, color, evaluations, ("step", f"{name}_loss")) for name, color in SPLITS.items()]
    yield from keep_lines("Loss", lines, x_label="optimiser step", y_label=unit, scale="log", x_from=0)
    for measure, better in run.measures.items():
        name, times = name_measure(measure), 100 if measure == "accuracy" else 1
        title = name[:1].upper() + name[1:]
        y_label = "correct predictions (%)" if measure == "accuracy" else f"{title}, {better} is better"
        lines = [
            make_line(name, color, evaluations, ("epoch", f"{name}_{measure}"), times) for name, color in SPLITS.items()
        ]
        yield from keep_lines(title, lines, x_label="epoch", y_label=y_label)
    for title, y_label, key in (
        ("Learning rate", "learning rate", "learning_rate"),
        ("Gradient norm", "L2 norm of the gradient before clipping", "gradient_norm"),
        ("Training speed", "samples per second, all ranks", "samples_per_second"),
        ("Tokens per second", "tokens per second, all ranks", "tokens_per_second"),
    ):
        lines = [make_line("", BLUE, run.train, ("step", key))]
        yield from keep_lines(title, lines, x_label="optimiser step", y_label=y_label, scale="from 0", x_from=0)


def make_line(label: str, color: str, records: Sequence[Record], keys: tuple[str, str], times: int = 1) -> Series:
    """Return a line through the records with a defined y.

    ``keys`` are the keys of x and y in records. ``times`` multiplies y. If no record has y, the line is empty.
    """
    x_key, y_key = keys
    defined = [record for record in records if record.get(y_key) is not None]
    return Series(label, [record[x_key] for record in defined], [times * record[y_key] for record in defined], color)


def keep_lines(
    title: str, lines: Sequence[Series], **options: Any
) -> Iterator[tuple[str, list[Series], dict[str, Any]]]:
    if kept := [line for line in lines if line.x]:
        yield title, kept, options


def varies(line: Series) -> bool:
    return len({*line.y}) > 1


def describe_constant(title: str, lines: Sequence[Series]) -> str:
    """Return the last values of constant lines as text, such as "accuracy 97.5 % (validation), 96.33 % (test)".

    ``title`` is the title of the chart that is not drawn.
    """
    unit = "\N{NO-BREAK SPACE}%" if title == "Accuracy" else ""
    values = [f"{format_value(line.y[-1])}{unit}" + f" ({line.label})" * bool(line.label) for line in lines]
    return f"{title[:1].lower() + title[1:] if title[1:2].islower() else title} {', '.join(values)}"


def hyperparameter_rows(given: Mapping[str, Any]) -> dict[str, list[tuple[str, ...]]]:
    """Return rows (name, value, default, meaning) of the given hyperparameters, by keys ``changed`` and ``others``."""
    rows: dict[str, list[tuple[str, ...]]] = {"changed": [], "others": []}
    for field in dataclasses.fields(Hyperparameters):
        if field.name in given:
            value, default = given[field.name], field.default
            shown = (json.dumps(each, ensure_ascii=False, default=str) for each in (value, default))
            row = field.name, *shown, mark_code(field.metadata["doc"])
            rows["changed" if value != default else "others"].append(row)
    return rows
