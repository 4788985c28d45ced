"""One training run from prepared data to a run folder with model, metrics and report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UserError
from flyte_ddp.run_lock import hold
from flyte_ddp.settings import Settings

RESULTS = ("model.json", "model.pt", "predictions.npz", "report.html")


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


def run_training(hp: Hyperparameters, data: Path, run_folder: Path, settings: Settings) -> Result:
    """Trains on all ranks of this machine and writes the report.

    Args:
        data: a prepared data set, from ``flyte_ddp.datasets.fetch``.
        run_folder: where results go; those of an earlier run in it are removed first, so that none is taken for new.

    Raises:
        UserError: a mistake that the user can mend, such as another run in the same folder; no result is left behind.
        RankError: a rank failed.

    """
    # torch is imported here, not above, so that importing this module stays cheap for command-line start-up.
    from flyte_ddp import report, tracking
    from flyte_ddp.hardware import detect
    from flyte_ddp.initial_weights import fetched
    from flyte_ddp.job import Job
    from flyte_ddp.launch.spawn import launch

    hardware = detect(hp)
    prepare_folder(run_folder)
    wandb = tracking.start_wandb(run_folder, settings, hp.to_dict(), run_folder.name)
    try:
        with fetched(hp.init_from) as initial_weights:
            job = Job(
                hp=hp,
                hardware=hardware,
                settings=settings,
                data=data,
                run_folder=run_folder,
                initial_weights=initial_weights,
            )
            launch(job, num_ranks=hardware.num_ranks)
        report.write_report(run_folder)
    except BaseException:
        remove_results(run_folder)
        raise
    finally:
        if wandb is not None:
            wandb.finish()
    return read_result(run_folder)


def prepare_folder(folder: Path) -> None:
    """Makes the run folder, held by this process, writable and without an earlier run's results."""
    try:
        if not hold(folder):
            raise UserError(f"run folder {folder}: another run is writing into it; wait for its end or name another")
        folder.mkdir(parents=True, exist_ok=True)
        remove_results(folder)
        (folder / "metrics.jsonl").unlink(missing_ok=True)
        (folder / "metrics.jsonl").touch()
    except OSError as error:
        raise UserError(
            f"run folder {folder}: {error.strerror}; it must be writable, so mend its permissions or set FLYTE_DDP_RUNS"
        ) from None


def remove_results(folder: Path) -> None:
    """Removes whatever looks like a result; the metrics of a failed run stay, because they tell why it failed."""
    for name in RESULTS:
        (folder / name).unlink(missing_ok=True)


def read_result(folder: Path) -> Result:
    """The result of a finished run."""
    metrics = json.loads((folder / "model.json").read_text())["metrics"]
    return Result(folder, epoch_accuracies=metrics["epoch_accuracies"], test_accuracy=metrics["test_accuracy"])


def is_finished(folder: Path) -> bool:
    """Whether the folder holds all that a finished run leaves, and so all that a cached result points to."""
    return all((folder / name).exists() for name in (*RESULTS, "metrics.jsonl"))
