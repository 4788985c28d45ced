"""Makes launch plans from config/schedules.yaml. To change the plans, edit that file."""

import os
import sys
from collections.abc import Container
from typing import List

import click
from flytekit import CronSchedule, Email, LaunchPlan
from flytekit.core.workflow import PythonFunctionWorkflow
from flytekit.models.concurrency import ConcurrencyLimitBehavior, ConcurrencyPolicy
from flytekit.models.core.execution import WorkflowExecutionPhase

from flyte_ddp.checked_fields import CheckedFields
from flyte_ddp.errors import UserError
from flyte_ddp.settings import read_text
from tasks.input_form import prefill_form
from tasks.schedules import Schedule, read_schedules

KICKOFF_TIME = "kickoff_time"
ONE_AT_A_TIME = ConcurrencyPolicy(max_concurrency=1, behavior=ConcurrencyLimitBehavior.SKIP)


def make_launch_plans(
    *workflows: PythonFunctionWorkflow, taken: Container[str], needs: str = ""
) -> dict[str, LaunchPlan]:
    """Make the launch plans of workflows from config/schedules.yaml, and return them by their names.

    Args:
        workflows: Workflows whose plans are made.
        taken: Names of the calling module, which a launch plan must not have.
        needs: Environment variable without which no plan is made. A registration then prints to stderr which plans are
            left out. Empty for none.

    Raises:
        UserError: an entry of the file is wrong, whatever its workflow.
    """
    by_name = {workflow.short_name: workflow for workflow in workflows}
    schedules = [schedule for schedule in read_schedules() if schedule.workflow in by_name]
    if needs and not os.environ.get(needs):
        if is_registering():
            for schedule in schedules:
                print(f"{schedule.name} is left out, as {needs} is not set", file=sys.stderr, flush=True)
        return {}
    for schedule in schedules:
        if schedule.name in taken:
            raise UserError(f"config/schedules.yaml, {schedule.name}: something else has this name; choose another")
    return {schedule.name: make_launch_plan(schedule, by_name[schedule.workflow]) for schedule in schedules}


def make_launch_plan(schedule: Schedule, workflow: PythonFunctionWorkflow) -> LaunchPlan:
    """Make and return the launch plan of an entry. Flyte skips a tick while an execution of the plan runs."""
    inputs = workflow.python_interface.inputs
    given = {"hp": schedule.hp, "model_name": schedule.model_name, "policy": schedule.policy}
    given = {name: value for name, value in given.items() if name in inputs}
    kickoff = KICKOFF_TIME if KICKOFF_TIME in inputs else None
    plan = LaunchPlan.get_or_create(
        workflow,
        name=schedule.name,
        default_inputs={**given},
        schedule=CronSchedule(schedule=schedule.cron, kickoff_time_input_arg=kickoff) if schedule.cron else None,
        concurrency=ONE_AT_A_TIME if schedule.cron else None,
        notifications=failure_notifications(),
    )
    parameters = plan.parameters.parameters
    parameters |= {
        name: prefill_form(parameters[name], value) for name, value in given.items() if isinstance(value, CheckedFields)
    }
    return plan


def failure_notifications() -> List[Email]:
    """Return the mail that Flyte sends to FLYTE_DDP_NOTIFY when an execution fails; [] if the variable is empty."""
    recipients = [address.strip() for address in read_text("FLYTE_DDP_NOTIFY").split(",") if address.strip()]
    phases = [WorkflowExecutionPhase.FAILED, WorkflowExecutionPhase.TIMED_OUT, WorkflowExecutionPhase.ABORTED]
    return [Email(phases=phases, recipients_email=recipients)] if recipients else []


def is_registering() -> bool:
    """Return whether this process is ``pyflyte register`` or ``pyflyte package``."""
    context = click.get_current_context(silent=True)
    return context is not None and context.find_root().invoked_subcommand in ("register", "package")
