"""A run's folder: the files of the last finished run, and ``unfinished/`` for a run until it is finished.

A run locks the folder, so only a single run writes at a time. When the run's process dies, the kernel releases the
lock.
"""

import shutil
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from flyte_ddp import results
from flyte_ddp.errors import BusyError, RankError, UserError, describe_resumption, print_to_stderr
from flyte_ddp.files import SIDECAR, WEIGHTS, hold_lock, suggest_fix
from flyte_ddp.progress import Progress
from flyte_ddp.runs import checkpoint
from flyte_ddp.runs.checkpoint import Checkpoint, Identity
from flyte_ddp.runs.result_store import mirror_results
from flyte_ddp.settings import Settings

UNFINISHED = "unfinished"
METRICS = "metrics.jsonl"
PREDICTIONS = "predictions.npz"
REPORT = "report.html"  # written and moved last: a report in unfinished/ marks a complete run
OUTPUTS = (WEIGHTS, SIDECAR, PREDICTIONS, REPORT)
RUNG = "rung.json"  # in unfinished/: step and measure of a run that has stopped after a part of its steps
TRACEBACK = "traceback.txt"  # in the output folder, if a rank has raised
REPLACED = ".replaced"


@contextmanager
def hold_run_folder(folder: Path) -> Iterator[None]:
    """Lock the folder during the block, without waiting.

    The lock is a file in ``.locks`` beside the folder, and stays there. The folder need not exist.

    Raises:
        BusyError: Another process or run holds the lock.
        UserError: The folder cannot be written, at the start or later in the block.
    """
    with ExitStack() as lock:
        try:
            lock.enter_context(hold_lock(folder.resolve().parent / ".locks", folder.name, wait=False))
        except BlockingIOError:
            raise BusyError(
                f"run folder {folder}: another run is writing into it; wait for that run to end, or name another folder"
            ) from None
        except OSError as error:
            raise unwritable_folder_error(folder, error) from None
        try:
            yield
        except OSError as error:
            if isinstance(error.filename, str) and Path(error.filename).is_relative_to(folder):
                raise unwritable_folder_error(folder, error) from error
            raise


def unwritable_folder_error(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"run folder {folder}: {error.strerror}; it must be a writable folder: {suggest_fix(error, 'it')}, or name "
        "another folder (FLYTE_DDP_RUNS, or folder= of run_ranks)"
    )


def prepare_unfinished(folder: Path) -> Path:
    """Create the run folder with ``unfinished/``, and return the path of ``unfinished/``.

    The caller must hold the lock of the run folder. A complete run is first moved to the run folder. Of an interrupted
    run, metrics, checkpoints and results are kept, and other outputs and temporary files are deleted.
    """
    unfinished = folder / UNFINISHED
    publish_if_complete(folder)
    unfinished.mkdir(parents=True, exist_ok=True)
    remove_outputs(unfinished)
    for name in (TRACEBACK, RUNG):
        (unfinished / name).unlink(missing_ok=True)
    (unfinished / METRICS).open("ab").close()
    return unfinished


def remove_outputs(unfinished: Path) -> None:
    """Remove a run's outputs and temporary files from ``unfinished/``.

    Keeps the metrics, which show why a run failed.
    """
    for name in reversed(OUTPUTS):  # the report first, because it marks a complete run
        (unfinished / name).unlink(missing_ok=True)
    remove_temporary_files(unfinished)


def remove_temporary_files(folder: Path, keep: str = "") -> None:
    """Remove temporary files of killed processes from the run's folder.

    Keeps the file named ``keep``, the checkpoints and the results.
    """
    inner = (*(folder / checkpoint.FOLDER).glob(".*.tmp"), *(folder / results.FOLDER).rglob(".*.tmp"))
    for path in (*folder.glob(".*.tmp"), *inner):
        if path.name != keep:
            path.unlink(missing_ok=True)


@contextmanager
def rewind_run(folder: Path, identity: Identity, settings: Settings, name: str) -> Iterator[Checkpoint | None]:
    """Set a run's folder back to its newest checkpoint, and yield the checkpoint (or None).

    Prints the checkpoint's step, unless progress is off. Without a checkpoint, empties metrics.jsonl and removes
    ``results/``. During the block copies results to ``settings.results_copy`` under ``name``. The end of the block
    waits up to 60 s for the copy. A RankError of the block gets the newest checkpoint's step, and a file with its
    traceback. A KeyboardInterrupt gets a text about how to resume.

    Raises:
        UserError: No existing checkpoint is readable, or the newest checkpoint is of another run.
        UserError: ``settings.results_copy`` contains the folder, or cannot be written to.
    """
    found = checkpoint.rewind_to_newest_checkpoint(folder, identity)
    if found is not None:
        Progress(settings.progress).print_note(found.describe_resumption())
    try:
        with mirror_results(folder, settings.results_copy, name, resuming=found is not None):
            yield found
    except BaseException as error:
        write_failure_details(error, folder)
        raise


def publish_if_complete(folder: Path) -> bool:
    """Move a complete run from ``unfinished/`` to the locked run folder, and delete ``unfinished/`` with its
    checkpoints.

    Replaces the files of the last run. If the run in ``unfinished/`` is not complete, moves nothing. If this process is
    killed meanwhile, the next call completes the move. Returns whether the run folder then holds a finished run.
    """
    unfinished = folder / UNFINISHED
    replaced = unfinished / REPLACED  # the last run's results; its existence shows that the move has begun
    if (unfinished / REPORT).exists():
        # The next run must not resume from these checkpoints.
        shutil.rmtree(unfinished / checkpoint.FOLDER, ignore_errors=True)
        if not replaced.exists():
            if (folder / results.FOLDER).exists():
                (folder / results.FOLDER).rename(replaced)
            else:
                replaced.mkdir()
        for name in (results.FOLDER, METRICS, *OUTPUTS):
            if (unfinished / name).exists():
                (unfinished / name).replace(folder / name)
    if replaced.exists():
        shutil.rmtree(unfinished, ignore_errors=True)
    return is_finished(folder)


def is_finished(folder: Path) -> bool:
    return all((folder / name).exists() for name in (METRICS, *OUTPUTS))


def write_failure_details(error: BaseException, output_folder: Path) -> None:
    """Complete an error with how to resume and where the details are.

    A KeyboardInterrupt gets a text about how to resume. A RankError gets the step of the newest checkpoint, and the
    file with the details. If the file cannot be written, prints the details to stderr.
    """
    if isinstance(error, KeyboardInterrupt) and not error.args:
        error.args = (f"stopped by Ctrl-C; {describe_resumption(checkpoint.newest_step(output_folder))}",)
    if not isinstance(error, RankError):
        return
    error.step = checkpoint.newest_step(output_folder)
    cause = "".join(traceback.format_exception(error.__cause__)) if error.__cause__ is not None else ""
    if error.file is None and (error.details or cause):
        path, text = output_folder / TRACEBACK, "\n\n".join(filter(None, (str(error), cause.rstrip())))
        try:
            path.write_text(f"{text}\n", encoding="utf-8", errors="backslashreplace")
            error.file = path
        except OSError as reason:
            print_to_stderr(f"{path} could not be written ({reason.strerror}); its text is:\n{text}")
