"""The files of a run folder, read for the report: records, sidecar and pictured predictions."""

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.errors import UserError
from flyte_ddp.json_lines import read_records
from flyte_ddp.report.figures import Picture

Record = dict[str, Any]


@dataclass
class Run:
    """What the files of a run folder say, records by kind and in the order of their steps."""

    name: str
    starts: list[Record] = field(default_factory=list)  # of all attempts, oldest first
    train: list[Record] = field(default_factory=list)
    evaluations: list[Record] = field(default_factory=list)
    end: Record = field(default_factory=dict)  # empty: the last attempt has not finished
    sidecar: Record = field(default_factory=dict)  # empty: there is no model.json yet
    confusion: NDArray[np.int64] | None = None  # [K, 3] truth, prediction and number of samples
    mistakes: list[Picture] = field(default_factory=list)  # largest loss first

    @property
    def start(self) -> Record:
        """The start record of the last attempt."""
        return self.starts[-1]

    @property
    def classes(self) -> list[str]:
        """Names of the classes, in the order of the labels."""
        return [str(name) for name in self.start.get("classes", [])]

    @property
    def steps(self) -> int:
        """Optimiser steps done so far."""
        return max((int(record["step"]) for record in (*self.train, *self.evaluations)), default=0)

    @property
    def last_record(self) -> Record:
        """The end record, or the one of the last step so far (its evaluation, if there was one); empty before any."""
        return self.end or max((*self.evaluations, *self.train), key=lambda record: int(record["step"]), default={})

    @property
    def kept_evaluation(self) -> Record:
        """The evaluation of the returned weights: the last one, unless the sidecar names another epoch."""
        epoch = self.sidecar.get("metrics", {}).get("kept_epoch")
        chosen = [record for record in self.evaluations if epoch in (None, record["epoch"])] or self.evaluations
        return chosen[-1] if chosen else {}

    @property
    def seconds(self) -> float | None:
        """Seconds from the start of the last attempt to its end, or to its last record so far; None without any."""
        if "seconds" in self.end:
            return float(self.end["seconds"]["total"])
        last = max((record.get("time", 0.0) for record in (*self.train, *self.evaluations)), default=None)
        return None if last is None else max(0.0, last - self.start.get("time", last))


def read_run(folder: Path, name: str = "") -> Run:
    """Read ``metrics.jsonl`` and, where they exist, ``model.json`` and ``predictions.npz``; return what they say.

    ``name`` is the run's; empty: the folder's name. Raises a UserError if a file is damaged, or if there is no start
    record.
    """
    run = Run(name or folder.name)
    steps: dict[str, dict[int, Record]] = {"train": {}, "evaluation": {}}
    for record in read_records(folder / "metrics.jsonl"):
        kind = record.get("kind")
        if kind == "start":
            run.starts, run.end = [*run.starts, record], {}
        elif kind == "end":
            run.end = record
        elif kind in steps:
            # A retry appends to the same file: its record of a step replaces that of the attempt before.
            steps[kind][record["step"]] = record
    if not run.starts:
        raise UserError(f"{folder / 'metrics.jsonl'} has no start record: give the folder of a run that began training")
    run.train, run.evaluations = ([found[step] for step in sorted(found)] for found in steps.values())
    try:
        if (path := folder / "model.json").exists():
            run.sidecar = dict(json.loads(path.read_bytes()))
        if (path := folder / "predictions.npz").exists():
            run.confusion, run.mistakes = read_predictions(path, run.classes)
    except (OSError, ValueError, TypeError, LookupError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"cannot read {path}: {error}; remove it or train again") from error
    return run


def read_predictions(path: Path, classes: list[str]) -> tuple[NDArray[np.int64], list[Picture]]:
    """Read ``predictions.npz``; return the counts of confusions [K, 3] and the pictured mistakes, worst first."""
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
    """Return the names of the samples in ``predictions.npz``; empty texts if it has no names.

    Bytes of file names that are not UTF-8 become replacement characters.
    """
    if "names" not in predictions or not len(predictions["names"]):
        return [""] * len(predictions["index"])
    found = predictions["names"].tolist()
    return [name.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for name in found]
