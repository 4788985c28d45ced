"""The process that feeds wandb from a run folder: wandb_run.py starts it, and training can lose it."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from flyte_ddp.json_lines import parsed
from flyte_ddp.report.figures import PICTURED_CLASSES
from flyte_ddp.report.run_records import named
from flyte_ddp.runs.run_folder import METRICS, PREDICTIONS, UNFINISHED

if TYPE_CHECKING:
    import wandb

POLL_SECONDS = 0.25
NOT_SENT = 2  # exit code: all is on disk, but not with the server
RETRY_SECONDS = 30.0  # between attempts to reach the server
OWN_VARIABLES = ("WANDB_ERROR_REPORTING", "WANDB_DATA_DIR")  # which wandb_run.py sets for this process

IsOver = Callable[[float], bool]  # waits so many seconds for the end of the run, and returns whether it has come


def main(launcher: Connection[Any, Any]) -> int:
    """Open the wandb run, feed it to the end of training and close it; return the exit code.

    The launcher sends the arguments of ``wandb.init`` with the offset in metrics.jsonl at which this attempt begins,
    and one more message at the end of the run. The launcher is sent wandb's status: folder, url, reason of a failure.
    """
    parent = os.getppid()
    arguments, offset = launcher.recv()
    folder = Path(arguments["dir"])

    def is_over(seconds: float) -> bool:
        return launcher.poll(seconds) or os.getppid() != parent

    def send(**status: str) -> None:
        with suppress(OSError):  # it was killed
            launcher.send(status)

    os.nice(0 if is_over(0) else 10)  # the ranks go first
    try:
        run = open_run(arguments, is_over, lambda error: send(reason=log_error(error)))
        send(folder=str(Path(run.dir).parent), url=run.url or "", **({"reason": ""} if run.url else {}))
        # All of the run into an offline one: `wandb sync` replaces the run of this id by it, with what was sent before.
        first = 0 if arguments["mode"] == "offline" else offset
        trained, classes = log_records(run, follow_records(folder, first, is_over))
        try:
            if trained:
                with open_run_file(folder, PREDICTIONS) as file:
                    run.log({"predictions": predictions_table(file, classes)})
        except Exception as error:  # the run is worth keeping without it
            send(reason=f"no table of predictions: {log_error(error)}")
        run.finish(exit_code=0 if trained else 1)
    except TimeoutError:  # of ``finish``
        send(reason="the server took too long")
        return NOT_SENT
    except Exception as error:
        send(reason=log_error(error))
        return 1
    return 0


def log_error(error: Exception) -> str:
    """Print the traceback; return the error's type and first line, not too long."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0][:200]


def open_run(arguments: dict[str, Any], is_over: IsOver, report: Callable[[Exception], None]) -> wandb.Run:
    """Open a wandb run whose x axis is the optimiser step; an offline one if no server answers before training is over.

    A server is tried every RETRY_SECONDS; ``report`` is called with each error. An offline run that cannot be opened is
    opened once more without the user's ``WANDB_`` variables, of which wandb may refuse one, such as too long a tag.
    """
    import wandb

    while True:
        try:
            run = wandb.init(**arguments)
            break
        except Exception as error:
            theirs = [name for name in os.environ if name.startswith("WANDB_") and name not in OWN_VARIABLES]
            if arguments["mode"] == "offline":
                if not theirs:
                    raise
                for name in theirs:
                    del os.environ[name]
            report(error)
            wandb.teardown(exit_code=1)  # until then wandb takes the run's id for used
            if arguments["mode"] == "online" and is_over(RETRY_SECONDS):
                arguments["mode"] = "offline"
    # Records are logged as rows of their own with the step as a column, never with log(step=...): a train and an
    # evaluation record share a step, and a retry goes back to earlier ones, which wandb would drop.
    run.define_metric("*", step_metric="step")
    return run


def log_records(run: wandb.Run, records: Iterable[dict[str, Any]]) -> tuple[bool, list[str]]:
    """Log every record to the run; return whether training came to its end, and the names of the classes."""
    import wandb

    trained, classes = False, []
    for record in records:
        kind = record.pop("kind", None)
        record.pop("time", None)
        if kind == "start":
            classes = record.get("classes", [])
            values = {**record.pop("hyperparameters"), "run": record}
            run.config.update(values, allow_val_change=True)  # type: ignore[no-untyped-call]
        elif kind in ("train", "evaluation"):  # without what was not finite
            values = {key: value for key, value in record.items() if value is not None}
            if "test_accuracy" in values:
                values["accuracy"] = values.pop("test_accuracy")
            run.log(values)
        elif kind == "watch":
            histograms = {
                f"parameters/{name}": wandb.Histogram(np_histogram=(np.array(each["counts"]), np.array(each["edges"])))
                for name, each in record["parameters"].items()
            }
            run.log({"step": record["step"], **histograms})
        elif kind == "end":
            trained = True
            run.summary.update(record)
    return trained, classes


def follow_records(run_folder: Path, offset: int, is_over: IsOver) -> Iterator[dict[str, Any]]:
    """Yield the records of metrics.jsonl from an offset on, until the run has ended and everything is read.

    A run that an engine starts again replaces the file by a shorter one; no record is yielded twice.
    """
    pending, ended, inode = b"", False, None
    given: set[int] = set()  # hashes of lines, which differ at least in their time
    while not ended:
        ended = is_over(POLL_SECONDS)  # before reading: what was written until then is read below
        try:
            file = open_run_file(run_folder, METRICS)
        except FileNotFoundError:
            continue
        with file:
            before, inode = inode, os.fstat(file.fileno()).st_ino
            if before not in (None, inode):
                offset, pending = 0, b""
            file.seek(offset)
            chunk = file.read()
        offset += len(chunk)
        *lines, pending = (pending + chunk).split(b"\n")
        new = [line for line in lines if hash(line) not in given]
        given.update(map(hash, new))
        yield from parsed(new)


def open_run_file(run_folder: Path, name: str) -> BinaryIO:
    """Open a file of the run for reading, in ``unfinished/`` while it trains, else in the run folder."""
    try:
        return (run_folder / UNFINISHED / name).open("rb")
    except FileNotFoundError:
        return (run_folder / name).open("rb")


def predictions_table(file: BinaryIO, classes: list[str]) -> wandb.Table:
    """Return the predictions on the first test samples: id, image, prediction, truth, and a score for each class.

    With more than PICTURED_CLASSES the only score is that of the prediction, as a column each would be too many.
    """
    import wandb

    with np.load(file, allow_pickle=False) as arrays:
        rows = int(arrays["table_rows"])
        index, images, scores, truth = (arrays[name][:rows] for name in ("index", "images", "scores", "truth"))
        sample_names = named(arrays)
    names = classes or [str(label) for label in range(scores.shape[1])]
    if scores.shape[1] > PICTURED_CLASSES:
        columns, shown = ["score"], scores.max(axis=1, keepdims=True)
    else:
        columns, shown = [f"score_{i}" for i in range(scores.shape[1])], scores
    table = wandb.Table(columns=["id", "image", "prediction", "truth", *columns])
    for i, image in enumerate(images):
        picture = wandb.Image(image if image.shape[-1] == 3 else image[..., 0])
        prediction, label = names[int(scores[i].argmax())], names[int(truth[i])]
        table.add_data(sample_names[i] or int(index[i]), picture, prediction, label, *shown[i].tolist())
    return table


if __name__ == "__main__":
    sys.exit(main(Connection(int(sys.argv[1]))))
