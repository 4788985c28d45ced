"""The task types behind ``DDP``, for a single pod and for engines, and the choice of a type."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from importlib import import_module
from typing import TYPE_CHECKING, Any

from flytekit import PythonFunctionTask, current_context

from flyte_ddp.core.errors import UserError, require_extra
from flyte_ddp.core.machine.resources import Request
from flyte_ddp.core.settings import ALL_PODS, REQUESTED_GPUS, TRAINING_PODS
from flyte_ddp.pods import environment
from flyte_ddp.pods.platforms import is_in_pod
from flyte_ddp.task_bodies.user_function import name_run
from flytekitplugins.ddp import DDP
from flytekitplugins.ddp.flyte import (
    remove_execution_id_outside_tasks,
    replace_deck,
    report_user_errors,
    translate_errors_for_flyte,
)
from flytekitplugins.ddp.inputs import identify_inputs
from flytekitplugins.ddp.ranks import Returned, make_call
from flytekitplugins.ddp.resources import TaskOptions, count_requested_gpus, take_resources
from flytekitplugins.ddp.run import make_engine_launcher, run_in_folder, when_written

if TYPE_CHECKING:
    from flytekit import FlyteContext
    from flytekit.models.literals import LiteralMap

    from flyte_ddp.core.loops.call import Call

Function = Callable[..., Any]
GRACE = {"FLYTE_DDP_SAVE_SECONDS": "15", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "25"}  # both within Kubernetes' 30 s
received: ContextVar[LiteralMap | None] = ContextVar("received", default=None)  # the inputs, as Flyte sent them


class RanksTask(PythonFunctionTask):  # type: ignore[misc]  # which flytekit leaves untyped
    """A task whose body runs on ranks. Subclasses list this class before the type of an engine's plugin."""

    ddp: DDP
    runs_on_cluster = False  # whether rank 0 may be on a host that does not share this process's files

    def dispatch_execute(self, context: FlyteContext, literals: LiteralMap) -> Any:
        """Run the task and write the outputs, and then call the actions of :func:`call_when_outputs_written`."""
        waiting: list[Callable[[], None]] = []
        tokens = received.set(literals), when_written.set(waiting)
        try:
            with report_user_errors():
                outputs = super().dispatch_execute(context, literals)
        finally:
            received.reset(tokens[0])
            when_written.reset(tokens[1])
        for action in waiting:
            action()
        return outputs

    def execute(self, **inputs: Any) -> Any:
        """Run the body on all ranks, and return the value of rank 0. Adds rank 0's decks to the task's decks."""
        remove_execution_id_outside_tasks()
        with translate_errors_for_flyte():
            shown = identify_inputs(inputs, received.get(), self.metadata.cache_ignore_input_vars)
            raw_output = current_context().raw_output_prefix if is_in_pod() else ""
            call = make_call(self, inputs, shown, raw_output, literals=self.runs_on_cluster and is_in_pod())
            returned = self.run_body(call, name_run(self.name, call))
        for name, html in returned.decks:
            replace_deck(name, html)
        return returned.value

    def run_body(self, call: Call, run: str) -> Returned:
        """Run the call on ranks in the folder of the run, and return the result of rank 0."""
        raise NotImplementedError


class EngineTask(RanksTask):
    """A task whose ranks run on a cluster that Flyte sets up. A local run uses this machine."""

    runs_on_cluster = True
    num_ranks: int  # in the cluster
    num_hosts: int  # that the launcher waits for

    def run_body(self, call: Call, run: str) -> Returned:
        request = Request(self.num_ranks if is_in_pod() else self.ddp.num_ranks, exact=True)
        return run_in_folder(call, run, request, make_engine_launcher(self.ddp.engine, self.num_hosts))


class PodTask(RanksTask):
    """A task whose ranks run in the task's pod."""

    def run_body(self, call: Call, run: str) -> Returned:
        from flyte_ddp.engines import elastic

        launch = elastic.launch if self.ddp.engine else None
        return run_in_folder(call, run, Request(self.ddp.num_ranks, exact=True), launch)


def make_task(config: DDP, function: Function, options: TaskOptions) -> RanksTask:
    """Return the task for a function and flytekit's options. Changes ``options`` in place.

    Adds environment variables, a deck and unlimited shared memory to the options, unless the user has set them.

    Raises:
        UserError: The task is @dynamic, requests too few GPUs, or needs an extra that is not installed.
    """
    if options["execution_mode"] is not PythonFunctionTask.ExecutionBehavior.DEFAULT:
        raise UserError("@dynamic cannot run on ranks; call a @task(task_config=DDP(...)) inside")
    gpus = config.nodes * count_requested_gpus(take_resources(dict(options)))
    if 0 < gpus < config.num_ranks:
        raise UserError(
            f"num_ranks={config.num_ranks}: the task requests {gpus} GPU(s), and each rank needs one; set num_ranks to "
            "0, for a rank on each GPU, or request more GPUs"
        )
    if options["shared_memory"] is None:
        options["shared_memory"] = True  # /dev/shm is limited by the pod's memory only
    if options["enable_deck"] is None and options["disable_deck"] is None:
        options |= {"enable_deck": True, "deck_fields": ()}  # without the pages that flytekit would add
    secrets = [f"{secret.group}/{secret.key}" for secret in options["secret_requests"] or []]
    options["environment"] = {
        **GRACE,
        environment.SECRET_VARIABLE: next((name for name in secrets if "wandb" in name.lower()), "off"),
        **environment.read_settings_for_pods(ALL_PODS),
        **environment.read_settings_for_pods(TRAINING_PODS),
        **(options["environment"] or {}),
    }
    if not config.engine or (config.engine, config.nodes) == ("elastic", 1):
        if gpus:
            options["environment"].setdefault(REQUESTED_GPUS, str(gpus))
        task: RanksTask = PodTask(config, function, **options)
    else:
        with require_extra(config.engine):
            module = import_module(f"flytekitplugins.ddp.{config.engine}")
            task = getattr(module, f"{config.engine.capitalize()}Task")(config, function, **options)
    task.ddp = config
    return task
