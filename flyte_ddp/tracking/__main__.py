"""The command for runs that could not be sent to wandb: ``python -m flyte_ddp.tracking --help``."""

import os
from dataclasses import replace
from pathlib import Path

import click

from flyte_ddp.runs.run_folder import METRICS, UNFINISHED
from flyte_ddp.settings import read_settings
from flyte_ddp.text.json_lines import read_records
from flyte_ddp.tracking.wandb_feed import log_run
from flyte_ddp.tracking.wandb_run import make_init_arguments, wandb_environment


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def tracking() -> None:
    """Look after the records of runs."""


@tracking.command("send")
@click.argument("run_folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--id", "run_id", default="", help="wandb's id of the run. Default: the folder's name.")
def send_run(run_folder: Path, run_id: str) -> None:
    """Send all records of a run folder to wandb, and its predictions."""
    import wandb

    os.environ |= wandb_environment(run_folder / "wandb")
    name = run_folder.resolve().name
    settings = replace(read_settings(), wandb_mode="online", wandb_run_id=run_id or name)
    unfinished = run_folder / UNFINISHED / METRICS
    records = read_records(unfinished if unfinished.exists() else run_folder / METRICS)
    arguments = make_init_arguments(run_folder, settings, {}, name)
    run = wandb.init(**arguments | {"resume": None})  # replaces what the server has of it
    log_run(run, run_folder, records, click.echo)
    click.echo(f"wandb: {run.url}")


if __name__ == "__main__":
    tracking(prog_name="python -m flyte_ddp.tracking")
