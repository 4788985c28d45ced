"""Adapt ``pyflyte`` for users: errors as panels, install hints for engines, help on fields, and no leftover files.

The command line is parsed by flytekit before any code of this project runs, and most user errors would end in a
traceback. However, flytekit imports this project's modules within click's context of the command. Since version 8.3,
click passes exceptions to the resources of a context. The resource registered here translates the exceptions.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
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

from flyte_ddp.core.errors import RankError, StoppedError, UnreachableError, UserError, install_hint
from flyte_ddp.pods import environment, outcomes
from flyte_ddp.pods.profiles import ENGINES
from flyte_ddp.schedules import arguments
from flyte_ddp.schedules.arguments import FILE_OPTIONS, list_argument_pairs, refuse_misread_arguments
from flyte_ddp.schedules.yaml_files import describe_read_error

if TYPE_CHECKING:
    from flytekit.clis.sdk_in_container.run import RunLevelParams

CALL_SECONDS = 30.0  # time limit of a call to a cluster


def set_up_command(context: click.Context) -> None:
    """Set up the ``pyflyte`` command (run, register or package) that imports this project's modules.

    During the command, users' errors become panels. Options of files are checked, and ``--help`` prints fields of JSON.
    A remote run or a registration checks the settings for pods, and sends all sources. At the exit, deletes flytekit's
    temporary folders.

    Raises:
        UserError: An input would be misread, or a setting is not allowed in pods.
    """
    command = context.find_root().invoked_subcommand
    context.with_resource(show_errors_in_panels(context))
    remove_temporary_folders_at_exit()
    if command == "run":
        refuse_misread_arguments()
    if command == "run" and "--help" in sys.argv:
        context.call_on_close(partial(print_fields, context))
    is_remote = getattr(context.obj, "is_remote", False)
    if is_remote or command != "run":  # a registration copies settings to pods
        environment.check_settings_for_pods()
        exclude_virtual_environment()
    else:
        context.with_resource(outcomes.hold_last_outcome())  # printed after flytekit's outputs
    if is_remote:
        from flytekit.clients.grpc_utils.deadline_interceptor import scoped_grpc_deadline

        context.with_resource(scoped_grpc_deadline(CALL_SECONDS))
        adapt_remote_run(context.obj)


def exclude_virtual_environment() -> None:
    """Make flytekit skip .venv when packing sources, because checking each file there takes seconds.

    Changes a global variable of flytekit.
    """
    script_mode.EXCLUDE_DIRS.add(".venv")


def print_fields(context: click.Context) -> None:
    """Print the fields of each dataclass that the command accepts."""
    if context.invoked_subcommand is None:  # --help of the file
        return
    command = context.command.get_command(context, context.invoked_subcommand)  # type: ignore[attr-defined]
    arguments.print_fields([parameter.name for parameter in command.params])


def adapt_remote_run(parameters: RunLevelParams) -> None:
    """Change the ``parameters`` of ``pyflyte run --remote``: send all sources, and add the settings to the version.

    Also passes --overwrite-cache to pods as an environment variable.
    """
    if parameters.copy == CopyFileDetection.LOADED_MODULES:  # only the modules imported so far
        parameters.copy = CopyFileDetection.ALL
    remote = parameters.remote_instance()  # register_script derives the version from sources alone
    remote.register_script = partial(remote.register_script, envs=environment.make_settings_digest_variable())
    if parameters.overwrite_cache:  # Flyte does not pass this flag to pods
        parameters.envvars = {**(parameters.envvars or {}), environment.FROM_SCRATCH_VARIABLE: "yes"}


def remove_temporary_folders_at_exit() -> None:
    """Register that flytekit's temporary folders are deleted at the exit of this process. They hold no outputs."""
    sandbox = Path(FlyteContextManager.current_context().file_access.local_sandbox_dir).parent
    for folder in {Path(flyte_tmp_dir), Path(Config.local_sandbox_path), sandbox}:
        if folder.parent == Path(tempfile.gettempdir()) and folder.name.startswith("flyte"):
            # Processes started by multiprocessing do not run atexit functions.
            Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=0)


@contextmanager
def show_errors_in_panels(context: click.Context) -> Iterator[None]:
    """Convert exceptions of the block that the user can resolve to click exceptions, which click shows as panels.

    Other exceptions pass unchanged.
    """
    try:
        yield
    except (KeyboardInterrupt, RankError, StoppedError) as error:
        raise click.ClickException(outcomes.describe_ended_run(error)) from None
    except FlyteEntityNotFoundException as error:
        names = context.command.list_commands(context)  # type: ignore[attr-defined]
        raise UserError(f"{error}; choose one of {', '.join(names)}") from None
    except Exception as error:
        refusal = find_path_error(error) or find_input_file_error(error)
        refusal = refusal or find_cluster_error(error, context.find_root().params.get("config") or "")
        if refusal is not None:
            raise refusal from None
        raise


def describe_missing_engine(name: str) -> str:
    """Return an error text with an install hint if an engine is not installed, else ""."""
    plugin = ENGINES[name].flytekit_plugin
    with suppress(ModuleNotFoundError):  # no plugin of flytekit is installed
        if importlib.util.find_spec(plugin) is not None:  # the plugin depends on the engine
            return ""
    return f"{plugin} is not installed: {install_hint(name)}"


def find_path_error(error: Exception) -> UserError | None:
    """Return a UserError if an option with a missing path has caused ``error``, or None for any other cause."""
    found = re.match(r"Failed argument '(\w+)'", str(error)) if isinstance(error, TypeTransformerFailedError) else None
    words = [word for option, word in list_argument_pairs() if found and option == f"--{found[1]}"]
    return UserError(f"--{found[1]} {words[0]!r}: no such file or folder; see --help") if found and words else None


def find_input_file_error(error: Exception) -> UserError | None:
    """Return a UserError if a file of FILE_OPTIONS that cannot be parsed has caused ``error``, or None.

    Reads each file once more, because user code may raise the same exception.
    """
    if not isinstance(error, (OSError, UnicodeDecodeError, yaml.YAMLError)):
        return None
    for option, word in list_argument_pairs():
        if option in FILE_OPTIONS and not word.lstrip().startswith(("{", "[", "'")):
            try:
                yaml.safe_load(Path(word).read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError, yaml.YAMLError) as reason:
                return UserError(f"{option} {word}: {describe_read_error(reason)}; give a JSON or YAML file")
    return None


def find_cluster_error(error: BaseException | None, config: str) -> UserError | None:
    """Return a UserError if a failed call to a Flyte cluster has caused ``error``, or None.

    If the cluster does not answer, the UserError is an UnreachableError. ``config`` is the path of Flyte's
    configuration file (empty: the usual places).
    """
    from flytekit.configuration import PlatformConfig
    from grpc import RpcError, StatusCode

    while error is not None and not isinstance(error, RpcError):
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if error is None:
        return None
    endpoint = PlatformConfig.auto(config or None).endpoint
    said = f"{error.code().name}: {' '.join((error.details() or '').split())}"
    if error.code() in (StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED):
        return UnreachableError(f"{endpoint} does not answer ({said}); check admin in {config}, or try again later")
    return UserError(f"{endpoint} rejected a call ({said}); check admin in {config}")
