"""The command for sweeps without Flyte: ``python -m flyte_ddp.sweep --help``."""

from pathlib import Path
from typing import BinaryIO

import click

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.files import SIDECAR, explain_write_errors
from flyte_ddp.core.runs.run_folder import is_finished
from flyte_ddp.pods.paths import print_local_files, resolve_folder
from flyte_ddp.pods.run_inputs import check_and_identify_run, find_or_fetch_data_set
from flyte_ddp.run import run_training_fraction
from flyte_ddp.sweep.halving import TrialResult, pick_winner, plan_rung, run_rung
from flyte_ddp.sweep.page import PAGES, write_sweep_page
from flyte_ddp.sweep.space import Sweep, check_sweep


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.argument("base", type=click.File("rb"))
@click.argument("sweep", type=click.File("rb"))
@click.option("--output", "-o", type=click.Path(file_okay=False, path_type=Path), default=Path("sweep"))
def main(base: BinaryIO, sweep: BinaryIO, output: Path) -> None:
    """Train the trials of SWEEP, rung by rung, and write sweep.html and best.json into a folder.

    BASE is a JSON file of hyperparameters, and SWEEP a JSON file of the sweep's settings. Runs are in FLYTE_DDP_RUNS.
    """
    hp, searched, done = Hyperparameters.from_json(base.read()), Sweep.from_json(sweep.read()), list[TrialResult]()
    check_sweep(searched, hp)
    with explain_write_errors(output):
        output.mkdir(parents=True, exist_ok=True)
    _, version = check_and_identify_run(hp, "", None)
    data = find_or_fetch_data_set(hp.dataset, hp.data_source, hp.test_dataset, version, sample=hp.sample)
    while trials := plan_rung(searched, hp, version, done):
        for trial in trials:

            def train(folder: Path, trial: TrialResult = trial) -> None:
                run_training_fraction(trial.hp, data, folder, trial.steps_divisor)

            done.append(run_rung(trial, str(resolve_folder("sweeps")), train))
    winner = pick_winner(done)
    folder = resolve_folder(winner.run)
    if not is_finished(folder):  # results outlive the folders of runs
        run_training_fraction(winner.hp, data, folder, winner.steps_divisor)
    write_sweep_page(searched, done, folder / SIDECAR, output)
    print_local_files("sweep done; written to", {output / name: what for name, what in PAGES.items()})


if __name__ == "__main__":
    main(prog_name="python -m flyte_ddp.sweep")
