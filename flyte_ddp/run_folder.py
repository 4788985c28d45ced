"""A run's folder: what a finished run leaves in it, and ``unfinished/``, where one writes until it is finished.

So what is beside ``unfinished/`` is always of one run that came to its end, also while the same run is made anew, and
whatever ends that.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from flyte_ddp import checkpoint, results
from flyte_ddp.errors import UserError
from flyte_ddp.run_lock import hold

UNFINISHED = "unfinished"
METRICS = "metrics.jsonl"
PREDICTIONS = "predictions.npz"
REPORT = "report.html"  # written last, and taken over last: where it is in unfinished/, all is
OUTPUTS = ("model.pt", "model.json", PREDICTIONS, REPORT)
TRACEBACK = "traceback.txt"  # in unfinished/, where a rank has raised
REPLACED = ".replaced"


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Goes around a run: no other one writes into its folder meanwhile, whether it comes to its end or not.

    Raises:
        UserError: another one does, or no file can be made beside the folder.

    """
    with ExitStack() as stack:
        try:
            mine = stack.enter_context(hold(folder))
        except OSError as error:
            raise not_writable(folder, error) from None
        if not mine:
            raise UserError(f"run folder {folder}: another run is writing into it; wait for its end or name another")
        yield


def prepare_folder(folder: Path) -> Path:
    """Makes the run folder, and ``unfinished/`` in it without what looks like a result.

    Returns:
        ``unfinished/``, with the metrics and checkpoints of a run that was cut off, if there was one.

    Raises:
        UserError: nothing can be written.

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


def not_writable(folder: Path, error: OSError) -> UserError:
    """The error for a run folder in which nothing can be made."""
    return UserError(
        f"run folder {folder}: {error.strerror}; it must be writable, so mend its permissions or set FLYTE_DDP_RUNS"
    )


def remove_outputs(work: Path) -> None:
    """Removes whatever looks like a result, and what was being written when a process was killed.

    The metrics of a failed run stay, because they tell why it failed.
    """
    for name in reversed(OUTPUTS):
        (work / name).unlink(missing_ok=True)
    inner = (*(work / checkpoint.FOLDER).glob(".*.tmp"), *(work / results.FOLDER).rglob(".*.tmp"))
    for path in (*work.glob(".*.tmp"), *inner):
        path.unlink(missing_ok=True)


def settle(folder: Path) -> bool:
    """Has a run that came to its end take the place of the one before; it is called by whoever holds the folder.

    A process that is killed in between leaves the rest to the next one that calls this.

    Returns:
        Whether the folder then holds a finished run.

    """
    work = folder / UNFINISHED
    replaced = work / REPLACED  # once it is there, what has gone from here is in the folder
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
    """Whether the folder holds all that a finished run leaves, and so all that a cached result points to."""
    return all((folder / name).exists() for name in (METRICS, *OUTPUTS))
