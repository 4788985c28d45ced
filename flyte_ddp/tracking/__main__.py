"""The command that sends a run to wandb: ``python -m flyte_ddp.tracking send --help``."""

from dataclasses import replace
from pathlib import Path

import click

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.runs.run_folder import METRICS
from flyte_ddp.core.settings import read_settings
from flyte_ddp.tracking.wandb_feed import open_run_file
from flyte_ddp.tracking.wandb_run import WandbProcess

SECONDS = 3600.0  # time limit


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def tracking() -> None:
    """Send runs to wandb."""


@tracking.command("send")
@click.argument("run", type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path))
def send_run_to_wandb(run: Path) -> None:
    """Send a run's metrics and table of predictions to wandb as a new wandb run, and print the address.

    Waits up to an hour until wandb has the records.

    RUN is the folder of the run, or a copy of the files that a pod has kept. The key, the server, the project and the
    entity are those of WANDB_API_KEY (or wandb login), WANDB_BASE_URL, WANDB_PROJECT and WANDB_ENTITY.
    """
    try:
        open_run_file(run, METRICS).close()
    except FileNotFoundError:
        raise UserError(f"run {str(run)!r}: has no {METRICS}; give the folder of a run") from None
    process = WandbProcess(run, replace(read_settings(), wandb_timeout=SECONDS), {}, from_start=True)
    raise SystemExit(not process.finish_sending(SECONDS))


if __name__ == "__main__":
    tracking(prog_name="python -m flyte_ddp.tracking")
