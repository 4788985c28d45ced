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
from flyte_ddp.report.confusions import PICTURED_CLASSES
from flyte_ddp.report.run_records import named
from flyte_ddp.runs.run_folder import METRICS, PREDICTIONS, UNFINISHED

if TYPE_CHECKING:
    import wandb

POLL_SECONDS = 0.25
NOT_SENT = 2  # exit code: all is on disk, but not with the server
RETRY_SECONDS = 30.0  # between attempts to reach the server
OWN_VARIABLES = ("WANDB_ERROR_REPORTING", "WANDB_DATA_DIR")  # which wandb_run.py sets for this process
RENAMED = {"test_accuracy": "accuracy"}

Over = Callable[[float], bool]  # waits so many seconds for the end of the run; whether it has come


def main(launcher: Connection[Any, Any]) -> int:
    """Opens the run, feeds it to the end of training and closes it; returns the exit code.

    The launcher sends the arguments of ``wandb.init`` with the offset in metrics.jsonl at which this attempt begins,
    and one more message at the end of the run. It receives wandb's status.
    """
    parent = os.getppid()
    arguments, offset = launcher.recv()
    folder = Path(arguments["dir"])

    def over(seconds: float) -> bool:
        return launcher.poll(seconds) or os.getppid() != parent

    def tell(**status: str) -> None:
        with suppress(OSError):  # it was killed
            launcher.send(status)

    os.nice(0 if over(0) else 10)  # the ranks go first
    try:
        run = open_run(arguments, over, lambda error: tell(reason=logged(error)))
        tell(folder=str(Path(run.dir).parent), url=run.url or "", **({"reason": ""} if run.url else {}))
        # All of the run into an offline one: `wandb sync` replaces the run of this id by it, with what was sent before.
        first = 0 if arguments["mode"] == "offline" else offset
        trained, classes = feed(run, follow(folder, first, over))
        try:
            if trained:
                with opened(folder, PREDICTIONS) as file:
                    run.log({"predictions": table(file, classes)})
        except Exception as error:  # the run is worth keeping without it
            tell(reason=f"no table of predictions: {logged(error)}")
        run.finish(exit_code=0 if trained else 1)
    except TimeoutError:  # of ``finish``
        tell(reason="the server took too long")
        return NOT_SENT
    except Exception as error:
        tell(reason=logged(error))
        return 1
    return 0


def logged(error: Exception) -> str:
    """Its type and first line, not too long; the whole goes into the log."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0][:200]


def open_run(arguments: dict[str, Any], over: Over, failed: Callable[[Exception], None]) -> wandb.Run:
    """A wandb run whose x axis is the optimiser step; an offline one if no server is reached before training is over.

    An offline run that cannot be opened is opened without the user's ``WANDB_`` variables, of which wandb may refuse
    one, such as a tag of over 64 characters in ``WANDB_TAGS``.

    ``failed`` is called with the reason why a run cannot be opened: no key, no answer or a wrong one, a bad setting.
    """
    import wandb

    while True:
        try:
            run = wandb.init(**arguments)
            break
        except Exception as error:
            if arguments["mode"] == "offline" and not forget_wandb_variables():
                raise
            failed(error)
            wandb.teardown(exit_code=1)  # until then wandb takes the run's id for used
            if arguments["mode"] == "online" and over(RETRY_SECONDS):
                arguments["mode"] = "offline"
    # Records are logged as rows of their own with the step as a column, never with log(step=...): a train and an
    # evaluation record share a step, and a retry goes back to earlier ones, which wandb would drop.
    run.define_metric("*", step_metric="step")
    return run


def forget_wandb_variables() -> bool:
    """Delete the variables of wandb's that the user has set from this process's environment; False: there are none."""
    theirs = [name for name in os.environ if name.startswith("WANDB_") and name not in OWN_VARIABLES]
    for name in theirs:
        del os.environ[name]
    return bool(theirs)


def feed(run: wandb.Run, records: Iterable[dict[str, Any]]) -> tuple[bool, list[str]]:
    """Logs every record; returns whether training came to its end, and the names of the classes."""
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
            run.log({RENAMED.get(key, key): value for key, value in record.items() if value is not None})
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


def follow(run_folder: Path, offset: int, over: Over) -> Iterator[dict[str, Any]]:
    """A run's records from an offset of their file on, until it has ended and everything is read.

    A run that an engine starts again replaces the file by a shorter one; no record is yielded twice.
    """
    pending, ended, inode = b"", False, None
    given: set[int] = set()  # hashes of lines, which differ at least in their time
    while not ended:
        ended = over(POLL_SECONDS)  # before reading: what was written until then is read below
        try:
            file = opened(run_folder, METRICS)
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


def opened(run_folder: Path, name: str) -> BinaryIO:
    """A file of the run, from ``unfinished/`` while it trains, else from the run folder."""
    try:
        return (run_folder / UNFINISHED / name).open("rb")
    except FileNotFoundError:
        return (run_folder / name).open("rb")


def table(file: BinaryIO, classes: list[str]) -> wandb.Table:
    """Return the predictions on the first test samples: id, image, prediction, truth, and a score for each class.

    With more than PICTURED_CLASSES the only score is that of the prediction, as a column each would be too many.
    """
    import wandb

    with np.load(file, allow_pickle=False) as arrays:
        rows = int(arrays["table_rows"])
        index, images, scores, truth = (arrays[name][:rows] for name in ("index", "images", "scores", "truth"))
        called = named(arrays)
    names = classes or [str(label) for label in range(scores.shape[1])]
    if scores.shape[1] > PICTURED_CLASSES:
        columns, shown = ["score"], scores.max(axis=1, keepdims=True)
    else:
        columns, shown = [f"score_{i}" for i in range(scores.shape[1])], scores
    result = wandb.Table(columns=["id", "image", "prediction", "truth", *columns])
    for i, image in enumerate(images):
        picture = image if image.shape[-1] == 3 else image[..., 0]
        prediction, answer = names[int(scores[i].argmax())], names[int(truth[i])]
        result.add_data(called[i] or int(index[i]), wandb.Image(picture), prediction, answer, *shown[i].tolist())
    return result


if __name__ == "__main__":
    sys.exit(main(Connection(int(sys.argv[1]))))
