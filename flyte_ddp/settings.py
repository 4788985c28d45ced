"""What does not change a run's result, read from the environment so that it stays out of the cache key."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from flyte_ddp.errors import UserError


@dataclass(frozen=True)
class Settings:
    """Where to log and how much to print.

    Environment: ``FLYTE_DDP_RUNS`` (folder of local runs), ``FLYTE_DDP_PROGRESS`` (auto, bar, lines, off),
    ``WANDB_PROJECT``, ``WANDB_ENTITY``, ``WANDB_MODE`` (online, offline, disabled), ``WANDB_API_KEY``,
    ``FLYTE_DDP_WANDB_TABLE_ROWS`` (rows of the table of predictions), ``FLYTE_DDP_WANDB_WATCH`` (1: log histograms of
    the weights), ``FLYTE_DDP_WANDB_TIMEOUT`` (seconds that the end of a run waits for the wandb process),
    ``FLYTE_DDP_CHECKPOINT_SECONDS`` (longest time between two checkpoints; 0: none are written), ``FLYTE_DDP_TIMEOUT``
    (seconds that ranks wait for one another), ``FLYTE_DDP_CACHE`` (folder of fetched shards),
    ``FLYTE_DDP_CACHE_BYTES`` (most that it may hold; 0: no limit), ``FLYTE_DDP_LOADER_THREADS`` (threads of each rank
    that decode images, or processes of a stream; 0: one for each core that it has), ``FLYTE_DDP_RESULTS`` (folder or
    URL where intermediate results are copied to).
    """

    progress: str = "auto"
    checkpoint_seconds: float = 60.0
    timeout: float = 600.0
    wandb_project: str = "flyte-ddp"
    wandb_entity: str = ""
    wandb_mode: str = "offline"
    wandb_table_rows: int = 200
    wandb_watch: bool = False
    wandb_timeout: float = 30.0
    cache_folder: Path = field(default_factory=lambda: runs_folder() / "cache")
    cache_bytes: int | None = None
    loader_threads: int = 0
    results_copy: str = ""
    wandb_run_id: str = field(default="", kw_only=True)
    wandb_kept_at: str = field(default="", kw_only=True)  # where the caller puts what could not be sent; empty: nowhere


def runs_folder() -> Path:
    """The folder that keeps local runs and data sets: ``$FLYTE_DDP_RUNS``, or ``runs`` under the working directory."""
    return Path(os.environ.get("FLYTE_DDP_RUNS") or "runs").absolute()


def from_environment(wandb_run_id: str = "") -> Settings:
    """Reads the environment; without a wandb key the mode is offline, so that nothing ever prompts."""
    env = os.environ
    progress = env.get("FLYTE_DDP_PROGRESS", "auto")
    if progress not in ("auto", "bar", "lines", "off"):
        raise UserError(f"FLYTE_DDP_PROGRESS={progress!r}: choose one of auto, bar, lines, off")
    mode = env.get("WANDB_MODE") or ("online" if env.get("WANDB_API_KEY") else "offline")
    if mode not in ("online", "offline", "disabled"):
        raise UserError(f"WANDB_MODE={mode!r}: choose one of online, offline, disabled")
    return Settings(
        progress=progress,
        checkpoint_seconds=number("FLYTE_DDP_CHECKPOINT_SECONDS", 60.0),
        timeout=number("FLYTE_DDP_TIMEOUT", 600.0, least=1.0),
        wandb_project=env.get("WANDB_PROJECT", "flyte-ddp"),
        wandb_entity=env.get("WANDB_ENTITY", ""),
        wandb_mode=mode,
        wandb_table_rows=int(number("FLYTE_DDP_WANDB_TABLE_ROWS", 200)),
        wandb_watch=env.get("FLYTE_DDP_WANDB_WATCH", "0") == "1",
        wandb_timeout=number("FLYTE_DDP_WANDB_TIMEOUT", 30.0),
        cache_folder=Path(env.get("FLYTE_DDP_CACHE") or runs_folder() / "cache").absolute(),
        cache_bytes=int(number("FLYTE_DDP_CACHE_BYTES", 0)) or None,
        loader_threads=int(number("FLYTE_DDP_LOADER_THREADS", 0)),
        results_copy=env.get("FLYTE_DDP_RESULTS", ""),
        wandb_run_id=wandb_run_id,
    )


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
