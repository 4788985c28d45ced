"""The procedure of a run, the same for trainings and user-defined functions: prepare, resume, publish."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from flyte_ddp.core import results
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.progress import Progress
from flyte_ddp.core.runs import run_folder
from flyte_ddp.core.runs.work import Work


@contextmanager
def open_run(work: Work, folder: Path, outputs: Sequence[str], *, is_temporary: bool = False) -> Iterator[Work]:
    """Lock and prepare a run's folder, yield the work with the checkpoint to resume from, and publish a complete run.

    The block must launch the yielded work and write report.html. Before the block, deletes ``outputs``, sets
    metrics.jsonl back to the checkpoint, and prints the checkpoint's step, unless progress is off. Without a
    checkpoint, empties metrics.jsonl and removes ``results/``.

    A run is complete when report.html exists. If ranks write into ``unfinished/``, complete runs are moved from there
    into ``folder``: an earlier run before the block, and this run after the block, even after an error. An error of an
    incomplete run keeps checkpoints, metrics and results, and gets the step to resume from (``complete_error``).

    Args:
        work: The ranks' work without a checkpoint. Ranks write into ``folder``, or into ``unfinished/`` in it.
        folder: The folder of the run.
        outputs: Names of files in the output folder that are deleted at the start and after an error.
        is_temporary: Whether the folder is deleted after the block, so that no run can resume.

    Raises:
        UserError: Another run is in the folder, the folder cannot be written, or its ``results/`` belongs to no run.
        UserError: No existing checkpoint is readable, or the newest checkpoint is of another run.
    """
    output_folder, settings = work.output_folder, work.settings
    with run_folder.lock_run_folder(folder):
        if output_folder != folder:
            run_folder.move_complete_run_into_place(folder)
        if (output_folder / results.FOLDER).exists() and not (output_folder / run_folder.METRICS).exists():
            raise UserError(
                f"run folder {output_folder}: its {results.FOLDER}/ belongs to no run; move it, or name another folder"
            )
        output_folder.mkdir(parents=True, exist_ok=True)
        run_folder.remove_outputs(output_folder, (run_folder.TRACEBACK, *outputs))
        try:
            found = run_folder.rewind_to_newest_checkpoint(output_folder, work.identity)
            if found is not None:
                Progress(settings.progress).print_note(found.describe_resumption())
            yield replace(work, checkpoint=found)
        except BaseException as error:
            run_folder.complete_error(error, None if is_temporary else output_folder)
            if not (output_folder / run_folder.REPORT).exists():  # otherwise the run is complete
                with suppress(OSError):  # so that the first error is raised
                    run_folder.remove_outputs(output_folder, outputs)  # also partly written files of killed ranks
            raise
        finally:
            if output_folder != folder:
                run_folder.move_complete_run_into_place(folder)
