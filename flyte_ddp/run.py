"""One training run from prepared data to a run folder with model, metrics and report."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.files import SIDECAR, WEIGHTS
from flyte_ddp.core.launch.default import choose_launcher
from flyte_ddp.core.models.sidecar import read_sidecar
from flyte_ddp.core.progress import Progress
from flyte_ddp.core.runs.procedure import open_run
from flyte_ddp.core.runs.run_folder import METRICS, OUTPUTS, REPORT, RUNG, UNFINISHED
from flyte_ddp.core.runs.work import Launch, Work
from flyte_ddp.core.settings import Settings, read_settings
from flyte_ddp.datasets.prepared import check_prepared_set
from flyte_ddp.models.initial_weights import fetch_initial_weights
from flyte_ddp.plans.identity import checkpoint_identity
from flyte_ddp.plans.resolve import request_ranks, resolve
from flyte_ddp.storage.result_store import mirror_results


@dataclass(frozen=True)
class Result:
    """Folder, file paths and test measures of a finished run.

    If ``select_by`` names a measure, it is the main measure. Otherwise the main measure is the objective's first
    measure, such as accuracy, or the loss if the objective has no measure. An undefined measure is NaN, such as the
    AUROC without a positive sample.
    """

    run_folder: Path
    epoch_accuracies: list[float]  # the main measure after each evaluation
    test_accuracy: float  # the main measure of the kept model
    model: Path  # the kept model's state_dict
    sidecar: Path  # JSON that describes the model: architecture, input, classes, provenance
    metrics: Path  # all metrics, one JSON object a line
    report: Path  # one HTML page
    measures: dict[str, float]  # of the kept model, by name: the main measure first, the loss last


def run_training(
    hp: Hyperparameters,
    data: Path,
    run_folder: Path,
    settings: Settings | None = None,
    *,
    launch: Launch | None = None,
    threads: int = 0,
) -> Result:
    """Train a model on all ranks, write the files of the run, and return their paths and the test measures.

    Locks the run folder and writes all files into it. If the folder has an interrupted run, resumes from its
    checkpoint. Replaces the files of an earlier run only when all new files are complete. If the only rank runs in this
    process, kills at the end the processes that were started during the run.

    At the end waits up to 60 s for the copy of ``results/`` to ``settings.results_copy``, and up to
    ``settings.wandb_timeout`` seconds for wandb. After SIGTERM the limits are 3 s and 5 s.

    After an error, checkpoints and metrics stay in ``unfinished``, and no new result exists. Only a Ctrl-C after the
    report is written can leave a new result.

    Args:
        hp: The hyperparameters.
        data: The folder of a prepared data set, from ``flyte_ddp.datasets.fetch``.
        run_folder: The folder of the run.
        settings: The settings of the run (None: from the environment).
        launch: Finds capacity for the ranks, starts the ranks, and waits for their end. By default, one rank runs in
            this process (``core/launch/single.py``), and several ranks run in separate processes
            (``core/launch/spawn.py``).
        threads: CPU threads of each rank (0: the rank's share of the cores). The number changes rounding.

    Raises:
        UserError: The user can fix the mistake, such as another run in the same folder.
        RankError: A rank failed. The whole error is in ``traceback.txt`` in the run folder's ``unfinished``.
        StoppedError: The run got SIGTERM.
        KeyboardInterrupt: The run got Ctrl-C.
    """
    result = run_training_fraction(hp, data, run_folder, 1, settings, launch=launch, threads=threads)
    assert result is not None
    return result


def run_training_fraction(
    hp: Hyperparameters,
    data: Path,
    run_folder: Path,
    steps_divisor: int,
    settings: Settings | None = None,
    *,
    launch: Launch | None = None,
    threads: int = 0,
) -> Result | None:
    """Train as :func:`run_training` does, but stop after 1 / ``steps_divisor`` of the steps. Resumes an earlier stop.

    Stops change no bit of the run's result. If the last step was done, returns the result. Otherwise returns None, and
    ``unfinished`` has the checkpoint. The file ``rung.json`` has the step and the ``select_by`` measure of the
    validation split. Effects, waits and exceptions are the same as of :func:`run_training`.
    """
    # Imported here so that importing this module stays cheap for command-line start-up.
    from flyte_ddp.core.training.plan import INITIAL_WEIGHTS, TrainingJob
    from flyte_ddp.report import report
    from flyte_ddp.report.page import write_html
    from flyte_ddp.tracking import wandb_run

    settings = settings or read_settings()
    request = replace(request_ranks(hp), threads=threads)
    launch = launch or choose_launcher(request)  # one rank: single.launch, several ranks: spawn.launch
    unfinished = run_folder / UNFINISHED
    progress = Progress(settings.progress)
    for warning in check_prepared_set(data, hp):
        progress.print_note(warning)
    work = Work(
        function="flyte_ddp.core.training.train:train",
        arguments=TrainingJob(resolve(hp), data, steps_divisor),
        request=request,
        output_folder=unfinished,
        identity=checkpoint_identity(hp, data),
        settings=settings,
        user_code=hp.list_user_callables(),
        host_function="flyte_ddp.plans.data_on_host:set_data_folder_on_host",
    )
    with (
        open_run(work, run_folder, (RUNG, *OUTPUTS)) as work,
        mirror_results(unfinished, settings.results_copy, run_folder.name, resuming=work.checkpoint is not None),
        wandb_run.log_to_wandb(run_folder, settings, hp.to_dict()),
    ):
        init_from = hp.init_from if work.checkpoint is None else ""
        with fetch_initial_weights(init_from, hp.model, unfinished, progress, settings.weights_source) as weights:
            launch(replace(work, files={INITIAL_WEIGHTS: weights} if weights else {}))
        is_complete = not (unfinished / RUNG).exists()
        if is_complete:  # written last, because the report marks the run as complete
            write_html(unfinished / REPORT, report.render_report(unfinished, run_folder.name))
    return read_run_result(run_folder) if is_complete else None


def read_run_result(folder: Path) -> Result:
    """Read the Result of a finished run from its folder. The measures are those in ``model.json``."""
    model, sidecar, metrics, report = (folder / name for name in (WEIGHTS, SIDECAR, METRICS, REPORT))
    found = read_sidecar(sidecar).metrics
    measures = {name: math.nan if value is None else float(value) for name, value in found.test.items()}
    [values] = found.history.values()
    history = [math.nan if value is None else float(value) for value in values]
    main = next(iter(measures.values()))
    return Result(folder, history, main, model, sidecar, metrics, report, measures)
