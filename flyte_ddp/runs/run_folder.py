"""A run's folder: what a finished run leaves in it, and ``unfinished/``, where a run writes until it is finished.

So all that is beside ``unfinished/`` comes from one finished run, also while the same run is made again, and however
that ends.
"""

import shutil
from pathlib import Path

from flyte_ddp import results
from flyte_ddp.runs import checkpoint
from flyte_ddp.runs.run_lock import not_writable

UNFINISHED = "unfinished"
METRICS = "metrics.jsonl"
PREDICTIONS = "predictions.npz"
REPORT = "report.html"  # written and moved last: if it is in unfinished/, all is there
OUTPUTS = ("model.pt", "model.json", PREDICTIONS, REPORT)
TRACEBACK = "traceback.txt"  # in unfinished/, if a rank has raised
REPLACED = ".replaced"


def prepare_folder(folder: Path) -> Path:
    """Make the run folder, and in it ``unfinished/``; return the latter.

    Of a run that was cut off, only metrics, checkpoints and results of users' code stay in ``unfinished/``.

    Raises:
        UserError: nothing can be written there.
    """
    work = folder / UNFINISHED
    try:
        settle(folder)
        work.mkdir(parents=True, exist_ok=True)
        remove_outputs(work)
        (work / TRACEBACK).unlink(missing_ok=True)
        (work / METRICS).open("ab").close()
    except OSError as error:
        raise not_writable(folder, error) from None
    return work


def remove_outputs(work: Path) -> None:
    """Remove outputs, and files that were being written when a process was killed; metrics tell why a run failed."""
    for name in reversed(OUTPUTS):
        (work / name).unlink(missing_ok=True)
    inner = (*(work / checkpoint.FOLDER).glob(".*.tmp"), *(work / results.FOLDER).rglob(".*.tmp"))
    for path in (*work.glob(".*.tmp"), *inner):
        path.unlink(missing_ok=True)


def settle(folder: Path) -> bool:
    """Replace the results of the run before by those of a run that is complete; the caller must hold the folder.

    If it is killed, the next call does the rest. Returns whether the folder then holds a finished run.
    """
    work = folder / UNFINISHED
    replaced = work / REPLACED  # once it exists, files that are missing here have been moved to the run folder
    if (work / REPORT).exists():
        shutil.rmtree(work / checkpoint.FOLDER, ignore_errors=True)  # the next run does not go on from here
        if not replaced.exists():
            if (folder / results.FOLDER).exists():
                (folder / results.FOLDER).rename(replaced)
            else:
                replaced.mkdir()
        for name in (results.FOLDER, METRICS, *OUTPUTS):
            if (work / name).exists():
                (work / name).replace(folder / name)
    if replaced.exists():
        shutil.rmtree(work, ignore_errors=True)
    return is_finished(folder)


def is_finished(folder: Path) -> bool:
    """Return whether the folder holds all that a finished run leaves, which is all that a cached result points to."""
    return all((folder / name).exists() for name in (METRICS, *OUTPUTS))
