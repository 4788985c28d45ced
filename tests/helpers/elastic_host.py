"""The program that torchrun starts on both hosts of a test. Arguments are hyperparameters, data and run folder."""

import sys
from pathlib import Path

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.launch.remote import connection
from flyte_ddp.core.settings import Settings
from flyte_ddp.engines import elastic
from flyte_ddp.run import run_training


def main(hp: str, data: str, folder: str) -> None:
    """Lead or follow as in docs/launchers.md."""
    connection.KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 3_000}
    if elastic.is_leader():
        cache = Path(folder).parent / "cache"
        settings = Settings(progress="off", wandb_mode="disabled", cache_folder=cache, timeout=60.0)
        run_training(Hyperparameters.from_json(hp), Path(data), Path(folder), settings, launch=elastic.launch)
    else:
        elastic.follow()


if __name__ == "__main__":
    main(*sys.argv[1:])
