"""Variables of the environment: what does not change a run's result, and so stays out of the cache key.

variables.toml is the one table of them, for the functions below, flyte_ddp/pods/environment.py and the documents.
"""

import os
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from flyte_ddp.errors import UserError

ALLOWED = "FLYTE_DDP_ALLOWED_ADDRESSES"
MODULES = "FLYTE_DDP_MODULES"
REQUESTED_GPUS = "FLYTE_DDP_GPUS"
HERE, REGISTRATION = "this machine", "registration"
ALL_PODS, TRAINING_PODS, REGISTRY_PODS = "all pods", "training pods", "pods that use the registry"


class Variable(NamedTuple):
    """A variable of the environment."""

    name: str
    where: str  # who reads it; HERE: local runs only; REGISTRATION: registration only; else these pods and local runs
    default: str  # where it is not set; in parentheses: what is done then
    meaning: str  # in Markdown


@cache
def read_variable_table() -> dict[str, Variable]:
    """Return the variables that people may set, by name, in the order of variables.toml."""
    tables = load_variables_file()
    del tables["internal"]
    return {name: Variable(name, where, *row) for where, rows in tables.items() for name, row in rows.items()}


def load_variables_file() -> dict[str, Any]:
    import tomllib  # takes 5 ms, which most who import this module do not need

    return tomllib.loads(Path(__file__).with_name("variables.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Settings:
    """What a run needs beside the hyperparameters: where to log and cache, how long to wait (in seconds)."""

    progress: str = "auto"
    checkpoint_seconds: float = 60.0
    save_seconds: float = 30.0
    restarts: int = 3  # in place, without progress in between
    timeout: float = 600.0
    wandb_project: str = "flyte-ddp"
    wandb_entity: str = ""
    wandb_mode: str = "offline"  # online, offline or disabled
    wandb_table_rows: int = 200
    wandb_watch: bool = False
    wandb_timeout: float = 30.0
    cache_folder: Path = field(default_factory=lambda: runs_folder() / "cache")
    cache_bytes: int | None = None  # None: no limit
    loaders: int = 0  # threads or processes; 0: one for each core of the rank, less one beside a GPU
    results_copy: str = ""
    weights_source: str = ""  # folder or address with torchvision's files of weights; empty: torchvision's own
    wandb_run_id: str = field(default="", kw_only=True)
    wandb_kept_at: str = field(default="", kw_only=True)  # where the caller puts what could not be sent; empty: nowhere


def read_settings() -> Settings:
    """Return the settings by this process's environment; UserError for a number or a choice that is not allowed.

    Unless WANDB_MODE is set, wandb is offline without WANDB_API_KEY, so that nothing prompts. Texts are not checked.
    """
    with_key = "online" if read_text("WANDB_API_KEY").strip() else "offline"
    return Settings(
        progress=read_choice("FLYTE_DDP_PROGRESS", ("auto", "bar", "lines", "off")),
        checkpoint_seconds=read_number("FLYTE_DDP_CHECKPOINT_SECONDS"),
        save_seconds=read_number("FLYTE_DDP_SAVE_SECONDS"),
        restarts=read_whole_number("FLYTE_DDP_RESTARTS"),
        timeout=read_number("FLYTE_DDP_TIMEOUT", at_least=1.0),
        wandb_project=read_text("WANDB_PROJECT"),
        wandb_entity=read_text("WANDB_ENTITY"),
        wandb_mode=read_choice("WANDB_MODE", ("online", "offline", "disabled")) or with_key,
        wandb_table_rows=read_whole_number("FLYTE_DDP_WANDB_TABLE_ROWS"),
        wandb_watch=read_text("FLYTE_DDP_WANDB_WATCH") == "1",
        wandb_timeout=read_number("FLYTE_DDP_WANDB_TIMEOUT"),
        cache_folder=Path(read_text("FLYTE_DDP_CACHE") or runs_folder() / "cache").absolute(),
        cache_bytes=read_whole_number("FLYTE_DDP_CACHE_BYTES") or None,
        loaders=read_whole_number("FLYTE_DDP_LOADERS"),
        results_copy=read_text("FLYTE_DDP_RESULTS"),
        weights_source=read_text("FLYTE_DDP_WEIGHTS"),
    )


def runs_folder() -> Path:
    """Return the absolute path of FLYTE_DDP_RUNS, the folder of local runs and data sets."""
    return Path(read_text("FLYTE_DDP_RUNS")).absolute()


def allowed_addresses() -> tuple[str, ...]:
    """Return the addresses in FLYTE_DDP_ALLOWED_ADDRESSES, to which an index or an HTTP redirect may lead."""
    return tuple(filter(None, map(str.strip, read_text(ALLOWED).split(","))))


def nameable_modules() -> tuple[str, ...] | None:
    """Return the modules listed in FLYTE_DDP_MODULES, beside the project's own; None if it is not set: all modules.

    Raises UserError for a name that is none, and for modules of Python's standard library.
    """
    if not (text := read_text(MODULES)):
        return None
    names = [name for part in text.split(",") if (name := part.strip()) not in ("", ".")]
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UserError(f"{MODULES}={text!r}: {name!r} is no module's name; separate names by commas")
        if name.partition(".")[0] in sys.stdlib_module_names:
            why = "is Python's own, and would let hyperparameters run any command"
            raise UserError(f"{MODULES}={text!r}: {name!r} {why}; name a function of your own that calls it")
    return tuple(names)


def read_text(name: str) -> str:
    """Return a variable's value in this process's environment, else its default in variables.toml, else ""."""
    default = read_variable_table()[name].default
    return os.environ.get(name) or ("" if default.startswith("(") else default)


def read_choice(name: str, choices: tuple[str, ...]) -> str:
    value = read_text(name)
    if value and value not in choices:
        raise UserError(f"{name}={value!r}: choose one of {', '.join(choices)}")
    return value


def read_number(name: str, at_least: float = 0.0) -> float:
    """Return the number in a variable; its default if unset. UserError if it is not finite or below ``at_least``."""
    text = read_text(name)
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not at_least <= value < float("inf"):
        raise UserError(f"{name}={text!r}: must be a number of at least {at_least:g}")
    return value


def read_whole_number(name: str) -> int:
    value = read_number(name)
    if value != int(value):
        raise UserError(f"{name}={os.environ[name]!r}: must be a whole number")
    return int(value)
