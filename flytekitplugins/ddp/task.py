"""The task types behind ``DDP``: one for a pod of one's own, and one for each engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flytekit import PythonFunctionTask

from flyte_ddp.errors import UserError, require_extra
from flyte_ddp.pods import environment
from flyte_ddp.settings import ALL_PODS, TRAINING_PODS
from flytekitplugins.ddp import DDP
from flytekitplugins.ddp.flyte import report_user_errors
from flytekitplugins.ddp.resources import count_ranks_per_node

if TYPE_CHECKING:
    from flytekit import Secret

Function = Callable[..., Any]
GRACE = {"FLYTE_DDP_SAVE_SECONDS": "15", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "25"}  # of Kubernetes' 30 s


def make_task(config: DDP, function: Function, options: dict[str, Any]) -> PythonFunctionTask:
    """Return the task for a function and flytekit's options; UserError if the engine's extra is not installed.

    Changes options that the caller has not given: /dev/shm is limited by the pod's memory only, and there is a deck for
    the page. Adds the settings that a registration gives to training pods to the task's environment variables.
    """
    if options["execution_mode"] is not PythonFunctionTask.ExecutionBehavior.DEFAULT:
        raise UserError("@dynamic has no ranks: call a @task(task_config=DDP(...)) in it")
    if options["shared_memory"] is None:
        options["shared_memory"] = True
    if options["enable_deck"] is None and options["disable_deck"] is None:
        options |= {"enable_deck": True, "deck_fields": ()}  # without the pages that flytekit would add
    options["environment"] = {
        **GRACE,
        environment.SECRET_VARIABLE: wandb_secret_name(options["secret_requests"] or []),
        **environment.registered_settings(ALL_PODS),
        **environment.registered_settings(TRAINING_PODS),
        **(options["environment"] or {}),
    }
    if not config.engine or (config.engine, config.nodes) == ("elastic", 1):
        return PodTask(config, function, **options)
    with require_extra(config.engine):
        if config.engine == "elastic":
            from flytekitplugins.ddp.elastic import ElasticTask as Chosen
        elif config.engine == "ray":
            from flytekitplugins.ddp.ray import RayTask as Chosen
        else:
            from flytekitplugins.ddp.dask import DaskTask as Chosen
        return Chosen(config, function, **options)


def wandb_secret_name(secrets: list[Secret]) -> str:
    """Return the first of the secrets whose name says that it is wandb's, as group/key; "off" if there is none."""
    names = [f"{secret.group}/{secret.key}" for secret in secrets]
    return next((name for name in names if "wandb" in name.lower()), "off")


class RanksTask(PythonFunctionTask):  # type: ignore[misc]  # which flytekit leaves untyped
    """A task whose body runs on ranks; a base of the task types here, before that of an engine's plugin."""

    ddp: DDP

    @property
    def num_ranks(self) -> int:
        """Number of ranks on all nodes, as the configuration or the task's requests say."""
        return self.ddp.num_ranks or self.ddp.nodes * count_ranks_per_node(self.resources)

    def dispatch_execute(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task as flytekit does, and report a UserError for an input as the user's mistake."""
        with report_user_errors():
            return super().dispatch_execute(*args, **kwargs)


class PodTask(RanksTask):
    """A task whose ranks are in its own pod."""

    def __init__(self, config: DDP, function: Function, **options: Any) -> None:
        self.ddp = config
        super().__init__(config, function, **options)
