"""Makes the task for a function from ``DDP`` and flytekit's options: which type it has, and what its pods are given."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from flytekit import PythonFunctionTask

from flyte_ddp.errors import UserError, require_extra
from flyte_ddp.pods import environment
from flyte_ddp.settings import ALL_PODS, TRAINING_PODS
from flytekitplugins.ddp import DDP
from flytekitplugins.ddp.resources import count_requested_gpus, take_resources
from flytekitplugins.ddp.task import PodTask

GRACE = {"FLYTE_DDP_SAVE_SECONDS": "15", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "25"}  # of Kubernetes' 30 s


def make_task(config: DDP, function: Callable[..., Any], options: dict[str, Any]) -> PythonFunctionTask:
    """Return the task for a function and flytekit's options.

    Raises UserError for @dynamic, if the engine's extra is not installed, or if there are fewer GPUs than ranks.
    """
    if options["execution_mode"] is not PythonFunctionTask.ExecutionBehavior.DEFAULT:
        raise UserError("@dynamic has no ranks: call a @task(task_config=DDP(...)) in it")
    gpus = config.nodes * count_requested_gpus(take_resources(dict(options)))
    if 0 < gpus < config.num_ranks:
        raise UserError(
            f"num_ranks={config.num_ranks}: the task requests {gpus} GPU(s), and each rank needs one; set num_ranks to "
            "0, which is a rank for each GPU, or request more GPUs"
        )
    if options["shared_memory"] is None:
        options["shared_memory"] = True  # /dev/shm is limited by the pod's memory only
    if options["enable_deck"] is None and options["disable_deck"] is None:
        options |= {"enable_deck": True, "deck_fields": ()}  # without the pages that flytekit would add
    secrets = [f"{secret.group}/{secret.key}" for secret in options["secret_requests"] or []]
    options["environment"] = {
        **GRACE,
        environment.SECRET_VARIABLE: next((name for name in secrets if "wandb" in name.lower()), "off"),
        **environment.registered_settings(ALL_PODS),
        **environment.registered_settings(TRAINING_PODS),
        **(options["environment"] or {}),
    }
    if not config.engine or (config.engine, config.nodes) == ("elastic", 1):
        return PodTask(config, function, **options)
    with require_extra(config.engine):
        module = import_module(f"flytekitplugins.ddp.{config.engine}")
        task: PythonFunctionTask = getattr(module, f"{config.engine.capitalize()}Task")(config, function, **options)
        return task
