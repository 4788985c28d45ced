"""Variables of the environment: what does not change a run's result, and so stays out of the cache key.

VARIABLES is the one table of them: the readers below take defaults from it, flyte_ddp/pods/environment.py which of them
pods are given, and docs/configuration.md shows it (``python tests/helpers/variable_table.py`` writes it).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from flyte_ddp.errors import UserError

ALLOWED = "FLYTE_DDP_ALLOWED_ADDRESSES"
REQUESTED_GPUS = "FLYTE_DDP_GPUS"
WANDB_NAME_LENGTH, WANDB_RESERVED = 128, "/\\#?%:"  # wandb's own rules for the name of a project
HERE, REGISTRATION = "this machine", "registration"
ALL_PODS, TRAINING_PODS, REGISTRY_PODS = "all pods", "training pods", "pods that use the registry"


@dataclass(frozen=True)
class Variable:
    """A variable of the environment.

    Args:
        name: Name of the variable.
        default: Value where it is not set; in parentheses: what is done then.
        where: HERE (local runs only), REGISTRATION (read then only), or which pods are given what is set at
            registration; local runs read these, too.
        meaning: What it is, in Markdown.
    """

    name: str
    default: str
    where: str
    meaning: str


TABLE = (
    Variable("FLYTE_DDP_PROFILE", "gpu", REGISTRATION, "[size of pods](deployment.md): a profile's name"),
    Variable(
        "FLYTE_DDP_NODES",
        "1",
        REGISTRATION,
        "nodes for training on Elastic, Ray and Dask: `2`, or for Elastic a range such as `2:4`, of which the others "
        "take the larger number",
    ),
    Variable(
        "FLYTE_DDP_RETRIES",
        "100",
        REGISTRATION,
        "how often Flyte starts a lost training pod again; attempts [without progress](deployment.md#when-pods-are-"
        "lost) end earlier",
    ),
    Variable(
        "FLYTE_DDP_HOURS",
        "24",
        REGISTRATION,
        "hours after which Flyte stops an attempt that trains, predicts or reads all data",
    ),
    Variable("FLYTE_DDP_NOTIFY", "", REGISTRATION, "mail addresses, comma-separated, that hear of failed launch plans"),
    Variable(
        "FLYTE_DDP_POD_TEMPLATE",
        "",
        REGISTRATION,
        "[pod template](deployment.md#restricted-namespaces) for all pods to which the profile gives none",
    ),
    Variable(
        "FLYTE_DDP_WANDB_SECRET",
        "(`wandb/api_key` with GPUs, else `off`)",
        REGISTRATION,
        "`group/key` of the Flyte secret with wandb's key, or `off`",
    ),
    Variable(
        "FLYTE_DDP_REGISTRY",
        "(`registry` in the runs folder)",
        REGISTRY_PODS,
        "folder or address of the [registry of models](releasing.md); without an address there is no "
        "`nightly_release`, and `release_wf` fails",
    ),
    Variable(
        "FLYTE_DDP_CHECKPOINTS",
        "(beside Flyte's outputs)",
        TRAINING_PODS,
        "address in the blob store for pods' checkpoints",
    ),
    Variable(
        "FLYTE_DDP_CHECKPOINT_DAYS",
        "14",
        TRAINING_PODS,
        "days after which pods' checkpoints that no run has continued are removed",
    ),
    Variable(
        "FLYTE_DDP_CHECKPOINT_SECONDS",
        "60",
        TRAINING_PODS,
        "longest time between two checkpoints; 0 writes none",
    ),
    Variable(
        "FLYTE_DDP_SAVE_SECONDS",
        "30",
        TRAINING_PODS,
        "most seconds for the last checkpoint of a run that is told to stop; in training pods half of the [time to "
        "stop](deployment.md#when-pods-are-lost)",
    ),
    Variable(
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        "(torch's)",
        TRAINING_PODS,
        "seconds from SIGTERM to SIGKILL of Elastic's workers; in training pods 5 s less than the time to stop",
    ),
    Variable("FLYTE_DDP_MEET_SECONDS", "900", TRAINING_PODS, "seconds that Elastic's pods wait until all of them run"),
    Variable(
        "FLYTE_DDP_TIMEOUT",
        "600",
        TRAINING_PODS,
        "seconds that ranks wait for one another, and a run for nodes or workers that have not started yet. What rank "
        "0 writes at the end of a run may take longer",
    ),
    Variable(
        "FLYTE_DDP_PROGRESS",
        "auto",
        ALL_PODS,
        "`auto` (a bar on a terminal, else lines: of steps at growing intervals, and of each evaluation), `bar`, "
        "`lines` or `off`",
    ),
    Variable(
        "FLYTE_DDP_LOADER_THREADS",
        "0",
        ALL_PODS,
        "threads of each rank that decode images, or worker processes of a stream; 0: one for each of its cores",
    ),
    Variable(
        ALLOWED,
        "",
        ALL_PODS,
        "servers, buckets or folders, comma-separated, that an index or a redirect of a web server [may name](large-"
        "data.md#indexes-from-elsewhere)",
    ),
    Variable(
        "FLYTE_DDP_RESULTS",
        "",
        TRAINING_PODS,
        "folder or URL that gets a copy of the results that your own code hands in; pods are given a URL only",
    ),
    Variable("FLYTE_DDP_RUNS", "runs", HERE, "folder of local runs"),
    Variable(
        "FLYTE_DDP_CACHE",
        "(`cache` in the runs folder)",
        HERE,
        "folder of fetched shards, and of marks for checked local ones",
    ),
    Variable(
        "FLYTE_DDP_CACHE_BYTES",
        "0",
        TRAINING_PODS,
        "most bytes that it may hold; 0: as many as the disk. In training and prediction pods half of the disk",
    ),
    Variable(
        "FLYTE_DDP_ELASTIC_KEY",
        "(Elastic's run id)",
        HERE,
        "secret by which workers of torch Elastic that you start yourself recognise each other; in pods a "
        "NetworkPolicy keeps others out",
    ),
    Variable(
        "WANDB_API_KEY",
        "(runs are kept offline)",
        HERE,
        "wandb's key; pods get it from `FLYTE_DDP_WANDB_SECRET`",
    ),
    Variable("WANDB_PROJECT", "flyte-ddp", TRAINING_PODS, "as wandb uses it"),
    Variable("WANDB_ENTITY", "", TRAINING_PODS, "as wandb uses it"),
    Variable("WANDB_MODE", "(`online` with a key, else `offline`)", TRAINING_PODS, "as wandb uses it, or `disabled`"),
    Variable("WANDB_BASE_URL", "", TRAINING_PODS, "as wandb uses it"),
    Variable(
        "FLYTE_DDP_WANDB_TABLE_ROWS",
        "200",
        TRAINING_PODS,
        "rows of the table of predictions; a score for each class, or the prediction's alone above 1,000 classes",
    ),
    Variable("FLYTE_DDP_WANDB_WATCH", "0", TRAINING_PODS, "`1`: histograms of all weights at each evaluation"),
    Variable("FLYTE_DDP_WANDB_TIMEOUT", "30", TRAINING_PODS, "seconds that the end of a run waits for wandb"),
)
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
