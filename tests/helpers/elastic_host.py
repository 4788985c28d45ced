"""What each of a test's two hosts runs: in the place of Flyte's plugin Elastic's workers, or one of torchrun's workers.

Arguments are hyperparameters, data, run folder; and, unless torchrun has started this, the address of Elastic's store,
the host's own, and whether the store is there. What a run of the first kind ended with is the last line of its standard
output, as JSON.
"""

import json
import os
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from flyte_ddp.config import Hyperparameters
from flyte_ddp.launch import elastic
from flyte_ddp.launch.remote import connection, elastic_link
from flyte_ddp.run import run_training
from flyte_ddp.settings import Settings


def worker(hp: str, data: str, folder: str) -> None:
    connection.KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 3_000}
    elastic_link.UNWIND_SECONDS = (2.0, 3.0)  # not before Elastic's store counts a lost host's agent as gone, after 3 s
    elastic.RANK_0_SECONDS = 60.0

    def lead() -> None:
        cache = Path(folder).parent / "cache"
        settings = Settings(progress="off", wandb_mode="disabled", cache_folder=cache, timeout=60.0)
        run_training(Hyperparameters.from_json(hp), Path(data), Path(folder), settings, launch=elastic.launch)

    elastic.run_in_worker(lead)


def main(hp: str, data: str, folder: str, store: str, own: str, is_there: str) -> None:
    there = {"rdzv_endpoint": store, "rdzv_configs": {"is_host": is_there, "last_call_timeout": 1}, "local_addr": own}
    options = {"rdzv_backend": "c10d", "run_id": "test", "max_restarts": 0, "monitor_interval": 0.1}
    config = LaunchConfig(min_nodes=2, max_nodes=2, nproc_per_node=1, **there, **options)
    outcome: dict[str, object] = {}
    try:
        elastic_launch(config, worker)(hp, data, folder)
    except ChildFailedError as error:
        found = elastic.first_worker_error(error, memory_kills=0)
        outcome = {"type": type(found).__name__, "said": str(found), "again": getattr(found, "recoverable", None)}
    print(f"\n{json.dumps(outcome)}", flush=True)


if __name__ == "__main__":
    (worker if elastic.RUN_ID in os.environ else main)(*sys.argv[1:])
