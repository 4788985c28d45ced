"""One wandb run, fed from a run folder: started by :mod:`flyte_ddp.wandb_follower`, and expendable."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from flyte_ddp.report.run_records import named
from flyte_ddp.run_folder import METRICS, PREDICTIONS
from flyte_ddp.wandb_follower import POLL_SECONDS, EndOfRun, Order, Status, opened, read_order, write_status

if TYPE_CHECKING:
    import wandb

INIT_SECONDS = 60.0  # while training goes on; at the end of the run the follower is less patient
EVALUATION_KEYS = {
    "epoch": "epoch",
    "test_loss": "test_loss",
    "test_accuracy": "accuracy",
    "validation_loss": "validation_loss",
    "validation_accuracy": "validation_accuracy",
}
TRAIN_KEYS = {key: key for key in ("epoch", "loss", "learning_rate", "samples_per_second")}


def main(order: Order, mode: str) -> int:
    """Opens the run, feeds it to the end of training and closes it; the status file tells how far that went."""
    end = EndOfRun()
    status = Status()
    try:
        run = open_run(order, mode)
        status = Status("open", folder=str(Path(run.dir).parent), url=run.url or "")
        write_status(order, status)
        trained, classes = feed(run, order, end)
        reason = log_predictions(run, order, classes) if trained else ""
        run.finish(exit_code=0 if trained else 1)
        status = replace(status, state="finished", reason=reason)
    except TimeoutError:
        status = replace(status, state="unsent", reason="the server took too long")
    except Exception as error:
        traceback.print_exc()
        status = replace(status, state="failed", reason=one_line(error))
    write_status(order, status)
    return int(status.state == "failed")


def one_line(error: Exception) -> str:
    """The type and the first line, not too long."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


def open_run(order: Order, mode: str) -> wandb.Run:
    """A wandb run whose x axis is the optimiser step.

    Raises:
        Exception: whatever wandb raises where it has no key, gets no answer or a wrong one.
    """
    import wandb

    run = wandb.init(
        dir=order.run_folder,
        mode="online" if mode == "online" else "offline",
        project=order.project,
        entity=order.entity or None,
        id=order.run_id,
        name=order.name,
        resume="allow",  # a retry goes on with the same run
        config=order.config,
        settings=wandb.Settings(
            console="off",
            disable_git=True,
            disable_code=True,
            init_timeout=INIT_SECONDS,
            finish_timeout=max(0.1, order.timeout / 2),
            finish_timeout_raises=True,
            x_transaction_log_flush_interval=1.0,  # what a kill may lose
            x_stats_pid=order.training_pid,
            x_stats_track_process_tree=True,
        ),
    )
    # Records are logged as rows of their own with the step as a column, never with log(step=...): a train and an
    # evaluation record share a step, and a retry goes back to earlier ones, which wandb would drop.
    run.define_metric("*", step_metric="step")
    return run


def feed(run: wandb.Run, order: Order, end: EndOfRun) -> tuple[bool, list[str]]:
    """Logs every record until the run has ended; returns whether training came to its end, and the classes' names."""
    import wandb

    trained, classes = False, []
    for record in follow(Path(order.run_folder), order.offset, end):
        kind = record.get("kind")
        if kind == "start":
            classes = record.get("classes", [])
            config = {**record["hyperparameters"], "run": without(record, "kind", "time", "hyperparameters")}
            run.config.update(config, allow_val_change=True)  # type: ignore[no-untyped-call]
        elif kind in ("train", "evaluation"):
            run.log(row(record))
        elif kind == "watch":
            histograms = {
                f"parameters/{name}": wandb.Histogram(np_histogram=(np.array(each["counts"]), np.array(each["edges"])))
                for name, each in record["parameters"].items()
            }
            run.log({"step": record["step"], **histograms})
        elif kind == "end":
            trained = True
            run.summary.update(without(record, "kind", "time"))
    return trained, classes


def without(record: dict[str, Any], *keys: str) -> dict[str, Any]:
    """The record without some of its keys."""
    return {key: value for key, value in record.items() if key not in keys}


def row(record: dict[str, Any]) -> dict[str, Any]:
    """A train or evaluation record under wandb's names; what is absent, or was not finite, is left out."""
    names = TRAIN_KEYS if record["kind"] == "train" else EVALUATION_KEYS
    values = {name: record.get(key) for key, name in names.items()}
    return {"step": record["step"], **{name: value for name, value in values.items() if value is not None}}


def follow(run_folder: Path, offset: int, end: EndOfRun) -> Iterator[dict[str, Any]]:
    """A run's records from an offset of their file on, until it has ended and everything is read.

    A run that an engine starts again replaces the file by one that is shorter; what it had logged is not given twice.
    """
    pending = b""
    ended = False
    inode = None
    given: set[int] = set()  # hashes of lines, which differ at least in their time
    while not ended:
        ended = end.wait(POLL_SECONDS)  # before reading: what was written until then is read below
        try:
            file = opened(run_folder, METRICS)
        except FileNotFoundError:
            continue
        with file:
            if inode not in (None, os.fstat(file.fileno()).st_ino):
                offset, pending = 0, b""
            inode = os.fstat(file.fileno()).st_ino
            file.seek(offset)
            chunk = file.read()
        offset += len(chunk)
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:  # half a line, of a writer that was killed
                continue
            if isinstance(record, dict) and hash(line) not in given:
                given.add(hash(line))
                yield record


def log_predictions(run: wandb.Run, order: Order, classes: list[str]) -> str:
    """Logs the table of predictions; the reason if that fails, because the run is worth keeping without it."""
    try:
        with opened(Path(order.run_folder), PREDICTIONS) as file:
            run.log({"predictions": table(file, classes)})
    except FileNotFoundError:
        return ""
    except Exception as error:
        traceback.print_exc()
        return f"no table of predictions: {one_line(error)}"
    return ""


def table(file: BinaryIO, classes: list[str]) -> wandb.Table:
    """The predictions on the first test samples: id, image, guess and truth by name, and a score for each class."""
    import wandb

    with np.load(file, allow_pickle=False) as arrays:
        rows = int(arrays["table_rows"])
        index, images, scores, truth = (arrays[name][:rows] for name in ("index", "images", "scores", "truth"))
        called = named(arrays)
    names = classes or [str(label) for label in range(scores.shape[1])]
    result = wandb.Table(columns=["id", "image", "guess", "truth", *[f"score_{i}" for i in range(scores.shape[1])]])
    for i, image in enumerate(images):
        picture = image if image.shape[-1] == 3 else image[..., 0]
        guess, answer = names[int(scores[i].argmax())], names[int(truth[i])]
        result.add_data(called[i] or int(index[i]), wandb.Image(picture), guess, answer, *scores[i].tolist())
    return result


if __name__ == "__main__":
    sys.exit(main(read_order(sys.argv[1]), sys.argv[2]))
