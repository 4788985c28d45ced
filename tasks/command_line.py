"""What a person sees of ``pyflyte``: errors as one panel, missing engines, hyperparameters in its help, no litter.

flytekit reads the command line before any code of ours runs, and shows most mistakes in it as a traceback. But it
imports our modules within click's context of the command, and click (since 8.3) passes exceptions to a context's
resources. So a resource of ours translates the exceptions.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, pairwise
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING

import click
import yaml
from flytekit import FlyteContextManager
from flytekit.configuration import Config
from flytekit.constants import CopyFileDetection
from flytekit.core.data_persistence import flyte_tmp_dir
from flytekit.core.type_engine import TypeTransformerFailedError
from flytekit.exceptions.user import FlyteEntityNotFoundException
from flytekit.tools import script_mode

from flyte_ddp.checks.parsing import MisreadError
from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import RankError, StoppedError, UnreachableError, UserError, install_hint
from flyte_ddp.monitor.source import WindowSource
from flyte_ddp.pods import environment, outcomes
from flyte_ddp.pods.profiles import ENGINES
from flyte_ddp.release.policy import Policy
from flyte_ddp.sweep.space import Sweep
from tasks.yaml_files import load_strictly, unreadable_reason

if TYPE_CHECKING:
    from flytekit.clis.sdk_in_container.run import RunLevelParams

CALL_SECONDS = 30.0  # time limit of a call to a cluster
FILE_OPTIONS = ("--hp", "--policy", "--sweep", "--window", "--inputs-file")  # which may name files of JSON or YAML


def set_up_command(context: click.Context) -> None:
    """Set up the ``pyflyte`` command that imports our modules: run, register or package."""
    command = context.find_root().invoked_subcommand
    context.with_resource(show_errors_in_panels(context))
    remove_temporary_folders_at_exit()
    if command == "run":
        for option, word in list_options():
            refuse_misread_input(option, word)
    if command == "run" and "--help" in sys.argv:
        context.call_on_close(partial(print_fields, context))
    is_remote = getattr(context.obj, "is_remote", False)
    if is_remote or command != "run":  # a registration copies settings to pods
        environment.check_settings_for_pods()
        leave_out_virtual_environment()
    else:
        context.with_resource(outcomes.hold_last_outcome())  # flytekit then prints the outputs
    if is_remote:
        from flytekit.clients.grpc_utils.deadline_interceptor import scoped_grpc_deadline

        context.with_resource(scoped_grpc_deadline(CALL_SECONDS))
        change_remote_run(context.obj)


def leave_out_virtual_environment() -> None:
    """Make flytekit skip .venv when packing sources. Asking for each file there whether it is ignored takes seconds."""
    script_mode.EXCLUDE_DIRS.add(".venv")


def print_fields(context: click.Context) -> None:
    """Print name, default and meaning of the fields of each dataclass that the command takes."""
    if context.invoked_subcommand is None:  # --help of the file
        return
    command = context.command.get_command(context, context.invoked_subcommand)  # type: ignore[attr-defined]
    for option, form in (("hp", Hyperparameters), ("policy", Policy), ("sweep", Sweep), ("window", WindowSource)):
        if option in [parameter.name for parameter in command.params]:
            text = click.HelpFormatter(width=shutil.get_terminal_size().columns)
            fields = dataclasses.fields(form)
            with text.section(f"What the JSON of --{option} may have"):
                text.write_dl([(each.name, f"{each.metadata['doc']} [{json.dumps(each.default)}]") for each in fields])
            click.echo(text.getvalue())


def change_remote_run(parameters: RunLevelParams) -> None:
    """Change parameters of ``pyflyte run --remote``: send all sources, and make settings part of the version."""
    if parameters.copy == CopyFileDetection.LOADED_MODULES:  # only those imported by now
        parameters.copy = CopyFileDetection.ALL
    remote = parameters.remote_instance()  # whose method makes the version from sources alone
    remote.register_script = partial(remote.register_script, envs=environment.settings_digest())
    if parameters.overwrite_cache:  # Flyte does not tell pods
        parameters.envvars = {**(parameters.envvars or {}), environment.FROM_SCRATCH_VARIABLE: "yes"}


def remove_temporary_folders_at_exit() -> None:
    """Register the removal of flytekit's temporary folders at the exit of this process; they hold no output of ours."""
    sandbox = Path(FlyteContextManager.current_context().file_access.local_sandbox_dir).parent
    for folder in {Path(flyte_tmp_dir), Path(Config.local_sandbox_path), sandbox}:
        if folder.parent == Path(tempfile.gettempdir()) and folder.name.startswith("flyte"):
            # Processes that multiprocessing starts do not run functions of atexit.
            Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=0)


