"""Variables of the environment: what does not change a run's result, and so stays out of the cache key.

VARIABLES is the one table of them: the readers below take defaults from it, flyte_ddp/pods/environment.py which of them
pods are given, and docs/configuration.md shows it (``python tests/helpers/variable_table.py`` writes it).
"""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from flyte_ddp.errors import UserError

ALLOWED = "FLYTE_DDP_ALLOWED_ADDRESSES"
REQUESTED_GPUS = "FLYTE_DDP_GPUS"
WANDB_NAME_LENGTH, WANDB_RESERVED = 128, "/\\#?%:"  # wandb's own rules for the name of a project
HERE, REGISTRATION = "this machine", "registration"
ALL_PODS, TRAINING_PODS, REGISTRY_PODS = "all pods", "training pods", "pods that use the registry"


class Variable(NamedTuple):
    """A variable of the environment."""

    name: str
    where: str  # HERE: local runs only; REGISTRATION: only then; else these pods get its value, and local runs read it
    default: str  # where it is not set; in parentheses: what is done then
    meaning: str  # in Markdown


GROUPS: dict[str, dict[str, tuple[str, str]]] = {  # by where they apply: default and meaning of each
    REGISTRATION: {
        "FLYTE_DDP_PROFILE": ("gpu", "[size of pods](deployment.md): a profile's name"),
        "FLYTE_DDP_NODES": (
            "1",
            "nodes for Elastic, Ray and Dask: `2`, or for Elastic `2:4`, of which the others take the larger number",
        ),
        "FLYTE_DDP_RETRIES": (
            "100",
            "new pods for a lost one that trains; [without progress](deployment.md#when-pods-are-lost) there are fewer",
        ),
        "FLYTE_DDP_HOURS": ("24", "hours after which Flyte stops an attempt that trains, predicts or reads all data"),
        "FLYTE_DDP_NOTIFY": ("", "mail addresses, comma-separated, that hear of failed launch plans"),
        "FLYTE_DDP_POD_TEMPLATE": (
            "",
            "[pod template](deployment.md#restricted-namespaces) for all pods to which the profile gives none",
        ),
        "FLYTE_DDP_WANDB_SECRET": (
            "(`wandb/api_key` with GPUs, else `off`)",
            "`group/key` of the Flyte secret with wandb's key, or `off`",
        ),
    },
    TRAINING_PODS: {
        "FLYTE_DDP_CHECKPOINTS": ("(beside Flyte's outputs)", "address in the blob store for pods' checkpoints"),
        "FLYTE_DDP_CHECKPOINT_DAYS": ("14", "days after which pods' checkpoints that no run has continued are removed"),
        "FLYTE_DDP_CHECKPOINT_SECONDS": ("60", "longest time between two checkpoints; 0 writes none"),
        "FLYTE_DDP_SAVE_SECONDS": (
            "30",
            "seconds for the last checkpoint; in pods half of the [time to stop](deployment.md#when-pods-are-lost)",
        ),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": (
            "(torch's)",
            "seconds from SIGTERM to SIGKILL of Elastic's workers; in training pods 5 s less than the time to stop",
        ),
        "FLYTE_DDP_MEET_SECONDS": ("900", "seconds that Elastic's pods wait until all of them run"),
        "FLYTE_DDP_TIMEOUT": (
            "600",
            "seconds that ranks wait for one another, and a run for nodes or workers that have not started yet",
        ),
        "FLYTE_DDP_RESULTS": (
            "",
            "folder or URL that gets a copy of the results that your own code hands in; pods are given a URL only",
        ),
        "FLYTE_DDP_CACHE_BYTES": (
            "0",
            "most bytes of fetched shards; 0: as many as fit. In pods that train or predict half of the disk",
        ),
        "WANDB_PROJECT": ("flyte-ddp", "as wandb uses it"),
        "WANDB_ENTITY": ("", "as wandb uses it"),
        "WANDB_MODE": ("(`online` with a key, else `offline`)", "as wandb uses it, or `disabled`"),
        "WANDB_BASE_URL": ("", "as wandb uses it"),
        "FLYTE_DDP_WANDB_TABLE_ROWS": (
            "200",
            "rows of the table of predictions; a score for each class, or the prediction's alone above 1,000 classes",
        ),
        "FLYTE_DDP_WANDB_WATCH": ("0", "`1`: histograms of all weights at each evaluation"),
        "FLYTE_DDP_WANDB_TIMEOUT": ("30", "seconds that the end of a run waits for wandb"),
    },
    REGISTRY_PODS: {
        "FLYTE_DDP_REGISTRY": (
            "(`registry` in the runs folder)",
            "folder or address of the [registry of models](releasing.md); pods need an address to release a model",
        ),
    },
    ALL_PODS: {
        "FLYTE_DDP_PROGRESS": (
            "auto",
            "`auto` (a bar on a terminal, else lines: steps at growing intervals, evaluations), `bar`, `lines`, `off`",
        ),
        "FLYTE_DDP_LOADER_THREADS": (
            "0",
            "threads of each rank that decode images, or worker processes of a stream; 0: one for each of its cores",
        ),
        ALLOWED: (
            "",
            "servers, buckets, folders (comma-separated) that indexes [may name](large-data.md#indexes-from-elsewhere)",
        ),
    },
    HERE: {
        "FLYTE_DDP_RUNS": ("runs", "folder of local runs"),
        "FLYTE_DDP_CACHE": (
            "(`cache` in the runs folder)",
            "folder of fetched shards, and of marks for checked local ones",
        ),
        "FLYTE_DDP_ELASTIC_KEY": (
            "(Elastic's run id)",
            "secret by which workers of torch Elastic that you start yourself recognise each other; not for pods",
        ),
        "WANDB_API_KEY": ("(runs are kept offline)", "wandb's key; pods get it from `FLYTE_DDP_WANDB_SECRET`"),
    },
}
TABLE = tuple(Variable(name, where, *row) for where, group in GROUPS.items() for name, row in group.items())
VARIABLES = {variable.name: variable for variable in TABLE}
INTERNAL = {  # what sets them
    "FLYTE_DDP_CODE": "digest of the registered sources, set in pods",
    REQUESTED_GPUS: "GPUs that were requested for the pod",
    "FLYTE_DDP_SETTINGS": "digest of the settings, set by `pyflyte run --remote`",
    "FLYTE_DDP_FROM_SCRATCH": "set by `--overwrite-cache` in pods, which use no older checkpoint then",
    "FLYTE_DDP_POD_FOLDER": "folder of the task, set for Elastic's workers",
    "FLYTE_DDP_HELD_FOR_CHILDREN": "run folders that are locked, set for Elastic's workers",
}


