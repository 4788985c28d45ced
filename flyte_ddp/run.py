"""One training run from prepared data to a run folder with model, metrics and report."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from flyte_ddp import checkpoint, results
from flyte_ddp.code_digest import library_digest
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.arrays import read_description
from flyte_ddp.datasets.identity import content_identity
from flyte_ddp.datasets.prepared import check_prepared
from flyte_ddp.errors import StoppedError, UserError
from flyte_ddp.hardware import Hardware, detect
from flyte_ddp.launch import single, spawn
from flyte_ddp.result_store import copied
from flyte_ddp.run_lock import hold
from flyte_ddp.settings import Settings
from flyte_ddp.user_code import user_source_digest

STOPPED_WANDB_SECONDS = 5.0  # a pod that is told to stop has little time left
OUTPUTS = ("model.json", "model.pt", "predictions.npz", "report.html")


@dataclass(frozen=True)
class Result:
    """What a finished run left in its folder."""

    run_folder: Path
    epoch_accuracies: list[float]
    test_accuracy: float

    @property
    def model(self) -> Path:
        """The bare state_dict."""
        return self.run_folder / "model.pt"

    @property
    def sidecar(self) -> Path:
        """What makes the weights usable, as JSON."""
        return self.run_folder / "model.json"

    @property
    def metrics(self) -> Path:
        """All metrics, one JSON object a line."""
        return self.run_folder / "metrics.jsonl"

    @property
    def report(self) -> Path:
        """The report, one HTML page."""
        return self.run_folder / "report.html"


Launch = Callable[..., None]  # (job, num_ranks=...), from flyte_ddp.launch


def run_training(
    hp: Hyperparameters,
    data: Path,
    run_folder: Path,
    settings: Settings,
    *,
    launch: Launch | None = None,
    hardware: Hardware | None = None,
) -> Result:
    """Trains on all ranks and writes the report.

    Args:
        data: a prepared data set, from ``flyte_ddp.datasets.fetch``.
        run_folder: where results go; those of an earlier run in it are removed first, so that none is taken for new.
            From a checkpoint in it, which a run leaves that did not come to its end, this one goes on.
        launch: starts the ranks; None: one rank in this process, more than one in processes of their own.
        hardware: what the ranks find where they are started; None: what this machine has.

    Raises:
        UserError: a mistake that the user can mend, such as another run in the same folder; no result is left behind.
        RankError: a rank failed.
        StoppedError: this process was told to stop.

    """
    # torch is imported here, not above, so that importing this module stays cheap for command-line start-up.
    from flyte_ddp import report, tracking
    from flyte_ddp.initial_weights import fetched
    from flyte_ddp.job import Job

    hardware = hardware or detect(hp)
    workers = settings.loader_threads or hardware.threads
    cautions = check_prepared(data, hp, ranks=hardware.num_ranks, workers=workers, cache_bytes=settings.cache_bytes)
    for caution in cautions if settings.progress != "off" else ():
        print(caution, file=sys.stderr, flush=True)
    prepare_folder(run_folder)
    belongs = identity_of(hp, data)
    found = begin_or_go_on(run_folder, belongs, settings)
    wandb = tracking.start_wandb(run_folder, settings, hp.to_dict(), run_folder.name)
    wandb_limit = settings.wandb_timeout
    try:
        with (
            copied(run_folder, settings.results_copy, goes_on=found is not None),
            fetched(hp.init_from if found is None else "", run_folder) as initial_weights,
        ):
            job = Job(
                hp=hp,
                hardware=hardware,
                settings=settings,
                data=data,
                run_folder=run_folder,
                identity=belongs,
                checkpoint=found,
                initial_weights=initial_weights,
            )
            launch = launch or (single.launch if hardware.num_ranks == 1 else spawn.launch)
            launch(job, num_ranks=hardware.num_ranks)
        report.write_report(run_folder)
    except BaseException as error:
        if isinstance(error, StoppedError):
            wandb_limit = STOPPED_WANDB_SECONDS
        remove_outputs(run_folder)
        remove_partial_files(run_folder)  # of ranks that were killed
        raise
    finally:
        if wandb is not None:
            wandb.finish(wandb_limit)
    shutil.rmtree(run_folder / checkpoint.FOLDER, ignore_errors=True)
    return read_result(run_folder)


def prepare_folder(folder: Path) -> None:
    """Makes the run folder, held by this process, writable and without an earlier run's results."""
    try:
        if not hold(folder):
            raise UserError(f"run folder {folder}: another run is writing into it; wait for its end or name another")
        folder.mkdir(parents=True, exist_ok=True)
        remove_outputs(folder)
        remove_partial_files(folder)
        (folder / "metrics.jsonl").open("ab").close()
    except OSError as error:
        raise UserError(
            f"run folder {folder}: {error.strerror}; it must be writable, so mend its permissions or set FLYTE_DDP_RUNS"
        ) from None


def identity_of(hp: Hyperparameters, data: Path) -> checkpoint.Identity:
    """What a checkpoint must belong to."""
    return checkpoint.identity(
        hp,
        data=read_description(data)["digest"],
        code=library_digest(),
        user_code=user_source_digest(hp.model) if ":" in hp.model else "",
        initial_weights=content_identity(hp.init_from),
    )


def begin_or_go_on(folder: Path, run: checkpoint.Identity, settings: Settings) -> checkpoint.Checkpoint | None:
    """The checkpoint to go on from, if there is one; metrics.jsonl is then as it was when that was written, else empty.

    Raises:
        UserError: a checkpoint of another run.

    """
    found = checkpoint.go_on_from(folder, run)
    if found is not None and settings.progress != "off":
        when = datetime.fromtimestamp(found.time).strftime("%Y-%m-%d %H:%M:%S")  # noqa: DTZ006 (for a person, here)
        print(f"going on after step {found.step:,}, saved {when}", file=sys.stderr, flush=True)
    return found


def remove_partial_files(folder: Path) -> None:
    """Removes what was being written when a process was killed."""
    inner = (*(folder / checkpoint.FOLDER).glob(".*.tmp"), *(folder / results.FOLDER).rglob(".*.tmp"))
    for path in (*folder.glob(".*.tmp"), *inner):
        path.unlink(missing_ok=True)


def remove_outputs(folder: Path) -> None:
    """Removes whatever looks like a result; the metrics of a failed run stay, because they tell why it failed."""
    for name in OUTPUTS:
        (folder / name).unlink(missing_ok=True)


def read_result(folder: Path) -> Result:
    """The result of a finished run."""
    metrics = json.loads((folder / "model.json").read_text())["metrics"]
    return Result(folder, epoch_accuracies=metrics["epoch_accuracies"], test_accuracy=metrics["test_accuracy"])


def is_finished(folder: Path) -> bool:
    """Whether the folder holds all that a finished run leaves, and so all that a cached result points to."""
    return all((folder / name).exists() for name in (*OUTPUTS, "metrics.jsonl"))
