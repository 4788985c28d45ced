"""Print the outcomes of tasks in local runs.

The last outcome is printed after the workflow's outputs, which flytekit prints.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from flyte_ddp.core.errors import RankError, StoppedError
from flyte_ddp.core.text.formatting import escape_controls
from flyte_ddp.pods.platforms import is_in_pod

_held: list[str] | None = None  # texts that wait; None prints texts at once
_trains_anew = False  # whether the command would start another run if repeated


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


def promise_no_resumption() -> None:
    """Note that this command, if repeated, starts another run. Sets global state of the process."""
    global _trains_anew  # noqa: PLW0603 (a property of the process, which runs one command)
    _trains_anew = True


def describe_ended_run(error: KeyboardInterrupt | RankError | StoppedError) -> str:
    """Return why a command ended by an error or a signal, and from where the same command will resume."""
    reason = error.args[0] if isinstance(error, KeyboardInterrupt) and error.args else error
    if isinstance(reason, RankError) and not reason.recoverable:
        return reason.format_message("command")
    if _trains_anew:
        message = reason.message if isinstance(reason, (RankError, StoppedError)) else "stopped by Ctrl-C"
        return f"{message}; the same command will train anew"
    if isinstance(reason, (RankError, StoppedError)):
        return reason.format_message("command")  # the user knows the run by its command
    return "stopped by Ctrl-C; the same command will resume a training from its last checkpoint, if any"