@dataclass(frozen=True)
class Settings:
    """Where to log, cache and wait; VARIABLES says what each of the variables is that from_environment reads."""

    progress: str = "auto"
    checkpoint_seconds: float = 60.0
    save_seconds: float = 30.0
    timeout: float = 600.0
    wandb_project: str = "flyte-ddp"
    wandb_entity: str = ""
    wandb_mode: str = "offline"  # online, offline or disabled
    wandb_table_rows: int = 200
    wandb_watch: bool = False
    wandb_timeout: float = 30.0
    cache_folder: Path = field(default_factory=lambda: runs_folder() / "cache")
    cache_bytes: int | None = None  # None: no limit
    loader_threads: int = 0  # 0: one for each core of the rank
    results_copy: str = ""
    wandb_run_id: str = field(default="", kw_only=True)
    wandb_kept_at: str = field(default="", kw_only=True)  # where the caller puts what could not be sent; empty: nowhere


def read_text(name: str) -> str:
    """Return the value of one of VARIABLES in this process, or its default; empty where there is neither."""
    default = VARIABLES[name].default
    return os.environ.get(name) or ("" if default.startswith("(") else default)


def runs_folder() -> Path:
    """Return the folder that keeps local runs and data sets: FLYTE_DDP_RUNS, relative to the working directory."""
    return Path(read_text("FLYTE_DDP_RUNS")).absolute()


