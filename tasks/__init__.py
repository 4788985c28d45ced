"""Flyte tasks: each resolves its inputs to paths, calls one function of the library, and wraps what that made."""

from tasks import command_line, input_form

__all__ = ["input_form"]  # which is imported for what it registers

command_line.set_up()
