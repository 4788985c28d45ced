"""What a person sees of ``pyflyte``: errors as one panel, and nothing left in the temporary folder.

flytekit reads the command line before any code of ours runs, and answers most of what can be wrong in it with a
traceback. Our modules are imported under click's context of the command, though, and click shows an exception to the
resources of a context that it leaves (since 8.3). So what is raised is translated there. For ``pyflyte run --remote``
the options of the command, and the method of flytekit's remote that registers a script, are changed.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING

import click
import yaml
from flytekit import FlyteContextManager
from flytekit.configuration import Config
from flytekit.constants import CopyFileDetection
from flytekit.core import local_cache
from flytekit.core.data_persistence import flyte_tmp_dir
from flytekit.core.type_engine import TypeTransformerFailedError
from flytekit.exceptions.user import FlyteEntityNotFoundException

from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import RankError, StoppedError, UserError, unknown_name
from flyte_ddp.settings import check_wandb
from tasks import cluster, engines, pods

if TYPE_CHECKING:
    from flytekit.clis.sdk_in_container.run import RunLevelParams

EXAMPLE = '{"hp": {"epochs": 3}}'


def watch() -> None:
    """Sets this up for the ``pyflyte`` command that imports our modules; does nothing in a pod or without a command."""
    context = click.get_current_context(silent=True)
    command = None if context is None else context.find_root().invoked_subcommand
    if context is not None and command in ("run", "register", "package"):
        context.with_resource(in_panels(context))
        remove_folders_at_end()
        is_remote = getattr(context.obj, "is_remote", False)
        if is_remote or command != "run":  # pods get the settings that are here
            check_wandb()
        if is_remote:
            from flytekit.clients.grpc_utils.deadline_interceptor import scoped_grpc_deadline

            context.with_resource(scoped_grpc_deadline(cluster.CALL_SECONDS))
            send_what_pods_need(context.obj)


def send_what_pods_need(chosen: RunLevelParams) -> None:
    """Has ``pyflyte run --remote`` send all sources, and register each profile and setting under a version of its own.

    By default flytekit sends the modules that it has seen imported, of which ours are few, so that commands start
    quickly; and its version is a digest of sources and of what it knows of the environment.
    """
    if chosen.copy == CopyFileDetection.LOADED_MODULES:
        chosen.copy = CopyFileDetection.ALL
    remote = chosen.remote_instance()
    remote.register_script = partial(remote.register_script, envs=pods.settings_digest())
    if chosen.overwrite_cache:  # Flyte does not tell pods
        chosen.envvars = {**(chosen.envvars or {}), pods.FROM_SCRATCH_VARIABLE: "yes"}


@contextmanager
def in_panels(context: click.Context) -> Iterator[None]:
    """Turns what a person can fix into an error that is shown as a panel; anything else stays as it is."""
    try:
        yield
    except KeyboardInterrupt as error:
        said = str(error) or "stopped by Ctrl-C; the same run begins again, after its last checkpoint if there is one"
        raise click.ClickException(for_shell(said)) from None
    except (RankError, StoppedError) as error:
        raise click.ClickException(for_shell(error.format_message())) from None
    except FlyteEntityNotFoundException:
        raise unknown_entity(context) from None
    except Exception as error:
        refusal = unreadable(error) or unfit(error) or unknown_option(error) or unusable_cache(error)
        refusal = refusal or cluster.refusal(error, context.find_root().params.get("config"))
        if refusal is not None:
            raise refusal from None
        raise


def for_shell(said: str) -> str:
    """A message for a person at a terminal: the same run is the same command."""
    return said.replace("the same run ", "the same command ")


def unknown_entity(context: click.Context) -> UserError:
    """The error for a name that is not in the file."""
    arguments = sys.argv[sys.argv.index(str(context.info_name)) + 1 :] if context.info_name in sys.argv else []
    name = next(iter(arguments), "")
    if name in engines.left_out:
        return UserError(engines.left_out[name])
    assert isinstance(context.command, click.Group)
    return unknown_name("workflow, task or launch plan", name, context.command.list_commands(context))


def unreadable(error: Exception) -> UserError | None:
    """The error for an input that flytekit could not read; None if that is not what happened."""
    from flytekit.clis.sdk_in_container.run import YamlFileReadingCommand
    from flytekit.interaction.click_types import JsonParamType

    for frame in reversed(cluster.frames(error)):
        if frame.f_code is JsonParamType._parse.__code__:
            option, value, example = frame.f_locals["param"].opts[0], str(frame.f_locals["value"]), '{"epochs": 3}'
            reason = why_no_text(error) or why_no_json(error, value)
        elif frame.f_code is YamlFileReadingCommand.parse_args.__code__:  # in which flytekit also parses all else
            option, given, example = "--inputs-file", after("--inputs-file"), EXAMPLE
            if given is None:
                return UserError("--inputs-file: a file must follow") if isinstance(error, IndexError) else None
            value, reason = given, why_no_text(error)
            if isinstance(error, AttributeError):  # of a list, say, which has no items() of names
                reason = "holds no object of inputs by their names"
        else:
            continue
        must = f"it must be a JSON object such as {example}, or a file of JSON or YAML that holds one"
        return UserError(f"{option} {value}: {reason}; {must}") if reason else None
    return None


def unfit(error: BaseException | None) -> UserError | None:
    """The error for a file or folder of another kind than the input takes; None if that is not what happened."""
    while error is not None:
        if isinstance(error, TypeTransformerFailedError) and (found := re.search(r"t '(\w+)'", str(error))):
            given = after(f"--{found[1]}")  # it says "argument" or "input"
            if given is None:
                return None
            path = Path(given)
            kind = "file" if path.is_file() else "folder"
            what = f"is a {kind}" if given and path.exists() else "there is no such path"
            return UserError(f"--{found[1]} {given!r}: {what}; see --help for what it takes")
        error = error.__cause__ or error.__context__
    return None


def unusable_cache(error: Exception) -> UserError | None:
    """Return the error for flytekit's local cache where its folder or disk fails; None if that is not what happened."""
    in_cache = any(frame.f_code.co_filename == local_cache.__file__ for frame in cluster.frames(error))
    if not in_cache or not isinstance(error, (OSError, sqlite3.Error)):
        return None
    reason = getattr(error, "strerror", None) or error
    return UserError(
        f"Flyte's local cache {Path(local_cache.CACHE_LOCATION).expanduser()}: {reason}; make it writable or free some "
        "space, set HOME to another folder, or set FLYTE_LOCAL_CACHE_ENABLED=false and train without it"
    )


