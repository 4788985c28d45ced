"""One training run from prepared data to a run folder with model, metrics and report."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.arrays import read_description
from flyte_ddp.datasets.prepared import check_prepared
from flyte_ddp.errors import StoppedError
from flyte_ddp.hardware import Hardware, detect
from flyte_ddp.launch import single, spawn
from flyte_ddp.models import initial_weights
from flyte_ddp.runs import checkpoint
from flyte_ddp.runs.failed_run import explain
from flyte_ddp.runs.identity import model_identity
from flyte_ddp.runs.result_store import mirror_results
from flyte_ddp.runs.run_folder import METRICS, REPORT, prepare_folder, remove_outputs, settle
from flyte_ddp.runs.run_lock import hold
from flyte_ddp.settings import Settings, check_wandb, from_environment

STOPPED_WANDB_SECONDS = 5.0  # a pod that is told to stop has little time left


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
        return self.run_folder / METRICS

    @property
    def report(self) -> Path:
        """The report, one HTML page."""
        return self.run_folder / REPORT


Launch = Callable[..., None]  # (job, num_ranks=...), from flyte_ddp.launch


def run_training(
    hp: Hyperparameters,
    data: Path,
    run_folder: Path,
    settings: Settings | None = None,
    *,
    launch: Launch | None = None,
    hardware: Hardware | None = None,
) -> Result:
    """Train on all ranks and write the report; return what the run left in its folder.

    Args:
        hp: what to train.
        data: a prepared data set, from ``flyte_ddp.datasets.fetch``.
        run_folder: where results go when all of them are there; until then those of an earlier run stay. If a run was
            cut off there, this one goes on from its checkpoint.
        settings: what does not change the result; None: as the environment says.
        launch: starts the ranks; None: one rank in this process, several in processes of their own.
        hardware: what the ranks find where they are started; None: what this machine has.

    Raises:
        UserError: a mistake that the user can fix, such as another run in the same folder; no result is left behind.
        RankError: a rank failed; all that it said is in ``traceback.txt`` of the run folder.
        StoppedError: this process was told to stop.

    """
    # Imported here so that importing this module stays cheap for command-line start-up.
    from flyte_ddp.report import report
    from flyte_ddp.runs.job import Job
    from flyte_ddp.tracking import wandb_run

    settings = settings or from_environment()
    if settings.wandb_mode != "disabled":
        check_wandb()
    hardware = hardware or detect(hp)
    launch = launch or (single.launch if hardware.num_ranks == 1 else spawn.launch)
    workers = settings.loader_threads or hardware.threads
    warnings = check_prepared(data, hp, ranks=hardware.num_ranks, workers=workers, cache_bytes=settings.cache_bytes)
    for warning in warnings:
        say(settings, warning)
    with hold(run_folder):
        work = prepare_folder(run_folder)
        identity = identity_of(hp, data)
        found = checkpoint.load_latest(work, identity)
        if found is not None:
            when = datetime.fromtimestamp(found.time).strftime("%Y-%m-%d %H:%M:%S")  # noqa: DTZ006 (local time)
            say(settings, f"going on after step {found.step:,}, saved {when}")
        wandb = wandb_run.start_wandb(run_folder, settings, hp.to_dict(), run_folder.name)
        wandb_limit = settings.wandb_timeout
        try:
            with (
                mirror_results(work, settings.results_copy, name=run_folder.name, resuming=found is not None),
                initial_weights.fetched(hp.init_from if found is None else "", work) as weights,
            ):
                job = Job(hp, hardware, settings, data, work, identity, initial_weights=weights, checkpoint=found)
                launch(job, num_ranks=hardware.num_ranks)
            report.write_report(work, run_folder.name)
        except BaseException as error:
            if isinstance(error, StoppedError):
                wandb_limit = STOPPED_WANDB_SECONDS
            remove_outputs(work)  # also what ranks were writing that were killed
            explain(error, run_folder)
            raise
        else:
            take_over(run_folder)
        finally:
            if wandb is not None:
                wandb.finish(wandb_limit)
        return read_result(run_folder)


def say(settings: Settings, text: str) -> None:
    """Print a line to stderr, unless progress is off."""
    if settings.progress != "off":
        print(text, file=sys.stderr, flush=True)


def take_over(run_folder: Path) -> None:
    """Replace the run before by the one that is complete, also if an exception such as Ctrl-C comes in between."""
    try:
        settle(run_folder)
    except BaseException:
        settle(run_folder)
        raise


def identity_of(hp: Hyperparameters, data: Path) -> checkpoint.Identity:
    """Return what a checkpoint must belong to."""
    return checkpoint.Identity(
        {name: value for name, value in hp.to_dict().items() if name != "num_ranks"},
        data=read_description(data)["digest"],
        **model_identity(hp),
    )


def read_result(folder: Path) -> Result:
    """Return the result of a finished run, whose ``model.json`` is read."""
    metrics = json.loads((folder / "model.json").read_bytes())["metrics"]
    return Result(folder, epoch_accuracies=metrics["epoch_accuracies"], test_accuracy=metrics["test_accuracy"])
