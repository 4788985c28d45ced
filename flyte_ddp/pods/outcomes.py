"""Prints the outcomes of tasks in local runs, the last one after all that flytekit prints of the workflow's outputs."""

from collections.abc import Iterator
from contextlib import contextmanager

from flyte_ddp.pods.platforms import is_in_pod

_held: list[str] | None = None  # the texts that wait; None: texts are printed at once


def print_outcome(text: str) -> None:
    """Print a text for the user of a local run; within :func:`hold_last_outcome` only when the next task starts."""
    print_held_outcome()
    if _held is not None:
        _held.append(text)
    elif not is_in_pod():
        print(text, flush=True)


def print_held_outcome() -> None:
    while _held:
        print(_held.pop(), flush=True)


@contextmanager
def hold_last_outcome() -> Iterator[None]:
    """Print the last outcome of the block at its end; sets global state."""
    global _held  # noqa: PLW0603 (a property of the process, which runs one command)
    _held = []
    try:
        yield
    finally:
        print_held_outcome()
        _held = None
