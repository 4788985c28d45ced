"""Flyte tasks: each resolves its inputs to paths, calls one function of the library, and wraps what that made."""

from tasks import command_line

command_line.watch()
