"""Print the outcomes of tasks in local runs.

The last outcome is printed after the workflow's outputs, which flytekit prints.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from flyte_ddp.core.errors import RankError, StoppedError
from flyte_ddp.core.text.formatting import escape_controls
from flyte_ddp.pods.platforms import is_in_pod

_held: list[str] | None = None  # texts that wait; None prints texts at once
_is_resumable = True  # whether the command, if repeated, resumes its run


def print_outcome(text: str) -> None:
    """Print a text for the user of a local run. In a pod, prints nothing.

    Within a block of :func:`hold_last_outcome`, the text is held back until the next outcome, the next task, or the
    end of the block.
    """
    print_held_outcome()
    text = escape_controls(text)
    if _held is not None:
        _held.append(text)
    elif not is_in_pod():
        print(text, flush=True)


def print_held_outcome() -> None:
    """Print the text that :func:`print_outcome` holds back, if any."""
    while _held:
        print(_held.pop(), flush=True)


@contextmanager
def hold_last_outcome() -> Iterator[None]:
    """Hold back each outcome of the block, until the next outcome or the end of the block.

    Sets global state of the process, so blocks cannot be nested.
    """
    global _held  # noqa: PLW0603 (a property of the process, which runs one command)
    _held = []
    try:
        yield
    finally:
        print_held_outcome()
        _held = None


def note_resumability(is_resumable: bool) -> None:
    """Note whether this command, if repeated, resumes its run. Sets global state of the process."""
    global _is_resumable  # noqa: PLW0603 (a property of the process, which runs one command)
    _is_resumable = is_resumable


def describe_ended_run(error: KeyboardInterrupt | RankError | StoppedError) -> str:
    """Return why a command ended by an error or a signal, and from where the same command will resume.

    If the last call of :func:`note_resumability` was with False, the text says that the same command will train anew.
    """
    reason = error.args[0] if isinstance(error, KeyboardInterrupt) and error.args else error
    if isinstance(reason, (RankError, StoppedError)):  # the user knows the run by its command
        return reason.format_message("command", is_resumable=_is_resumable)
    next_time = "resume a training from its last checkpoint, if any" if _is_resumable else "train anew"
    return f"stopped by Ctrl-C; the same command will {next_time}"
