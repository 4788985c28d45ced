"""What a run folder says about its run: the records, the sidecar and the pictured predictions, read for the report."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.errors import UserError

Record = dict[str, Any]


@dataclass(frozen=True)
class Mistake:
    """A test sample of the wrong guess: uint8 [H, W, C], and the probability that the guess was given.

    ``name`` is that of its file, or its key in a shard; its number in the test split where it has none.
    """

    name: str
    image: NDArray[np.uint8]
    truth: int
    guess: int
    score: float


@dataclass(frozen=True)
class Run:
    """One run's records by kind, in the order of their steps.

    ``end`` is empty for a run that has not finished, ``sidecar`` and ``confusion`` for one that left none.
    """

    name: str
    starts: list[Record]  # of all attempts
    train: list[Record]
    evaluations: list[Record]
    end: Record
    sidecar: Record
    confusion: NDArray[np.int64] | None
    mistakes: list[Mistake]
    failure: str = ""  # why it has failed

    @property
    def start(self) -> Record:
        """Of the attempt that went on last."""
        return self.starts[-1]

    @property
    def classes(self) -> list[str]:
        """Their names, in the order of the labels."""
        return [str(name) for name in self.start.get("classes", [])]

    @property
    def steps(self) -> int:
        """Optimiser steps done so far."""
        return max((int(record["step"]) for record in (*self.train, *self.evaluations)), default=0)


def read_run(folder: Path, name: str = "") -> Run:
    """Reads ``metrics.jsonl``, and ``model.json`` and ``predictions.npz`` where they are there.

    Raises:
        UserError: not a run folder, or a damaged file in it.

    """
    starts: list[Record] = []
    end: Record = {}
    steps: dict[str, dict[int, Record]] = {"train": {}, "evaluation": {}}
    for record in read_records(folder / "metrics.jsonl"):
        kind = record.get("kind")
        if kind == "start":
            starts, end = [*starts, record], {}
        elif kind == "end":
            end = record
        elif kind in steps:
            # A retry goes on in the same file: what it says about a step replaces what the attempt before it said.
            steps[kind][record["step"]] = record
    if not starts:
        raise UserError(f"{folder / 'metrics.jsonl'} has no start record: give the folder of a run that began training")
    confusion, mistakes = read_predictions(folder / "predictions.npz")
    return Run(
        name=name or folder.name,
        starts=starts,
        train=in_order(steps["train"]),
        evaluations=in_order(steps["evaluation"]),
        end=end,
        sidecar=read_sidecar(folder / "model.json"),
        confusion=confusion,
        mistakes=mistakes,
    )


def in_order(records: dict[int, Record]) -> list[Record]:
    """By step."""
    return [records[step] for step in sorted(records)]


def read_records(path: Path) -> list[Record]:
    """The JSON lines of a file; a line that a killed writer left unfinished is passed over."""
    records = []
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                with suppress(ValueError):
                    records.append(json.loads(line))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give the folder of a run") from error
    return [record for record in records if isinstance(record, dict)]


def read_sidecar(path: Path) -> Record:
    """The sidecar, or an empty record where there is none."""
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"cannot read sidecar {path}: {error}; remove it or train again") from error


def read_predictions(path: Path) -> tuple[NDArray[np.int64] | None, list[Mistake]]:
    """The confusion matrix and the worst mistakes, largest loss first; nothing where there is no such file."""
    if not path.exists():
        return None, []
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            first = int(arrays["table_rows"])  # the rows before are those of wandb's table
            index, images, truth = (arrays[key][first:] for key in ("index", "images", "truth"))
            scores, confusion = arrays["scores"][first:], arrays["confusion"]
            names = named(arrays)[first:]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"cannot read predictions {path}: {error}; remove it or train again") from error
    guesses = scores.argmax(axis=1) if len(scores) else np.zeros(0, dtype=np.int64)
    mistakes = [
        Mistake(
            names[k] or f"sample {index[k]}", images[k], int(truth[k]), int(guesses[k]), float(scores[k, guesses[k]])
        )
        for k in range(len(index))
        if guesses[k] != truth[k]
    ]
    return confusion, mistakes


def named(predictions: Mapping[str, NDArray[Any]]) -> list[str]:
    """The names of the pictured samples, empty where they have none; bytes that are no text are shown as such."""
    if "names" not in predictions or not len(predictions["names"]):
        return [""] * len(predictions["index"])
    found = predictions["names"].tolist()
    return [name.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for name in found]
