"""What does not change a run's result, read from the environment so that it stays out of the cache key."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from flyte_ddp.errors import UserError

ALLOWED = "FLYTE_DDP_ALLOWED_ADDRESSES"
REQUESTED_GPUS = "FLYTE_DDP_GPUS"  # set in pods by the table that requests the GPUs (flyte_ddp/pods/profiles.py)
WANDB_NAME_LENGTH, WANDB_RESERVED = 128, "/\\#?%:"  # wandb's own rules for the name of a project


@dataclass(frozen=True)
class Settings:
    """Where to log, cache and wait; docs/environment.md names the variable of each."""

    progress: str = "auto"  # auto, bar, lines or off
    checkpoint_seconds: float = 60.0  # longest time between two checkpoints; 0: none are written
    save_seconds: float = 30.0  # that a run which is told to stop waits for its last checkpoint
    timeout: float = 600.0  # seconds that ranks wait for one another
    wandb_project: str = "flyte-ddp"
    wandb_entity: str = ""
    wandb_mode: str = "offline"  # online, offline or disabled
    wandb_table_rows: int = 200  # of the table of predictions
    wandb_watch: bool = False  # log histograms of the weights
    wandb_timeout: float = 30.0  # seconds that the end of a run waits for the wandb process
    cache_folder: Path = field(default_factory=lambda: runs_folder() / "cache")  # of fetched shards
    cache_bytes: int | None = None  # most that it may hold; None: no limit
    loader_threads: int = 0  # of each rank, or processes of a stream; 0: one for each of its cores
    results_copy: str = ""  # folder or URL where intermediate results are copied to
    wandb_run_id: str = field(default="", kw_only=True)
    wandb_kept_at: str = field(default="", kw_only=True)  # where the caller puts what could not be sent; empty: nowhere


def runs_folder() -> Path:
    """The folder that keeps local runs and data sets: ``$FLYTE_DDP_RUNS``, or ``runs`` under the working directory."""
    return Path(os.environ.get("FLYTE_DDP_RUNS") or "runs").absolute()


def allowed_addresses() -> tuple[str, ...]:
    """Return the addresses of servers, buckets or folders that an index or a redirect of a web server may name."""
    return tuple(filter(None, (address.strip() for address in os.environ.get(ALLOWED, "").split(","))))


def from_environment(wandb_run_id: str = "") -> Settings:
    """Reads the environment; without a wandb key the mode is offline, so that nothing ever prompts."""
    env, default = os.environ, Settings()
    with_key = "online" if env.get("WANDB_API_KEY", "").strip() else "offline"
    return Settings(
        progress=choice("FLYTE_DDP_PROGRESS", default.progress, ("auto", "bar", "lines", "off")),
        checkpoint_seconds=number("FLYTE_DDP_CHECKPOINT_SECONDS", default.checkpoint_seconds),
        save_seconds=number("FLYTE_DDP_SAVE_SECONDS", default.save_seconds),
        timeout=number("FLYTE_DDP_TIMEOUT", default.timeout, least=1.0),
        wandb_project=env.get("WANDB_PROJECT") or default.wandb_project,
        wandb_entity=env.get("WANDB_ENTITY", ""),
        wandb_mode=choice("WANDB_MODE", with_key, ("online", "offline", "disabled")),
        wandb_table_rows=whole_number("FLYTE_DDP_WANDB_TABLE_ROWS", default.wandb_table_rows),
        wandb_watch=env.get("FLYTE_DDP_WANDB_WATCH", "0") == "1",
        wandb_timeout=number("FLYTE_DDP_WANDB_TIMEOUT", default.wandb_timeout),
        cache_folder=Path(env.get("FLYTE_DDP_CACHE") or default.cache_folder).absolute(),
        cache_bytes=whole_number("FLYTE_DDP_CACHE_BYTES", 0) or None,
        loader_threads=whole_number("FLYTE_DDP_LOADER_THREADS", 0),
        results_copy=env.get("FLYTE_DDP_RESULTS", ""),
        wandb_run_id=wandb_run_id,
    )


def check_wandb() -> None:
    """Raise UserError for a ``WANDB_PROJECT`` or ``WANDB_BASE_URL`` that wandb refuses.

    wandb looks at them when it opens its run, offline as well: nothing of the run would be logged. Where wandb is
    disabled, they may be anything.
    """
    if os.environ.get("WANDB_MODE") == "disabled":
        return
    project, address = os.environ.get("WANDB_PROJECT", ""), os.environ.get("WANDB_BASE_URL", "")
    if len(project) > WANDB_NAME_LENGTH or set(project) & set(WANDB_RESERVED):
        raise UserError(
            f"WANDB_PROJECT={project!r}: must have at most {WANDB_NAME_LENGTH} characters, and none of "
            f"{' '.join(WANDB_RESERVED)}; the name of a team goes into WANDB_ENTITY"
        )
    if address and not re.match(r"https?://[^/\s]+", address):
        raise UserError(f"WANDB_BASE_URL={address!r}: must be an address such as https://wandb.example.com")


def choice(name: str, default: str, choices: tuple[str, ...]) -> str:
    """One of several words from the environment."""
    value = os.environ.get(name) or default
    if value not in choices:
        raise UserError(f"{name}={value!r}: choose one of {', '.join(choices)}")
    return value


def number(name: str, default: float, least: float = 0.0) -> float:
    """A number from the environment."""
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = float("nan")
    if not least <= value < float("inf"):
        raise UserError(f"{name}={text!r}: must be a number of at least {least:g}")
    return value


def whole_number(name: str, default: int) -> int:
    """Return a whole number of at least 0 from the environment; 1e9 is one, too."""
    value = number(name, default)
    if value != int(value):
        raise UserError(f"{name}={os.environ[name]!r}: must be a whole number")
    return int(value)
