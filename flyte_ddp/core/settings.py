"""Settings from environment variables. Settings do not change a run's result, so the cache key does not contain them.

``variables.toml`` is the only table of the variables, for this module, for ``pods/environment.py`` and for the
documents.
"""

import os
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from flyte_ddp.core.errors import UserError

ALLOWED = "FLYTE_DDP_ALLOWED_ADDRESSES"
MODULES = "FLYTE_DDP_MODULES"
REQUESTED_GPUS = "FLYTE_DDP_GPUS"
HERE, REGISTRATION = "this machine", "registration"
ALL_PODS, TRAINING_PODS, REGISTRY_PODS = "all pods", "training pods", "pods that use the registry"


class Variable(NamedTuple):
    """An environment variable."""

    name: str
    where: str  # readers (HERE: only local runs, REGISTRATION: only registration, else the named pods and local runs)
    default: str  # value if not set, or the behaviour then (in parentheses)
    meaning: str  # in Markdown


@cache
def read_variable_table() -> dict[str, Variable]:
    """Return the variables that users may set, by name, in the order of variables.toml."""
    tables = load_variables_file()
    del tables["internal"]
    return {name: Variable(name, where, *row) for where, rows in tables.items() for name, row in rows.items()}


def load_variables_file() -> dict[str, dict[str, list[str] | str]]:
    import tomllib  # takes 5 ms, and most importers of this module do not need it

    return tomllib.loads(Path(__file__).with_name("variables.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Settings:
    """Settings of a run beside the hyperparameters: logging, caching and waits (in seconds)."""

    progress: str = "auto"
    checkpoint_seconds: float = 60.0
    save_seconds: float = 30.0
    restarts: int = 3  # restarts in place without progress in between
    timeout: float = 600.0
    wandb_project: str = "flyte-ddp"
    wandb_entity: str = ""
    wandb_mode: str = "offline"  # online, offline or disabled
    wandb_table_rows: int = 200
    wandb_timeout: float = 30.0
    cache_folder: Path = field(default_factory=lambda: runs_folder() / "cache")
    cache_bytes: int | None = None  # None: no limit
    loaders: int = 0  # threads or processes; 0: one for each core of the rank, less one beside a GPU
    results_copy: str = ""
    weights_source: str = ""  # folder or address with torchvision's weights files; empty: torchvision's address
    wandb_run_id: str = field(default="", kw_only=True)
    wandb_kept_at: str = field(default="", kw_only=True)  # where unsent metrics are uploaded; empty: nowhere


def read_settings() -> Settings:
    """Return the settings from this process's environment.

    Without WANDB_MODE, wandb is online if WANDB_API_KEY is set, else offline, so nothing prompts for a key. Texts are
    not checked.

    Raises:
        UserError: A number or a choice is not allowed.
    """
    with_key = "online" if read_text_variable("WANDB_API_KEY").strip() else "offline"
    return Settings(
        progress=read_choice_variable("FLYTE_DDP_PROGRESS", ("auto", "bar", "lines", "off")),
        checkpoint_seconds=read_number_variable("FLYTE_DDP_CHECKPOINT_SECONDS"),
        save_seconds=read_number_variable("FLYTE_DDP_SAVE_SECONDS"),
        restarts=read_whole_number_variable("FLYTE_DDP_RESTARTS"),
        timeout=read_number_variable("FLYTE_DDP_TIMEOUT", at_least=1.0),
        wandb_project=read_text_variable("WANDB_PROJECT"),
        wandb_entity=read_text_variable("WANDB_ENTITY"),
        wandb_mode=read_choice_variable("WANDB_MODE", ("online", "offline", "disabled")) or with_key,
        wandb_table_rows=read_whole_number_variable("FLYTE_DDP_WANDB_TABLE_ROWS"),
        wandb_timeout=read_number_variable("FLYTE_DDP_WANDB_TIMEOUT"),
        cache_folder=Path(read_text_variable("FLYTE_DDP_CACHE") or runs_folder() / "cache").absolute(),
        cache_bytes=read_whole_number_variable("FLYTE_DDP_CACHE_BYTES") or None,
        loaders=read_whole_number_variable("FLYTE_DDP_LOADERS"),
        results_copy=read_text_variable("FLYTE_DDP_RESULTS"),
        weights_source=read_text_variable("FLYTE_DDP_WEIGHTS"),
    )


def runs_folder() -> Path:
    """Return the absolute path of FLYTE_DDP_RUNS, the folder of local runs and data sets."""
    return Path(read_text_variable("FLYTE_DDP_RUNS")).absolute()


def allowed_addresses() -> tuple[str, ...]:
    """Return the addresses (FLYTE_DDP_ALLOWED_ADDRESSES) to which an index or an HTTP redirect may lead."""
    return tuple(filter(None, map(str.strip, read_text_variable(ALLOWED).split(","))))


def read_nameable_modules() -> tuple[str, ...] | None:
    """Return the modules whose functions hyperparameters may name (FLYTE_DDP_MODULES).

    The user's modules may always be named, and are not in the result.

    Returns:
        The names of the modules. Empty if the variable is ".", so only the user's modules may be named. None if the
            variable is not set, so all modules may be named.

    Raises:
        UserError: A name is not a module name, or is in Python's standard library.
    """
    if not (text := read_text_variable(MODULES)):
        return None
    names = [name for part in text.split(",") if (name := part.strip()) not in ("", ".")]
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UserError(f"{MODULES}={text!r}: {name!r} is not a module name; separate names by commas")
        if name.partition(".")[0] in sys.stdlib_module_names:
            why = "is in Python's standard library, and would let hyperparameters run any command"
            raise UserError(f"{MODULES}={text!r}: {name!r} {why}; name a module of yours that calls it")
    return tuple(names)


def read_text_variable(name: str) -> str:
    """Return the value of an environment variable, or else the default in variables.toml ("" without a default).

    An empty variable counts as not set. A name that is not in variables.toml raises KeyError.
    """
    default = read_variable_table()[name].default
    return os.environ.get(name) or ("" if default.startswith("(") else default)


def read_choice_variable(name: str, choices: tuple[str, ...]) -> str:
    """Return the value of an environment variable that must be one of ``choices``.

    If the variable is empty or not set, returns the default in variables.toml ("" without a default). A name that is
    not in variables.toml raises KeyError.

    Raises:
        UserError: The value is none of ``choices``.
    """
    value = read_text_variable(name)
    if value and value not in choices:
        raise UserError(f"{name}={value!r}: choose one of {', '.join(choices)}")
    return value


def read_number_variable(name: str, at_least: float = 0.0) -> float:
    """Return the number in an environment variable, or its default in variables.toml.

    An empty variable counts as not set. A name that is not in variables.toml raises KeyError.

    Raises:
        UserError: The text is not a number, or the number is not finite or is below ``at_least``.
    """
    text = read_text_variable(name)
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not at_least <= value < float("inf"):
        raise UserError(f"{name}={text!r}: must be a number of at least {at_least:g}")
    return value


def read_whole_number_variable(name: str) -> int:
    """Return the whole number in an environment variable, or its default in variables.toml.

    An empty variable counts as not set. A name that is not in variables.toml raises KeyError.

    Raises:
        UserError: The value is not a whole number of at least 0.
    """
    value = read_number_variable(name)
    if value != int(value):
        raise UserError(f"{name}={os.environ[name]!r}: must be a whole number")
    return int(value)
