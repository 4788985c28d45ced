"""Adapt the command ``flyte`` for users: an error of a user is one sentence.

The SDK writes a prefix before an error for each level of its commands, and finds errors of JSON and YAML with less
detail. However, the SDK imports this project's modules within click's context of the command, and click passes
exceptions to the resources of a context. The resource registered here translates the exceptions.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click

from flyte_ddp.core.errors import UserError
from flyte_ddp.schedules import arguments


def set_up_command() -> None:
    """Make errors of users sentences, and let ``--help`` print the fields of JSON.

    Does nothing unless the command ``flyte`` imports this project's modules.
    """
    context = click.get_current_context(silent=True)
    if context is None:
        return
    context.with_resource(show_errors(context))
    if "--help" in sys.argv:
        context.call_on_close(partial(print_fields, context))


def print_fields(context: click.Context) -> None:
    """Print the fields of each dataclass that the task accepts."""
    if context.invoked_subcommand is not None:  # not --help of the file
        command = context.command.get_command(context, context.invoked_subcommand)  # type: ignore[attr-defined]
        arguments.print_fields([parameter.name for parameter in command.get_params(context)])


@contextmanager
def show_errors(context: click.Context) -> Iterator[None]:
    """End the command after an exception of the block that the user can resolve, and print the text.

    Other exceptions pass unchanged.
    """
    try:
        yield
    except click.exceptions.Exit:
        raise
    except Exception as error:
        # The innermost level of the SDK's commands has added a prefix.
        original = error.__cause__ if type(error) is click.ClickException and error.__cause__ else error
        shown = original
        if not isinstance(original, UserError):
            shown = find_argument_error(context) or find_unknown_task_error(original, context) or original
        if not isinstance(shown, click.ClickException):
            raise
        shown.show()
        raise click.exceptions.Exit(shown.exit_code) from None


def find_argument_error(context: click.Context) -> UserError | None:
    """Return the error of an option with JSON or YAML that cannot be read or would be misread, or None.

    Options of tasks outside of this folder are not examined.
    """
    if Path(context.info_name or "").resolve().parent != Path(__file__).parent:
        return None
    try:
        arguments.refuse_misread_arguments()
        arguments.refuse_unreadable_arguments()
    except UserError as error:
        return error
    return None


def find_unknown_task_error(error: BaseException, context: click.Context) -> UserError | None:
    """Return a UserError if the name of an unknown task has caused ``error``, or None for any other cause."""
    if not isinstance(error, KeyError) or context.invoked_subcommand is not None:
        return None
    names = context.command.list_commands(context)  # type: ignore[attr-defined]
    return UserError(f"unknown task {error.args[0]!r}: choose one of {', '.join(names)}")
