"""Flyte tasks. Each resolves its inputs to paths, calls a function of the library, and wraps the results."""

from flytekitplugins.ddp.flyte import remove_execution_id_outside_tasks
from tasks import command_line, input_form

__all__ = ["input_form"]  # its import registers the forms

remove_execution_id_outside_tasks()
command_line.set_up_command()
