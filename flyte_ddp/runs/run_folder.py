"""A run's folder: the files of the last finished run, and ``unfinished/``, where a run writes until it is finished.

So all files beside ``unfinished/`` are of one finished run, also while the same run is repeated, and however that ends.
"""

import shutil
from pathlib import Path

from flyte_ddp import results
from flyte_ddp.runs import checkpoint
from flyte_ddp.runs.run_lock import unwritable_folder_error

UNFINISHED = "unfinished"
METRICS = "metrics.jsonl"
PREDICTIONS = "predictions.npz"
REPORT = "report.html"  # written and moved last: if it is in unfinished/, the run in it is complete
OUTPUTS = ("model.pt", "model.json", PREDICTIONS, REPORT)
TRACEBACK = "traceback.txt"  # in unfinished/, if a rank has raised
REPLACED = ".replaced"


def prepare_folder(folder: Path) -> Path:
    """Create the run folder with ``unfinished/`` and return the path of ``unfinished/``.

    Call it inside :func:`hold_run_folder`. First publishes a complete run in ``unfinished/``; of an interrupted one
    only metrics, checkpoints and results of users' code stay. Without metrics an empty metrics.jsonl is created. Raises
    UserError if nothing can be written there.
    """
    work = folder / UNFINISHED
    try:
        publish_if_complete(folder)
        work.mkdir(parents=True, exist_ok=True)
        remove_outputs(work)
        (work / TRACEBACK).unlink(missing_ok=True)
        (work / METRICS).open("ab").close()
    except OSError as error:
        raise unwritable_folder_error(folder, error) from None
    return work


def remove_outputs(work: Path) -> None:
    """Remove a run's outputs and temporary files from ``unfinished/``. Metrics stay: they tell why a run failed."""
    outputs = [work / name for name in reversed(OUTPUTS)]  # the report first, which marks a complete run
    inner = (*(work / checkpoint.FOLDER).glob(".*.tmp"), *(work / results.FOLDER).rglob(".*.tmp"))
    for path in (*outputs, *work.glob(".*.tmp"), *inner):
        path.unlink(missing_ok=True)


def publish_if_complete(folder: Path) -> bool:
    """Move a complete run from ``unfinished/`` to the run folder; return whether the folder then holds a finished run.

    Lock the folder before, by ``hold_run_folder`` or ``reserve_run_folder``. Replaces the files of the last run and
    removes ``unfinished/`` with the checkpoints. Does nothing if the run in it is not complete. After a kill in
    between, the next call does the rest.
    """
    work = folder / UNFINISHED
    replaced = work / REPLACED  # the last run's results; if it exists, moving has begun
    if (work / REPORT).exists():
        shutil.rmtree(work / checkpoint.FOLDER, ignore_errors=True)  # so that the next run does not resume from them
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
    """Return whether the folder holds all files of a finished run; a cached result refers to these files."""
    return all((folder / name).exists() for name in (METRICS, *OUTPUTS))
