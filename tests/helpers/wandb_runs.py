"""A run for wandb: the records, the process that receives them, and the files on disk."""

import json
import math
import subprocess
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np

from flyte_ddp.core.settings import Settings
from flyte_ddp.core.text.json_lines import JsonLines
from flyte_ddp.tracking.wandb_run import WandbProcess

HYPERPARAMETERS = {"epochs": 2, "learning_rate": 0.1, "num_ranks": 0}
CLASSES = ["boot", "bag", "shirt"]
IMAGES = np.random.default_rng(1).integers(0, 256, (6, 5, 4, 1), dtype=np.uint8)
SCORES = np.array(
    [[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6], [0.5, 0.3, 0.2], [0, 0, 1], [0, 1, 0]], np.float32
)
TRUTH = np.array([0, 1, 1, 0, 0, 2])
TABLE_ROWS = 4
RECORDS: list[dict[str, Any]] = [
    {"kind": "start", "hyperparameters": HYPERPARAMETERS, "num_ranks": 2, "device": "cpu", "classes": CLASSES},
    {"kind": "train", "epoch": 0, "step": 20, "loss": 0.9, "learning_rate": 0.05, "samples_per_second": 17000.0},
    {"kind": "train", "epoch": 0, "step": 40, "loss": math.inf, "learning_rate": 0.04, "samples_per_second": 16000.0},
    {"kind": "evaluation", "epoch": 1, "step": 40, "validation_loss": 0.5, "validation_accuracy": 0.8,
     "test_loss": 0.6, "test_accuracy": 0.75},
    {"kind": "train", "epoch": 1, "step": 60, "loss": 0.3, "learning_rate": 0.01, "samples_per_second": 18000.0},
    {"kind": "evaluation", "epoch": 2, "step": 80, "test_loss": 0.4, "test_accuracy": 0.9},
]  # fmt: skip
END = {"kind": "end", "test_accuracy": 0.9, "test_loss": 0.4, "seconds": {"total": 3.5}, "stopped": ""}
# The rows that must arrive at wandb, in this order, by wandb's names.
ROWS = [
    {"step": 20, "epoch": 0, "loss": 0.9, "learning_rate": 0.05, "samples_per_second": 17000.0},
    {"step": 40, "epoch": 0, "learning_rate": 0.04, "samples_per_second": 16000.0},
    {"step": 40, "epoch": 1, "validation_loss": 0.5, "validation_accuracy": 0.8, "test_loss": 0.6, "accuracy": 0.75},
    {"step": 60, "epoch": 1, "loss": 0.3, "learning_rate": 0.01, "samples_per_second": 18000.0},
    {"step": 80, "epoch": 2, "test_loss": 0.4, "accuracy": 0.9},
]


def write_records(folder: Path, records: list[dict[str, Any]]) -> None:
    """Append records to the run's metrics."""
    with JsonLines(folder / "metrics.jsonl") as log:
        for record in records:
            log.write(record)


def write_run(folder: Path, records: list[dict[str, Any]] = RECORDS) -> None:
    """Write the results of a training: these records, the predictions, and the last record."""
    write_records(folder, records)
    texts = [[CLASSES[k] for k in of][:TABLE_ROWS] for of in (SCORES.argmax(1), TRUTH)]
    arrays: dict[str, Any] = {"index": np.arange(6), "images": IMAGES, "texts": np.array(texts).T}
    arrays |= {"text_columns": np.array(["prediction", "truth"]), "numbers": SCORES[:TABLE_ROWS]}
    arrays["make_number_columns"] = np.array([f"score_{name}" for name in CLASSES])
    np.savez(folder / "predictions.npz", table_rows=np.array(TABLE_ROWS), loss=np.zeros(6), **arrays)
    write_records(folder, [END])


def start(folder: Path, timeout: float = 60.0, *, on_first_record: bool = False) -> WandbProcess:
    names = {"wandb_run_id": "exec/task:7", "wandb_project": "a-project"}
    settings = Settings(wandb_mode="online", wandb_timeout=timeout, **names)
    return WandbProcess(folder, settings, HYPERPARAMETERS, on_first_record=on_first_record)


def read_wandb_log(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the records that wandb has kept of the folder's only wandb run, read by wandb's reader."""
    (log,) = (folder / "wandb").glob("run-*/*.wandb")
    reader = distribution("wandb").locate_file("wandb/bin/wandb-core")  # the reader of `wandb leet`
    command = [str(reader), "leet", "inspect", "--no-observability", "--json", "--run-file", str(log)]
    result = subprocess.run(command, capture_output=True, check=True, text=True)
    records: dict[str, list[dict[str, Any]]] = {}
    for line in result.stdout.splitlines():
        record = json.loads(line)
        records.setdefault(record["type"], []).append(record[record["type"]])
    return records


def logged_rows(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of plain numbers, without wandb's columns and tables."""
    rows = [{key: value for key, value in row.items() if not key.startswith("_")} for row in history]
    return [row for row in rows if len(row) > 1 and not any(key.startswith("predictions") for key in row)]
