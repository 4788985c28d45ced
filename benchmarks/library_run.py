"""One run of the library in a process like that of ``pyflyte``: it has imported flytekit and the tasks, not torch."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import workflows.training  # noqa: F401
from flyte_ddp.config import Hyperparameters
from flyte_ddp.launch.supervise import fork_server
from flyte_ddp.run import run_training
from flyte_ddp.settings import read_settings


def main(request: str) -> None:
    """Trains as the request (JSON) says and leaves the time at which it called the library in ``began.txt``."""
    order = json.loads(request)
    if "torch" in sys.modules:
        raise RuntimeError("the workflow's module imported torch, which `pyflyte run` would pay for at every start")
    hp = Hyperparameters(**order["hp"])
    settings = replace(read_settings(), progress="off", wandb_mode=order["wandb"])
    folder = Path(order["folder"])
    fork_server.POSSIBLE = fork_server.POSSIBLE and order.get("forks", True)
    began = time.time()
    run_training(hp, Path(order["data"]), folder, settings)
    (folder / "began.txt").write_text(repr(began))


if __name__ == "__main__":
    main(sys.argv[1])
