"""A function of the benchmarks in a separate process: ``python -m benchmarks.child MODULE:FUNCTION OUTPUT JSON``.

Imports nothing more, so that each function decides on the imports before the measurement.
"""

import importlib
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any


def train_library(order: dict[str, Any]) -> float:
    """Train in a process like ``pyflyte``, without torch, and return the time at which the library was called."""
    import workflows.training  # noqa: F401
    from flyte_ddp.config import Hyperparameters
    from flyte_ddp.core.settings import read_settings
    from flyte_ddp.run import run_training

    if "torch" in sys.modules:
        raise RuntimeError("the workflow's module imported torch, which slows every start of `pyflyte run`")
    hp = Hyperparameters(**order["hp"])
    settings = replace(read_settings(), progress="off", wandb_mode=order["wandb"])
    began = time.time()
    run_training(hp, Path(order["data"]), Path(order["folder"]), settings)
    return began


def write_pod_inputs(path: str) -> None:
    """Write the file of inputs that Flyte gives to a pod of train_model."""
    from flytekit import FlyteContextManager
    from flytekit.core.type_engine import TypeEngine
    from flytekit.types.directory import FlyteDirectory

    from flyte_ddp.config import Hyperparameters
    from tasks.training import train_model

    values = {"hp": Hyperparameters(), "data": FlyteDirectory(str(Path(path).parent)), "run_version": "run"}
    types = train_model.python_interface.inputs
    literals = TypeEngine.dict_to_literal_map(FlyteContextManager.current_context(), values, types)
    Path(path).write_bytes(literals.to_flyte_idl().SerializeToString())


def load_in_pod(inputs: str) -> None:
    """Do what the command of a pod of train_model does, and exit where the task's body would begin."""
    from flytekit.bin.entrypoint import execute_task_cmd
    from flytekit.core.python_function_task import PythonFunctionTask

    PythonFunctionTask.execute = lambda *_, **__: os._exit(0)
    resolver = "flytekit.core.python_auto_container.default_task_resolver"
    places = {"inputs": inputs, "output-prefix": f"{inputs}-outputs", "raw-output-data-prefix": f"{inputs}-data"}
    options = [f"--{name}={value}" for name, value in {**places, "resolver": resolver}.items()]
    execute_task_cmd([*options, "--", "task-module", "tasks.training", "task-name", "train_model"])
    raise RuntimeError("the task's body was not reached")


def spawn_bare(num_ranks: int, folder: str) -> dict[str, float]:
    """Return the seconds to the group of ``mp.spawn``'s ranks, from before and after the parent's import of torch."""
    began = time.time()
    from torch.multiprocessing.spawn import spawn

    imported = time.time()
    spawn(join_group, (num_ranks, folder), num_ranks)  # type: ignore[no-untyped-call]
    formed = float(Path(folder, "formed").read_text())
    return {"whole": formed - began, "without_import": formed - imported}


def join_group(rank: int, num_ranks: int, folder: str) -> None:
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    if rank == 0:
        Path(folder, "formed").write_text(repr(time.time()))
    distributed.destroy_process_group()


def main(name: str, output: str, arguments: str) -> None:
    module, _, function = name.partition(":")
    returned = getattr(importlib.import_module(module), function)(*json.loads(arguments))
    Path(output).write_text(json.dumps(returned))


if __name__ == "__main__":
    main(*sys.argv[1:])
