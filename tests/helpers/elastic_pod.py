"""A pod of a PyTorchJob, without Flyte. Arguments are hyperparameters, data, run folder, and numbers of pods."""

import signal
import sys
from functools import partial
from pathlib import Path

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.machine.process import use_signal_handlers
from flyte_ddp.core.settings import Settings
from flyte_ddp.engines import elastic as launcher
from flyte_ddp.pods import elastic
from flyte_ddp.pods.retries import raise_pod_terminated
from flyte_ddp.run import run_training


def main(hp: str, data: str, folder: str, least: str, most: str) -> None:
    """Train with one rank in each pod, as ReplacedPodsTask does."""
    settings = Settings(progress="lines", wandb_mode="disabled", cache_folder=Path(folder).parent / "cache")
    rules = {"last_call_timeout": 1, "keep_alive_interval": 1, "read_timeout": 20, "join_timeout": 60}
    with (
        use_signal_handlers({signal.SIGTERM: raise_pod_terminated}),
        elastic.join_job("job", (int(least), int(most)), 1, 2, rules) as node,
    ):
        if not elastic.has_launcher():
            elastic.run_ranks_until_end(node)
            return
        with node.run_in_thread():
            launch = partial(launcher.launch, node=node)
            run_training(Hyperparameters.from_json(hp), Path(data), Path(folder), settings, launch=launch)


if __name__ == "__main__":
    main(*sys.argv[1:])
