"""Flyte tasks. Each resolves its inputs to paths, calls a function of the library, and wraps the results."""

import click

from flytekitplugins.ddp.flyte import remove_execution_id_outside_tasks
from tasks import input_form

__all__ = ["input_form"]  # importing it registers the forms

remove_execution_id_outside_tasks()
context = click.get_current_context(silent=True)
if context is not None and context.find_root().invoked_subcommand in ("run", "register", "package"):  # not in a pod
    from tasks.command_line import set_up_command

    set_up_command(context)
