"""The child process that sends a run folder's records to wandb. The process is started by wandb_run.py."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from flyte_ddp.core.checks.parsing import JsonObject
from flyte_ddp.core.runs.run_folder import METRICS, PREDICTIONS, UNFINISHED
from flyte_ddp.core.text.json_lines import parse_records
from flyte_ddp.tracking.messages import Status

if TYPE_CHECKING:
    import wandb

POLL_SECONDS = 0.25
NOTHING_RECORDED = 3  # exit code: waited for a record, got none, and opened no run
RETRY_SECONDS = 30.0  # between attempts to reach the server

WaitForEnd = Callable[[float], bool]  # waits up to this many seconds; returns whether training has ended


def feed_wandb(launcher: Connection[Any, Any]) -> int:
    """Open the wandb run, log records until training has ended, log the table of predictions, and close the run.

    ``launcher`` is the connection to the launching process, which sends an Order, and ENDED when training has ended.
    The launcher receives a Status after each change. The death of the launcher also counts as the end of training.
    Lowers this process's priority during training. Prints tracebacks to stderr.

    Returns:
        The exit code: 0, NOTHING_RECORDED, or 1 for a failure.
    """
    parent = os.getppid()
    order, status = launcher.recv(), Status()
    arguments, offset = order.init_arguments, order.offset
    folder = Path(arguments["dir"])

    def wait_for_end(seconds: float) -> bool:
        return launcher.poll(seconds) or os.getppid() != parent

    def send_status(**changes: str) -> None:
        nonlocal status
        status = replace(status, **changes)
        with suppress(OSError):  # the launcher was killed
            launcher.send(status)

    if not wait_for_end(0):
        os.nice(10)  # training has priority while it runs
    if order.on_first_record:
        followed = follow_records(folder, offset, wait_for_end)
        if not any(record.get("kind") == "record" for record in followed):
            return NOTHING_RECORDED
    try:
        run = open_wandb_run(arguments, wait_for_end, lambda error: send_status(reason=print_error(error)))
        send_status(url=run.url or "", reason="")
        trained, has_predictions = log_records(run, follow_records(folder, offset, wait_for_end))
        try:
            if trained and has_predictions:
                with open_run_file(folder, PREDICTIONS) as file:
                    run.log({"predictions": predictions_table(file)})
        except Exception as error:  # keep the run without the table
            send_status(reason=f"no table of predictions: {print_error(error)}")
        run.finish(exit_code=0 if trained else 1)
    except TimeoutError:  # raised by run.finish()
        send_status(reason="the server took too long")
        return 1
    except Exception as error:
        send_status(reason=print_error(error))
        return 1
    return 0


def print_error(error: Exception) -> str:
    """Print the traceback to stderr, and return the error's type and first line, at most 200 characters."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0][:200]


def open_wandb_run(
    arguments: JsonObject, wait_for_end: WaitForEnd, report_error: Callable[[Exception], None]
) -> wandb.Run:
    """Open a wandb run, and retry after errors until training ends, with pauses of 30 s.

    Each error is passed to ``report_error``, and wandb's service of this process is stopped. After the end of training,
    the error of a last try is raised.
    """
    import wandb

    ended = False
    while True:
        try:
            return wandb.init(**arguments)
        except Exception as error:
            if ended:
                raise
            report_error(error)
            wandb.teardown(exit_code=1)  # otherwise wandb rejects the run's id as already in use
            ended = wait_for_end(RETRY_SECONDS)


def log_records(run: wandb.Run, records: Iterable[JsonObject]) -> tuple[bool, bool]:
    """Log records to the wandb run, and return whether an "end" record came, and whether the run makes predictions.

    Also updates the run's config and summary. Removes keys from the records.
    """
    run.define_metric("*", step_metric="step")
    trained = has_predictions = False
    for record in records:
        kind = record.pop("kind", None)
        time = {"_timestamp": record.pop("time")} if "time" in record else {}  # by wandb's name
        if kind == "start":
            has_predictions = "classes" in record
            values = {**record.pop("hyperparameters"), "run": record}
            run.config.update(values, allow_val_change=True)  # type: ignore[no-untyped-call]
        elif kind in ("train", "evaluation", "record"):
            renamed = {} if kind == "record" else {"test_accuracy": "accuracy"}
            # None stands for a value that was not finite. The step is a column instead of log(step=...), because wandb
            # drops rows whose step is not above the last step. A train record and an evaluation record share a step,
            # and a retry resumes at an earlier step.
            run.log({renamed.get(key, key): value for key, value in record.items() if value is not None} | time)
        elif kind == "restart":
            run.log({f"restart/{key}": value for key, value in record.items()} | time)
        elif kind == "end":
            trained = True
            run.summary.update(record)
    return trained, has_predictions


def follow_records(run_folder: Path, offset: int, wait_for_end: WaitForEnd) -> Iterator[JsonObject]:
    """Yield the records of metrics.jsonl from byte ``offset`` on, until training has ended and all records are read.

    Each ``next()`` may wait for a new record. Lines that are no JSON objects, and lines that were yielded before, are
    skipped. ``wait_for_end`` waits up to the given seconds, and returns whether training has ended.
    """
    first, pending, ended, inode = offset, b"", False, None
    yielded: set[int] = set()  # hashes of lines; any two lines differ in their time
    while not ended:
        ended = wait_for_end(POLL_SECONDS)  # before reading, so the last lines are read, too
        try:
            file = open_run_file(run_folder, METRICS)
        except FileNotFoundError:
            continue
        with file:
            before, inode = inode, os.fstat(file.fileno()).st_ino
            if before not in (None, inode):  # a restarted run replaced the file, except earlier attempts' records
                offset, pending = first, b""
            file.seek(offset)
            chunk = file.read()
        offset += len(chunk)
        *lines, pending = (pending + chunk).split(b"\n")
        new = [line for line in lines if hash(line) not in yielded]
        yielded.update(map(hash, new))
        yield from parse_records(new)


def open_run_file(run_folder: Path, name: str) -> BinaryIO:
    """Open a file of the run for reading: in ``unfinished/`` during training, else in the run folder.

    Raises FileNotFoundError if neither folder has the file.
    """
    try:
        return (run_folder / UNFINISHED / name).open("rb")
    except FileNotFoundError:
        return (run_folder / name).open("rb")


def predictions_table(file: BinaryIO) -> wandb.Table:
    """Return a wandb table of the first test samples with id, image (if any), prediction, truth and scores."""
    import numpy as np
    import wandb

    from flyte_ddp.report.report import sample_names

    with np.load(file, allow_pickle=False) as arrays:
        rows = int(arrays["table_rows"])
        names, index, images = sample_names(arrays), arrays["index"], arrays.get("images")
        texts, numbers = (arrays[kind].tolist() for kind in ("texts", "numbers"))
        columns = [*arrays["text_columns"].tolist(), *arrays["make_number_columns"].tolist()]
    table = wandb.Table(columns=["id", *(["image"] if images is not None else []), *columns])
    for row in range(rows):
        pictures = []
        if images is not None:
            pictures.append(wandb.Image(images[row] if images.shape[-1] == 3 else images[row][..., 0]))
        table.add_data(names[row] or int(index[row]), *pictures, *texts[row], *numbers[row])
    return table


if __name__ == "__main__":
    sys.exit(feed_wandb(Connection(int(sys.argv[1]))))
