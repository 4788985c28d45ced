"""Triggers of the tasks, one for each entry of config/schedules.yaml. To change the triggers, edit this file."""

import os
from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import wraps
from typing import Any

import flyte
import flyte.remote
from flyte import Cron, TaskEnvironment, Trigger

from flyte2.inputs import to_input
from flyte_ddp.core.errors import UserError
from flyte_ddp.pods.environment import REGISTRY_VARIABLE
from flyte_ddp.pods.platforms import NO_SCHEDULE, is_in_pod
from flyte_ddp.schedules.entries import MONITORING, RELEASING, read_schedules
from flyteplugins.ddp.platform import task

SCHEDULE = "flyte-ddp-schedule"  # in the context of a run: the name of the entry
MOST_RUNS = 1000  # active runs of the project that are looked through
ACTIVE = ("queued", "waiting_for_resources", "initializing", "running")


def scheduled_task(
    environment: TaskEnvironment, workflow: str, **options: Any
) -> Callable[[Callable[..., Awaitable[Any]]], Any]:
    """Return a decorator that makes an ``async`` function a task with the triggers of ``workflow``.

    The task raises a UserError if an earlier run of the same trigger is still active. ``options`` are options of Flyte
    2's ``task``.
    """

    def make_task(function: Callable[..., Awaitable[Any]]) -> Any:
        @wraps(function)
        async def run(*args: Any, **kwargs: Any) -> Any:
            await refuse_overlap()
            return await function(*args, **kwargs)

        return task(environment, triggers=make_triggers(workflow), **options)(run)

    return make_task


def make_triggers(workflow: str) -> tuple[Trigger, ...]:
    """Return the triggers of a task: one for each entry of config/schedules.yaml with this workflow.

    Only a person starts a trigger without a cron. Without FLYTE_DDP_REGISTRY, releases and watches have no
    triggers.

    Raises:
        UserError: An entry is invalid.
    """
    if workflow in (RELEASING, MONITORING) and not os.environ.get(REGISTRY_VARIABLE):
        return ()
    return tuple(
        Trigger(
            schedule.name,
            automation=Cron(schedule.cron) if schedule.cron else None,
            inputs={name: to_input(value) for name, value in schedule.read_inputs().items()},
            custom_context={SCHEDULE: schedule.name},
        )
        for schedule in read_schedules()
        if schedule.workflow == workflow
    )


async def read_start_time() -> datetime:
    """Return the start time of this run, which is equal in all attempts.

    In a pod, may query the backend: v2.0.43 does not tell pods the time, and the SDK then gives 1 January 1970.
    """
    me: Any = flyte.ctx()
    time: datetime = me.run_start_time
    return await query_start_time(me.action.run_name) if time == NO_SCHEDULE else time


async def query_start_time(run: str) -> datetime:
    time: datetime = (await flyte.remote.Run.get.aio(run)).action.start_time
    return time


async def refuse_overlap() -> None:
    """Raise UserError if an earlier run of the same trigger is still active.

    Does nothing in a run without a trigger, and outside of pods.

    Raises:
        UserError: An earlier run is active. Of runs that started at the same time, the first by name counts as earlier.
    """
    me: Any = flyte.ctx()
    name = (me.custom_context or {}).get(SCHEDULE) if is_in_pod() else None
    if name is None:
        return
    started = await query_start_time(me.action.run_name), me.action.run_name
    # The backend rejects a filter by labels.
    async for run in flyte.remote.Run.listall.aio(in_phase=ACTIVE, sort_by=("created_at", "asc"), limit=MOST_RUNS):
        is_earlier = (run.action.start_time, run.name) < started
        if is_earlier and run.pb2.action.metadata.trigger_name == name:
            raise UserError(f"{name}: run {run.name} of the same schedule is not over; this run is skipped")
