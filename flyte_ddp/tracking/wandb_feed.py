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


def send_records_to_wandb(launcher: Connection[Any, Any]) -> int:
    """Open a wandb run, log a training's records until the training has ended, and close the wandb run.

    Also logs the table of predictions at the end. ``launcher`` is the connection to the launching process. The launcher
    sends an Order at the start, and ENDED when the training has ended, and receives a Status after each change. The
    death of the launcher counts as ENDED. Lowers this process's priority if the training still runs. Prints tracebacks
    to stderr.

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
        """Change the status, and send it to the launcher, unless the launcher was killed."""
        nonlocal status
        status = replace(status, **changes)
        with suppress(OSError):  # the launcher was killed
            launcher.send(status)

    if not wait_for_end(0):
        os.nice(10)  # training has priority while it runs
    if order.on_first_record:
        followed = follow_metrics_file(folder, offset, wait_for_end)
        if not any(record.get("kind") == "record" for record in followed):
            return NOTHING_RECORDED
    try:
        run = open_wandb_run_with_retries(
            arguments, wait_for_end, lambda error: send_status(reason=print_traceback(error))
        )
        send_status(url=run.url or "", reason="")
        trained, has_predictions = log_records_to_wandb(run, follow_metrics_file(folder, offset, wait_for_end))
        try:
            if trained and has_predictions:
                with open_run_file(folder, PREDICTIONS) as file:
                    run.log({"predictions": make_predictions_table(file)})
        except Exception as error:  # keep the run without the table
            send_status(reason=f"no table of predictions: {print_traceback(error)}")
        run.finish(exit_code=0 if trained else 1)
    except TimeoutError:  # raised by run.finish()
        send_status(reason="the server took too long")
        return 1
    except Exception as error:
        send_status(reason=print_traceback(error))
        return 1
    return 0


def print_traceback(error: Exception) -> str:
    """Print an error's traceback to stderr, and return its type and first line, at most 200 characters."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0][:200]


def open_wandb_run_with_retries(
    arguments: JsonObject, wait_for_end: WaitForEnd, report_error: Callable[[Exception], None]
) -> wandb.Run:
    """Open a wandb run. After an error, wait 30 s and try again, until the training has ended.

    Passes each error to ``report_error``, and stops wandb's service of this process. Tries once more after the end of
    the training, and raises the error of this try. ``wait_for_end`` waits up to the given seconds, and returns whether
    the training has ended.
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


def log_records_to_wandb(run: wandb.Run, records: Iterable[JsonObject]) -> tuple[bool, bool]:
    """Log records to the wandb run, and update the run's config and summary. Removes keys from the records.

    Returns:
        Whether an "end" record came, and whether the run makes predictions.
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


def follow_metrics_file(run_folder: Path, offset: int, wait_for_end: WaitForEnd) -> Iterator[JsonObject]:
    """Yield new records of ``metrics.jsonl``, until the training has ended and all records are read.

    Starts at byte ``offset``. Each ``next()`` may wait for a new record. Lines that are no JSON objects, and lines that
    were yielded before, are skipped. ``wait_for_end`` waits up to the given seconds, and returns whether the training
    has ended.
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
    """Open a file of a run for reading, from ``unfinished/`` if it exists there, else from the run folder.

    Raises:
        FileNotFoundError: Neither folder has the file.
    """
    try:
        return (run_folder / UNFINISHED / name).open("rb")
    except FileNotFoundError:
        return (run_folder / name).open("rb")


def make_predictions_table(file: BinaryIO) -> wandb.Table:
    """Read ``predictions.npz``, and return a wandb table of the first test samples.

    The columns are id, image (if any), prediction, truth and scores.
    """
    import numpy as np
    import wandb

    from flyte_ddp.report.report import decode_sample_names

    with np.load(file, allow_pickle=False) as arrays:
        rows = int(arrays["table_rows"])
        names, index, images = decode_sample_names(arrays), arrays["index"], arrays.get("images")
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
    sys.exit(send_records_to_wandb(Connection(int(sys.argv[1]))))
