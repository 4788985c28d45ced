"""What the error of a failed run says: from which step the run will go on, and which file holds the details."""

import sys
import traceback
from pathlib import Path

from flyte_ddp.errors import RankError, from_here, where_it_goes_on
from flyte_ddp.runs import checkpoint
from flyte_ddp.runs.run_folder import TRACEBACK, UNFINISHED
from flyte_ddp.user_code import modules_hiding_pythons


def explain(error: BaseException, run_folder: Path) -> None:
    """Set an error's ``step``, after which the run will resume, and ``file``, which is written with all details.

    Adds to the remark the user's modules that may have been imported instead of Python's own.
    """
    if isinstance(error, RankError):
        name_hiding_modules(error)
        error.step = newest_step(run_folder)
        if error.file is None:
            error.file = write_details(error, run_folder / UNFINISHED / TRACEBACK)
    elif isinstance(error, KeyboardInterrupt) and not error.args:
        error.args = (f"stopped by Ctrl-C; {where_it_goes_on(newest_step(run_folder))}",)


def name_hiding_modules(error: RankError) -> None:
    """Add to the remark the user's modules that hide Python's, where the error names one or a rank did not begin."""
    did_not_begin = not error.details and not error.recoverable
    for name, path in modules_hiding_pythons().items():
        if did_not_begin or f"'{name}'" in error.details or str(path) in error.details:
            error.remark += f"; {from_here(path)} hides Python's own module {name!r}, which may be the cause: rename it"


def newest_step(run_folder: Path) -> int | None:
    """Return the step of the newest checkpoint below ``run_folder``; see :func:`checkpoint.newest_step`."""
    return checkpoint.newest_step(run_folder / UNFINISHED)


def write_details(error: RankError, path: Path) -> Path | None:
    """Write an error with its cause, and return the path; None if there is no more than its message.

    Where the file cannot be written, its text is printed to stderr.
    """
    cause = "".join(traceback.format_exception(error.__cause__)) if error.__cause__ is not None else ""
    if not error.details and not cause:
        return None
    text = "\n\n".join(filter(None, (str(error), cause.rstrip())))
    try:
        path.write_text(f"{text}\n", encoding="utf-8", errors="backslashreplace")
    except OSError as reason:
        print(f"{path}: {reason.strerror}, so its text follows here\n{text}", file=sys.stderr, flush=True)
        return None
    return path
