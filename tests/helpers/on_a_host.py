"""What each of torchrun's workers runs on the two hosts of a test: arguments are hyperparameters, data, run folder."""

import sys
from pathlib import Path

from flyte_ddp.config import Hyperparameters
from flyte_ddp.launch import elastic, elastic_rank
from flyte_ddp.launch.supervise import network
from flyte_ddp.run import run_training
from flyte_ddp.settings import Settings

network.KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}
network.UNHEARD_MILLISECONDS = 3_000
elastic_rank.UNWIND_SECONDS = (2.0, 3.0)

if elastic.is_leader():
    hp, data, folder = Hyperparameters.from_json(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    settings = Settings(progress="off", wandb_mode="disabled", cache_folder=folder.parent / "cache", timeout=60.0)
    run_training(hp, data, folder, settings, launch=elastic.launch, hardware=elastic.hardware(hp))
else:
    elastic.follow(timeout=60.0)
