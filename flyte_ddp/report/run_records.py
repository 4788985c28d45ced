"""The files of a run folder, read for the report: records, sidecar and pictured predictions."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.errors import UserError
from flyte_ddp.json_lines import read_records
from flyte_ddp.report.figures import Picture

Record = dict[str, Any]


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
