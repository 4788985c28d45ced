"""One training run from prepared data to a run folder with model, metrics and report."""

import json
import math
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.prepared import check_prepared_set
from flyte_ddp.files import SIDECAR, WEIGHTS
from flyte_ddp.hardware import request_ranks
from flyte_ddp.launch.default import choose_launcher
from flyte_ddp.models import initial_weights
from flyte_ddp.progress import Progress
from flyte_ddp.runs.identity import checkpoint_identity
from flyte_ddp.runs.run_folder import (
    METRICS,
    REPORT,
    RUNG,
    hold_run_folder,
    prepare_unfinished,
    publish_if_complete,
    remove_outputs,
    rewind_run,
)
from flyte_ddp.runs.work import Launch, Work
from flyte_ddp.settings import Settings, read_settings


@dataclass(frozen=True)
class Result:
    """The folder of a finished run, the paths of its files, and its measures on the test set.

    The main measure is the one that ``select_by`` names, else the objective's first, such as accuracy, else the loss.
    A measure that is not defined, such as the AUROC without a positive sample, is NaN.
    """

    run_folder: Path
    epoch_accuracies: list[float]  # the main measure after each evaluation
    test_accuracy: float  # the main measure of the model that is kept
    model: Path  # its state_dict
    sidecar: Path  # JSON that describes the model: architecture, input, classes, provenance
    metrics: Path  # all of them, one JSON object a line
    report: Path  # one HTML page
    measures: dict[str, float]  # of the model that is kept, by name: the main one first, the loss last


def run_training(
    hp: Hyperparameters,
    data: Path,
    run_folder: Path,
    settings: Settings | None = None,
    *,
    launch: Launch | None = None,
    threads: int = 0,
) -> Result:
    """Train a model on all ranks, write its files and the report into the run folder, and return their paths.

    ``data`` is the folder of a prepared data set, from ``flyte_ddp.datasets.fetch``. Locks the run folder, and resumes
    from the checkpoint of an interrupted run in it. Replaces an earlier run's files only when all new ones are
    complete. Waits at the end up to 60 s for the copy of ``results/`` to ``settings.results_copy``, and
    ``settings.wandb_timeout`` seconds for wandb (3 s and 5 s after SIGTERM). Kills a single rank's children at its end.

    By default the settings are those of the environment. ``launch`` finds capacity for the ranks, starts them and waits
    for them: by default in this process for one rank (``launch/single.py``), else in processes of their own
    (``launch/spawn.py``). ``threads`` are each rank's CPU threads; 0: its share of the cores. They change rounding.

    Raises UserError for a mistake that the user can fix, such as another run in the same folder; RankError if a rank
    failed (the whole error is in ``traceback.txt`` in the run folder's ``unfinished``); StoppedError after SIGTERM, and
    KeyboardInterrupt after Ctrl-C. Then there is no new result, unless Ctrl-C came while it was moved into place;
    checkpoints and metrics stay in ``unfinished``.
    """
    result = run_part(hp, data, run_folder, 1, settings, launch=launch, threads=threads)
    assert result is not None
    return result


def run_part(
    hp: Hyperparameters,
    data: Path,
    run_folder: Path,
    part: int,
    settings: Settings | None = None,
    *,
    launch: Launch | None = None,
    threads: int = 0,
) -> Result | None:
    """Train as :func:`run_training` does, and stop after 1 / ``part`` of the steps, if that comes before the run's end.

    The next call goes on from there: where calls stop changes no bit of the run. Returns None if the run has not ended:
    then ``unfinished`` has the checkpoint, and in ``rung.json`` the step and the validation split's ``select_by``.
    """
    # Imported here so that importing this module stays cheap for command-line start-up.
    from flyte_ddp.report import report
    from flyte_ddp.report.page import write_html
    from flyte_ddp.tracking import wandb_run
    from flyte_ddp.training.job import INITIAL_WEIGHTS, TrainingJob

    settings = settings or read_settings()
    request = replace(request_ranks(hp), threads=threads)
    launch = launch or choose_launcher(request)
    progress = Progress(settings.progress)
    for warning in check_prepared_set(data, hp):
        progress.print_note(warning)
    with hold_run_folder(run_folder):
        unfinished = prepare_unfinished(run_folder)
        identity = checkpoint_identity(hp, data)
        try:
            with (
                rewind_run(unfinished, identity, settings, run_folder.name) as checkpoint,
                wandb_run.log_to_wandb(run_folder, settings, hp.to_dict()),
            ):
                init_from = hp.init_from if checkpoint is None else ""
                try:
                    with initial_weights.fetch_weights(
                        init_from, hp.model, unfinished, progress, settings.weights_source
                    ) as weights:
                        launch(
                            Work(
                                function="flyte_ddp.training.train:train",
                                arguments=TrainingJob(hp, data, part),
                                request=request,
                                output_folder=unfinished,
                                identity=identity,
                                settings=settings,
                                checkpoint=checkpoint,
                                files={INITIAL_WEIGHTS: weights} if weights else {},
                                own_code=hp.own_code(),
                                on_host="flyte_ddp.training.job:find_data_on_host",
                            )
                        )
                    if not (unfinished / RUNG).exists():
                        # The last file: it marks the run as complete.
                        write_html(unfinished / REPORT, report.render_report(unfinished, run_folder.name))
                except BaseException:
                    with suppress(OSError):  # so that the error says what has failed first
                        remove_outputs(unfinished)  # also files that killed ranks have written in part
                    raise
        finally:  # also if Ctrl-C comes while wandb or the copy of the results is waited for
            try:
                publish_if_complete(run_folder)
            except BaseException:
                publish_if_complete(run_folder)  # completes a move that a Ctrl-C has interrupted
                raise
        return None if (unfinished / RUNG).exists() else read_result(run_folder)


def read_result(folder: Path) -> Result:
    model, sidecar, metrics, report = (folder / name for name in (WEIGHTS, SIDECAR, METRICS, REPORT))
    found = json.loads(sidecar.read_bytes())["metrics"]
    measures = {
        name.removeprefix("test_"): math.nan if value is None else float(value)
        for name, value in found.items()
        if name.startswith("test_")
    }
    history = next(values for name, values in found.items() if name.startswith("epoch_"))
    history = [math.nan if value is None else float(value) for value in history]
    main = next(iter(measures.values()))
    return Result(folder, history, main, model, sidecar, metrics, report, measures)