@contextmanager
def show_errors_in_panels(context: click.Context) -> Iterator[None]:
    """Replace exceptions of the block that a person can fix by a click exception, shown as a panel; let others pass."""
    try:
        yield
    except (KeyboardInterrupt, RankError, StoppedError) as error:
        again = "stopped by Ctrl-C; the same run begins again, after its last checkpoint if there is one"
        text = str(error) or again if isinstance(error, KeyboardInterrupt) else error.format_message()
        # Whoever typed a command knows the run by the command.
        raise click.ClickException(text.replace("the same run ", "the same command ")) from None
    except FlyteEntityNotFoundException as error:
        names = context.command.list_commands(context)  # type: ignore[attr-defined]
        raise UserError(f"{error}; choose one of {', '.join(names)}") from None
    except Exception as error:
        refusal = unfit_path_error(error) or input_file_error(error)
        refusal = refusal or cluster_call_error(error, context.find_root().params.get("config") or "")
        if refusal is not None:
            raise refusal from None
        raise


def describe_missing_engine(name: str) -> str:
    """Return that an engine is not installed, and how to install it, or "" if it is installed."""
    plugin = ENGINES[name].flytekit_plugin
    with suppress(ModuleNotFoundError):  # no plugin of flytekit is installed
        if importlib.util.find_spec(plugin) is not None:  # a plugin needs its engine, so that is installed too
            return ""
    return f"{plugin} is not installed: {install_hint(name)}"


def unfit_path_error(error: Exception) -> UserError | None:
    """Return the error for an option whose path flytekit cannot take; None if the exception has another cause."""
    found = re.match(r"Failed argument '(\w+)'", str(error)) if isinstance(error, TypeTransformerFailedError) else None
    words = [word for option, word in list_options() if found and option == f"--{found[1]}"]
    return UserError(f"--{found[1]} {words[0]!r}: is no such file or folder; see --help") if found and words else None


def list_options() -> Iterator[tuple[str, str]]:
    """Return each pair of neighbouring words of the command line, where ``--option=value`` is two words."""
    split = (word.split("=", 1) if word.startswith("--") else [word] for word in sys.argv)
    return pairwise(chain.from_iterable(split))


def refuse_misread_input(option: str, word: str) -> None:
    """Raise UserError for JSON or YAML of FILE_OPTIONS that flytekit would understand otherwise than it is written.

    Does nothing if a text cannot be read or parsed, because flytekit reports the reason.
    """
    if option not in FILE_OPTIONS:
        return
    is_text = word.lstrip().startswith("{")
    try:
        values = load_strictly(word if is_text else Path(word).read_text(encoding="utf-8"))
    except MisreadError as error:
        raise UserError(f"{option if is_text else f'{option} {word}'}: {error.message}") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return
    if option == "--inputs-file" and isinstance(values, dict):
        for name, value in values.items():
            refuse_misread_input(f"--{name}", str(value))


def input_file_error(error: Exception) -> UserError | None:
    """Return the error for a file of FILE_OPTIONS that cannot be parsed; read each once more.

    The exception alone does not tell: a user's own code may raise the same.
    """
    if not isinstance(error, (OSError, UnicodeDecodeError, yaml.YAMLError)):
        return None
    for option, word in list_options():
        if option in FILE_OPTIONS and not word.lstrip().startswith(("{", "[", "'")):
            try:
                yaml.safe_load(Path(word).read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError, yaml.YAMLError) as reason:
                return UserError(f"{option} {word}: {unreadable_reason(reason)}; give a file of JSON or YAML")
    return None


def cluster_call_error(error: BaseException | None, config: str) -> UserError | None:
    """Return the error for a failed call to a Flyte cluster, by the call's status; None if the exception is another."""
    from flytekit.configuration import PlatformConfig
    from grpc import RpcError, StatusCode

    while error is not None and not isinstance(error, RpcError):
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if error is None:
        return None
    endpoint = PlatformConfig.auto(config or None).endpoint
    said = f"{error.code().name}: {' '.join((error.details() or '').split())}; see admin in {config}"
    if error.code() in (StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED):
        return UnreachableError(f"{endpoint} does not answer ({said}, or try again later)")
    return UserError(f"{endpoint} refuses a call ({said})")
