"""A run's folder: the files of the last finished run, and ``unfinished/`` for a run until it is finished.

A run locks the folder, so only a single run writes at a time. When the run's process dies, the kernel releases the
lock.
"""

import shutil
import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from flyte_ddp.core import results
from flyte_ddp.core.errors import BusyError, RankError, StoppedError, UserError, print_to_stderr
from flyte_ddp.core.files import SIDECAR, WEIGHTS, hold_lock, replace_file, suggest_write_fix
from flyte_ddp.core.machine.process import postpone_signal
from flyte_ddp.core.runs import checkpoint
from flyte_ddp.core.runs.checkpoint import Checkpoint, Handover, Identity

UNFINISHED = "unfinished"
METRICS = "metrics.jsonl"
PREDICTIONS = "predictions.npz"
REPORT = "report.html"  # written and moved last: a report in unfinished/ marks a complete run
OUTPUTS = (WEIGHTS, SIDECAR, PREDICTIONS, REPORT)
RUNG = "rung.json"  # in unfinished/: step and measure of a run that has stopped after a part of its steps
TRACEBACK = "traceback.txt"  # in the output folder, if a rank has raised
REPLACED = ".replaced"


@contextmanager
def lock_run_folder(folder: Path) -> Iterator[None]:
    """Lock a run's folder during the block, or raise BusyError. Does not wait.

    The lock is a file in ``.locks`` beside the folder, which is kept. The folder need not exist.

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
            raise make_unwritable_folder_error(folder, error) from None
        try:
            yield
        except OSError as error:
            if isinstance(error.filename, str) and Path(error.filename).is_relative_to(folder):
                raise make_unwritable_folder_error(folder, error) from error
            raise


def make_unwritable_folder_error(folder: Path, error: OSError) -> UserError:
    fix = suggest_write_fix(error, "it")
    return UserError(
        f"run folder {folder}: {error.strerror}; it must be a writable folder: {fix}, or name another folder "
        "(FLYTE_DDP_RUNS, or folder= of run_ranks)"
    )


def remove_outputs(folder: Path, names: Sequence[str]) -> None:
    """Remove the files ``names`` and all temporary files from a run's output folder."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
    remove_temporary_files(folder)


def remove_temporary_files(folder: Path, keep: str = "") -> None:
    """Remove the temporary files that killed processes have left in a run's folder, except the file named ``keep``."""
    inner = (*(folder / checkpoint.FOLDER).glob(".*.tmp"), *(folder / results.FOLDER).rglob(".*.tmp"))
    for path in (*folder.glob(".*.tmp"), *inner):
        if path.name != keep:
            path.unlink(missing_ok=True)


def rewind_to_newest_checkpoint(output_folder: Path, identity: Identity, keep: str = "") -> Checkpoint | None:
    """Find a run's newest readable checkpoint, cut metrics.jsonl back to its step, and return the checkpoint.

    The returned checkpoint has empty ``metrics``. Prints which other files are damaged. Removes temporary files of
    killed processes, except the file named ``keep``. If no checkpoint exists, empties metrics.jsonl, removes
    ``results/`` and returns None.

    Raises:
        UserError: No existing checkpoint is readable, or the newest checkpoint is of another run. Nothing is changed.
    """
    found, unreadable = checkpoint.find_newest_checkpoint(output_folder / checkpoint.FOLDER)
    reasons = " and ".join(f"{path} ({why})" for path, why in unreadable.items())
    if found is None and unreadable:
        raise UserError(
            f"cannot read the run's checkpoints {reasons}: make one readable to resume from it, or delete them "
            "to restart from scratch; metrics and results are unchanged"
        )
    if found is not None:
        if unreadable:
            print_to_stderr(f"checkpoint {reasons} cannot be used; using {found.path.name} of step {found.step:,}")
        checkpoint.check_same_run(found, identity)
    remove_temporary_files(output_folder, keep)
    with replace_file(output_folder / METRICS) as file:
        file.write(found.metrics if found else b"")
    if found is None:
        shutil.rmtree(output_folder / results.FOLDER, ignore_errors=True)
        return None
    return replace(found, metrics=b"")  # the ranks get the checkpoint, and do not need the metrics


def make_handover(output_folder: Path) -> Handover:
    """Return what another rank needs to write a checkpoint in rank 0's place. Reads metrics.jsonl and checkpoints."""
    newest = checkpoint.find_newest_checkpoint(output_folder / checkpoint.FOLDER, most_bytes=0)[0]
    path = checkpoint.choose_next_slot(output_folder / checkpoint.FOLDER, newest.path if newest else None)
    position = (newest.step, newest.epoch) if newest else (0, 0)
    return Handover(path.name, *position, (output_folder / METRICS).read_bytes())


@postpone_signal(signal.SIGINT)
@postpone_signal(signal.SIGTERM)
def move_complete_run_into_place(folder: Path) -> bool:
    """Move a complete run from ``unfinished/`` into the run folder, and delete ``unfinished/``.

    The caller must hold the folder's lock. Replaces the files of the last run, and deletes the checkpoints. If the run
    in ``unfinished/`` is not complete, moves nothing. If this process is killed meanwhile, the next call completes the
    move. Ctrl-C and SIGTERM wait for the end of the move. Returns whether the run folder now holds a finished run.
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


def complete_error(error: BaseException, output_folder: Path | None) -> None:
    """Add to a run's error from which step a new start resumes, and write the details to traceback.txt.

    Changes ``error``. A RankError gets the step of the newest checkpoint, and the path of ``traceback.txt`` in
    ``output_folder``. A KeyboardInterrupt gets a StoppedError as argument, whose text is shown. If the file cannot be
    written, prints the details to stderr. If the run's files are temporary (None), the step is 0.
    """
    if output_folder is None:
        if isinstance(error, (RankError, StoppedError)):
            error.step = 0
        return
    if isinstance(error, KeyboardInterrupt) and not error.args:
        error.args = (StoppedError("Ctrl-C", checkpoint.find_newest_step(output_folder)),)
    if not isinstance(error, RankError):
        return
    error.step = checkpoint.find_newest_step(output_folder)
    cause = "".join(traceback.format_exception(error.__cause__)) if error.__cause__ is not None else ""
    if error.file is None and (error.details or cause):
        path, text = output_folder / TRACEBACK, "\n\n".join(filter(None, (str(error), cause.rstrip())))
        try:
            path.write_text(f"{text}\n", encoding="utf-8", errors="backslashreplace")
            error.file = path
        except OSError as reason:
            print_to_stderr(f"{path} could not be written ({reason.strerror}); its text is:\n{text}")
