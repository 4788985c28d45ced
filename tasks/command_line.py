"""What a person sees of ``pyflyte``: errors as one panel, missing engines, and nothing left in the temporary folder.

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
from collections.abc import Iterator, Sequence
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

from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import RankError, StoppedError, UnreachableError, UserError, install_hint, unknown_name_error
from flyte_ddp.pods import environment
from flyte_ddp.pods.profiles import ENGINES
from flyte_ddp.release.policy import Policy
from flyte_ddp.settings import check_wandb_settings, read_settings

if TYPE_CHECKING:
    from flytekit.clis.sdk_in_container.run import RunLevelParams

CALL_SECONDS = 30.0  # time limit of a call to a cluster
EXAMPLES = {"--hp": '{"epochs": 3}', "--policy": '{"rule": "not_worse"}', "--inputs-file": '{"hp": {"epochs": 3}}'}


def set_up_command() -> None:
    """Set up the ``pyflyte`` command that imports our modules; do nothing in a pod or for another command."""
    context = click.get_current_context(silent=True)
    command = None if context is None else context.find_root().invoked_subcommand
    if context is None or command not in ("run", "register", "package"):
        return
    context.with_resource(show_errors_in_panels(context))
    remove_temporary_folders_at_exit()
    if command == "run" and "--help" in sys.argv:
        context.call_on_close(partial(print_fields, context))
    is_remote = getattr(context.obj, "is_remote", False)
    if is_remote or command != "run":  # a registration copies settings to pods
        environment.check_registration()
        check_wandb_settings(read_settings())
    if is_remote:
        from flytekit.clients.grpc_utils.deadline_interceptor import scoped_grpc_deadline

        context.with_resource(scoped_grpc_deadline(CALL_SECONDS))
        change_remote_run(context.obj)


def print_fields(context: click.Context) -> None:
    """Print name, default and meaning of each hyperparameter and policy's field, if the command takes them."""
    if context.invoked_subcommand is None:  # --help of the file
        return
    command = context.command.get_command(context, context.invoked_subcommand)  # type: ignore[attr-defined]
    for option, form in (("hp", Hyperparameters), ("policy", Policy)):
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


def unreadable_reason(error: Exception) -> str:
    """Return a short reason why a file of YAML, which JSON is too, cannot be read or parsed."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        where = f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
        return f"is not valid YAML: {error.problem}, {where}"
    return getattr(error, "strerror", None) or f"is not text: {error}"


def word_after_option(arguments: Sequence[str], option: str) -> str | None:
    rest = arguments[arguments.index(option) + 1 :] if option in arguments else []
    return rest[0] if rest else None


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
    except FlyteEntityNotFoundException:
        raise unknown_entity_error(context) from None
    except Exception as error:
        refusal = missing_path_error(error) or input_file_error(error)
        refusal = refusal or cluster_call_error(error, context.find_root().params.get("config") or "")
        if refusal is not None:
            raise refusal from None
        raise


def is_engine_installed(name: str) -> bool:
    """Return whether an engine is installed; if not, print to stderr how to install it."""
    plugin = ENGINES[name].flytekit_plugin
    with suppress(ModuleNotFoundError):  # no plugin of flytekit is installed
        if importlib.util.find_spec(plugin) is not None:  # a plugin needs its engine, so that is installed too
            return True
    text = f"{name}_training_wf is left out, as {plugin} is not installed: {install_hint(name)}"
    print(text, file=sys.stderr, flush=True)
    return False


def unknown_entity_error(context: click.Context) -> UserError:
    name = word_after_option(sys.argv, str(context.info_name)) or ""
    assert isinstance(context.command, click.Group)
    return unknown_name_error("workflow, task or launch plan", name, context.command.list_commands(context))


def missing_path_error(error: BaseException | None) -> UserError | None:
    """Return the error for a missing path, or a file in place of a folder; None if the exception has another cause."""
    while error is not None:
        if isinstance(error, TypeTransformerFailedError) and (found := re.search(r"t '(\w+)'", str(error))):
            given = word_after_option(sys.argv, f"--{found[1]}")  # it says "argument" or "input"
            if given is None:
                return None
            path = Path(given)
            kind = "file" if path.is_file() else "folder"
            what = f"is a {kind}" if given and path.exists() else "there is no such path"
            return UserError(f"--{found[1]} {given!r}: {what}; see --help for what it takes")
        error = error.__cause__ or error.__context__
    return None


def input_file_error(error: Exception) -> UserError | None:
    """Return the error for a file of --hp, --policy or --inputs-file that cannot be parsed; read each once more.

    The exception alone does not tell: a user's own code may raise the same.
    """
    if not isinstance(error, (OSError, UnicodeDecodeError, yaml.YAMLError)):
        return None
    for option, example in EXAMPLES.items():
        word = word_after_option(sys.argv, option)
        if word and not word.lstrip().startswith(("{", "[", "'")):
            try:
                yaml.safe_load(Path(word).read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError, yaml.YAMLError) as reason:
                return UserError(
                    f"{option} {word}: {unreadable_reason(reason)}; give a file of JSON or YAML, such as {example}"
                )
    return None


def cluster_call_error(error: BaseException | None, config: str) -> UserError | None:
    """Return the error for a failed call to a Flyte cluster, by the call's status; None if the exception is another."""
    from flytekit.configuration import PlatformConfig
    from flytekit.exceptions.system import FlyteSystemException
    from grpc import RpcError, StatusCode

    while error is not None and not isinstance(error, RpcError):
        # flytekit raises just this for a failed call; of another cause than a status only if it has tried to log in.
        if type(error) is FlyteSystemException and error.__cause__ and not isinstance(error.__cause__, RpcError):
            endpoint = PlatformConfig.auto(config or None).endpoint
            return UserError(f"{endpoint} asks for a login, which failed: {error.__cause__}; see admin in {config}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if error is None:
        return None
    endpoint, details = PlatformConfig.auto(config or None).endpoint, " ".join((error.details() or "").split())
    if error.code() is StatusCode.UNAVAILABLE:
        reason = details.rpartition(": ")[2] or "unavailable"
        return UnreachableError(f"nothing answers at {endpoint}: {reason}; start the cluster, or see admin in {config}")
    if error.code() is StatusCode.DEADLINE_EXCEEDED:
        return UnreachableError(f"{endpoint} is too slow: a call had no answer in time; try again later")
    return UserError(f"{endpoint} refuses a call ({error.code().name}): {details}; see admin in {config}")
