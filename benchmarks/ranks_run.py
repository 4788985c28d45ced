"""One run for ``ranks``, each rank on one core: on this machine, or as a worker of torchrun on one of two hosts."""

import json
import os
import sys
from pathlib import Path

from flyte_ddp.config import Hyperparameters
from flyte_ddp.launch import elastic
from flyte_ddp.run import run_training
from flyte_ddp.settings import Settings


def main(request: str) -> None:
    """Trains as the request (JSON) says."""
    order = json.loads(request)
    hp, data, folder = Hyperparameters(**order["hp"]), Path(order["data"]), Path(order["folder"])
    settings = Settings(progress="off", wandb_mode="disabled", checkpoint_seconds=0.0)
    if "RANK" not in os.environ:
        run_training(hp, data, folder, settings, threads=1)
    elif elastic.is_leader():
        run_training(hp, data, folder, settings, launch=elastic.launch)
    else:
        elastic.follow()


if __name__ == "__main__":
    main(sys.argv[1])
