"""Add to the error of a failed run the step after which the run resumes, and the file with the details."""

import sys
import traceback
from pathlib import Path

from flyte_ddp.errors import RankError, describe_resumption, shorten_path
from flyte_ddp.runs.checkpoint import newest_step
from flyte_ddp.runs.run_folder import TRACEBACK, UNFINISHED
from flyte_ddp.user_code import find_modules_shadowing_stdlib


def add_failure_details(error: BaseException, run_folder: Path) -> None:
    """Set a RankError's ``step``, after which the run resumes, and ``file``, a new traceback.txt with the whole error.

    Reads both checkpoints whole. If the file cannot be written, prints its text to stderr. Adds to ``remark`` the
    modules in the working directory that hide Python's own: those that the details mention, or all of them if the error
    has no details and is not recoverable. A KeyboardInterrupt without text gets one with the step. Leaves other errors.
    """
    if isinstance(error, KeyboardInterrupt) and not error.args:
        error.args = (f"stopped by Ctrl-C; {describe_resumption(newest_step(run_folder / UNFINISHED))}",)
    if not isinstance(error, RankError):
        return
    did_not_begin = not error.details and not error.recoverable
    for name, path in find_modules_shadowing_stdlib().items():
        if did_not_begin or f"'{name}'" in error.details or str(path) in error.details:
            hidden = f"; {shorten_path(path)} hides Python's own module {name!r}, which may be the cause: rename it"
            error.remark += hidden
    error.step = newest_step(run_folder / UNFINISHED)
    if error.file is None:
        error.file = write_details(error, run_folder / UNFINISHED / TRACEBACK)


def write_details(error: RankError, path: Path) -> Path | None:
    """Write the error with its details and its cause to ``path`` and return the path; None without details and cause.

    If the file cannot be written, prints the text to stderr and returns None.
    """
    cause = "".join(traceback.format_exception(error.__cause__)) if error.__cause__ is not None else ""
    if not error.details and not cause:
        return None
    text = "\n\n".join(filter(None, (str(error), cause.rstrip())))
    try:
        path.write_text(f"{text}\n", encoding="utf-8", errors="backslashreplace")
    except OSError as reason:
        print(f"{path}: {reason.strerror}; the text of this file is:\n{text}", file=sys.stderr, flush=True)
        return None
    return path
