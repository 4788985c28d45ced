"""One training run from prepared data to a run folder with model, metrics and report."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from flyte_ddp import checkpoint, initial_weights
from flyte_ddp.code_digest import library_digest, releases
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.arrays import read_description
from flyte_ddp.datasets.prepared import check_prepared
from flyte_ddp.errors import StoppedError
from flyte_ddp.failed_run import explain
from flyte_ddp.hardware import Hardware, detect
from flyte_ddp.launch import single, spawn
from flyte_ddp.result_store import copied
from flyte_ddp.run_folder import METRICS, REPORT, holding, prepare_folder, remove_outputs, settle
from flyte_ddp.settings import Settings, from_environment
from flyte_ddp.user_source import user_source_digest

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
    """Trains on all ranks and writes the report.

    Args:
        data: a prepared data set, from ``flyte_ddp.datasets.fetch``.
        run_folder: where results go, when all of them are there; until then those of an earlier run in it stay. From a
            checkpoint in it, which a run leaves that did not come to its end, this one goes on.
        settings: what does not change the result; None: as the environment says.
        launch: starts the ranks; None: one rank in this process, more than one in processes of their own.
        hardware: what the ranks find where they are started; None: what this machine has.

    Raises:
        UserError: a mistake that the user can mend, such as another run in the same folder; no result is left behind.
        RankError: a rank failed; all that it said is in ``traceback.txt`` of the run folder.
        StoppedError: this process was told to stop.

    """
    settings = settings or from_environment()
    hardware = hardware or detect(hp)
    workers = settings.loader_threads or hardware.threads
    cautions = check_prepared(data, hp, ranks=hardware.num_ranks, workers=workers, cache_bytes=settings.cache_bytes)
    for caution in cautions if settings.progress != "off" else ():
        print(caution, file=sys.stderr, flush=True)
    with holding(run_folder):
        return run_in(run_folder, hp, data, settings, launch=launch, hardware=hardware)


def run_in(
    run_folder: Path, hp: Hyperparameters, data: Path, settings: Settings, *, launch: Launch | None, hardware: Hardware
) -> Result:
    """:func:`run_training`, in a folder that no other run writes into."""
    # torch is imported here, not above, so that importing this module stays cheap for command-line start-up.
    from flyte_ddp import tracking
    from flyte_ddp.job import Job
    from flyte_ddp.report import report

    work = prepare_folder(run_folder)
    belongs = identity_of(hp, data)
    found = begin_or_go_on(work, belongs, settings)
    wandb = tracking.start_wandb(run_folder, settings, hp.to_dict(), run_folder.name)
    wandb_limit = settings.wandb_timeout
    try:
        with (
            copied(work, settings.results_copy, name=run_folder.name, goes_on=found is not None),
            initial_weights.fetched(hp.init_from if found is None else "", work) as weights,
        ):
            job = Job(
                hp=hp,
                hardware=hardware,
                settings=settings,
                data=data,
                run_folder=work,
                identity=belongs,
                checkpoint=found,
                initial_weights=weights,
            )
            launch = launch or (single.launch if hardware.num_ranks == 1 else spawn.launch)
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


def take_over(run_folder: Path) -> None:
    """Has a run that is complete take the place of the one before, also where it is told to stop in between."""
    try:
        settle(run_folder)
    except BaseException:
        settle(run_folder)
        raise


def identity_of(hp: Hyperparameters, data: Path) -> checkpoint.Identity:
    """What a checkpoint must belong to."""
    return checkpoint.Identity(
        {name: value for name, value in hp.to_dict().items() if name != "num_ranks"},
        data=read_description(data)["digest"],
        code=library_digest(),
        user_code=user_source_digest(hp.model) if ":" in hp.model else "",
        initial_weights=initial_weights.identity(hp.init_from),
        releases=releases(),
    )


def begin_or_go_on(folder: Path, run: checkpoint.Identity, settings: Settings) -> checkpoint.Checkpoint | None:
    """The checkpoint to go on from, if there is one; metrics.jsonl is then as it was when that was written, else empty.

    Raises:
        UserError: a checkpoint of another run.

    """
    found = checkpoint.load_latest(folder, run)
    if found is not None and settings.progress != "off":
        when = datetime.fromtimestamp(found.time).strftime("%Y-%m-%d %H:%M:%S")  # noqa: DTZ006 (for a person, here)
        print(f"going on after step {found.step:,}, saved {when}", file=sys.stderr, flush=True)
    return found


def read_result(folder: Path) -> Result:
    """The result of a finished run."""
    metrics = json.loads((folder / "model.json").read_text())["metrics"]
    return Result(folder, epoch_accuracies=metrics["epoch_accuracies"], test_accuracy=metrics["test_accuracy"])