def why_no_text(error: Exception) -> str:
    """What is wrong with a file, in a few words; empty if that is not what the error is about."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, UnicodeDecodeError):
        return f"is not text in UTF-8 (byte {error.start:,})"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        where = f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
        return f"is not valid YAML: {error.problem}, {where}"
    return f"is not valid YAML: {error}" if isinstance(error, yaml.YAMLError) else ""


def why_no_json(error: Exception, value: str) -> str:
    """What is wrong with a file of JSON, or with its name; empty where click says enough."""
    if not isinstance(error, click.BadParameter) or value.lstrip().startswith(("{", "[")):
        return ""
    if not Path(value).exists():
        return "there is no such file"
    return f"is not valid JSON: {error.message.rpartition('error: ')[2]}"


def unknown_option(error: Exception) -> UserError | None:
    """The error for an unknown option, or key of an inputs file; None where click says enough."""
    if not isinstance(error, click.NoSuchOption):
        return None
    name, path = error.option_name.lstrip("-"), after("--inputs-file")
    source = f"--inputs-file {path}" if path else error.option_name
    if name in {field.name for field in dataclasses.fields(Hyperparameters)}:
        example = EXAMPLE if path else "--hp '{\"epochs\": 3}'"
        return UserError(f"{source}: {name} is a hyperparameter, and these are given as in {example}")
    if path is None or error.ctx is None:
        return None
    inputs = [str(parameter.name) for parameter in error.ctx.command.params if parameter.name != "inputs_file"]
    return UserError(f"{source}: {unknown_name('input', name, inputs).message}")


def after(option: str) -> str | None:
    """The argument after an option of this command; None without."""
    rest = sys.argv[sys.argv.index(option) + 1 :] if option in sys.argv else []
    return rest[0] if rest else None


def remove_folders_at_end() -> None:
    """Makes this process remove, at its end, the temporary folders that flytekit makes and leaves behind.

    No output of ours is there. A process that multiprocessing has started ends without Python's own ``atexit``.
    """
    sandbox = Path(FlyteContextManager.current_context().file_access.local_sandbox_dir).parent
    for folder in {Path(flyte_tmp_dir), Path(Config.local_sandbox_path), sandbox}:
        if folder.parent == Path(tempfile.gettempdir()) and folder.name.startswith("flyte"):
            Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=0)
