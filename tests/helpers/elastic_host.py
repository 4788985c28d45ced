"""The program that torchrun starts on both hosts of a test. Arguments are hyperparameters, data and run folder."""

import sys
from pathlib import Path

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.launch.remote import connection, elastic_link
from flyte_ddp.core.settings import Settings
from flyte_ddp.engines import elastic
from flyte_ddp.run import run_training


def main(hp: str, data: str, folder: str, like_a_task: str = "") -> None:
    """Lead or follow as in docs/launchers.md, or as Flyte's tasks do, which also write errors to a file."""
    connection.KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 3_000}
    elastic_link.UNWIND_SECONDS = (2.0, 3.0)  # at least 3 s, until Elastic's store counts a lost host's agent as lost

    def lead() -> None:
        cache = Path(folder).parent / "cache"
        settings = Settings(progress="off", wandb_mode="disabled", restarts=0, cache_folder=cache, timeout=60.0)
        run_training(Hyperparameters.from_json(hp), Path(data), Path(folder), settings, launch=elastic.launch)

    if like_a_task:
        elastic.run_in_worker(lead)
    elif elastic.is_leader():
        lead()
    else:
        elastic.follow()


if __name__ == "__main__":
    main(*sys.argv[1:])
