"""One run for ``ranks``, each rank on one core: on this machine, or as a worker of torchrun on one of two hosts."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from flyte_ddp.config import Hyperparameters
from flyte_ddp.hardware import choose_hardware, detect_hardware, request_ranks
from flyte_ddp.launch import elastic
from flyte_ddp.run import run_training
from flyte_ddp.settings import Settings


def main(request: str) -> None:
    """Trains as the request (JSON) says."""
    order = json.loads(request)
    hp, data, folder = Hyperparameters(**order["hp"]), Path(order["data"]), Path(order["folder"])
    settings = Settings(progress="off", wandb_mode="disabled", checkpoint_seconds=0.0)
    if "RANK" not in os.environ:
        run_training(hp, data, folder, settings, hardware=replace(detect_hardware(hp), threads=1))
    elif elastic.is_leader():
        hardware = choose_hardware(hp, elastic.find_capacity(request_ranks(hp)))
        run_training(hp, data, folder, settings, launch=elastic.launch, hardware=hardware)
    else:
        elastic.follow()


if __name__ == "__main__":
    main(sys.argv[1])