def allowed_addresses() -> tuple[str, ...]:
    """Return the addresses of servers, buckets or folders that an index or a redirect of a web server may name."""
    return tuple(filter(None, (address.strip() for address in read_text(ALLOWED).split(","))))


def from_environment(wandb_run_id: str = "") -> Settings:
    """Return the settings in this process's environment; without a wandb key the mode is offline: nothing prompts.

    Raises:
        UserError: the value of a variable is of another kind.
    """
    with_key = "online" if read_text("WANDB_API_KEY").strip() else "offline"
    return Settings(
        progress=read_choice("FLYTE_DDP_PROGRESS", ("auto", "bar", "lines", "off")),
        checkpoint_seconds=read_number("FLYTE_DDP_CHECKPOINT_SECONDS"),
        save_seconds=read_number("FLYTE_DDP_SAVE_SECONDS"),
        timeout=read_number("FLYTE_DDP_TIMEOUT", at_least=1.0),
        wandb_project=read_text("WANDB_PROJECT"),
        wandb_entity=read_text("WANDB_ENTITY"),
        wandb_mode=read_choice("WANDB_MODE", ("online", "offline", "disabled")) or with_key,
        wandb_table_rows=read_whole_number("FLYTE_DDP_WANDB_TABLE_ROWS"),
        wandb_watch=read_text("FLYTE_DDP_WANDB_WATCH") == "1",
        wandb_timeout=read_number("FLYTE_DDP_WANDB_TIMEOUT"),
        cache_folder=Path(read_text("FLYTE_DDP_CACHE") or runs_folder() / "cache").absolute(),
        cache_bytes=read_whole_number("FLYTE_DDP_CACHE_BYTES") or None,
        loader_threads=read_whole_number("FLYTE_DDP_LOADER_THREADS"),
        results_copy=read_text("FLYTE_DDP_RESULTS"),
        wandb_run_id=wandb_run_id,
    )


def check_wandb() -> None:
    """Raise UserError for a WANDB_PROJECT or WANDB_BASE_URL that wandb refuses.

    wandb looks at them when it opens its run, offline as well: nothing of the run would be logged. Where wandb is
    disabled, they may be anything.
    """
    if read_text("WANDB_MODE") == "disabled":
        return
    project, address = read_text("WANDB_PROJECT"), read_text("WANDB_BASE_URL")
    if len(project) > WANDB_NAME_LENGTH or set(project) & set(WANDB_RESERVED):
        raise UserError(
            f"WANDB_PROJECT={project!r}: must have at most {WANDB_NAME_LENGTH} characters, and none of "
            f"{' '.join(WANDB_RESERVED)}; the name of a team goes into WANDB_ENTITY"
        )
    if address and not re.match(r"https?://[^/\s]+", address):
        raise UserError(f"WANDB_BASE_URL={address!r}: must be an address such as https://wandb.example.com")


def read_choice(name: str, choices: tuple[str, ...]) -> str:
    """Return the value of a variable that is one of several words, or its default.

    Raises:
        UserError: it is another word.
    """
    value = read_text(name)
    if value and value not in choices:
        raise UserError(f"{name}={value!r}: choose one of {', '.join(choices)}")
    return value


def read_number(name: str, at_least: float = 0.0) -> float:
    """Return the value of a variable that is a number, or its default.

    Raises:
        UserError: it is no finite number, or too small.
    """
    text = read_text(name)
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not at_least <= value < float("inf"):
        raise UserError(f"{name}={text!r}: must be a number of at least {at_least:g}")
    return value


def read_whole_number(name: str) -> int:
    """Return the value of a variable that is a whole number of at least 0, such as 3 or 1e9, or its default.

    Raises:
        UserError: it is another number, or none.
    """
    value = read_number(name)
    if value != int(value):
        raise UserError(f"{name}={os.environ[name]!r}: must be a whole number")
    return int(value)
