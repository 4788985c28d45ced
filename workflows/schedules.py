"""Launch plans, as config/schedules.yaml has them. Who wants other ones edits that file; this one makes them."""

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
from tasks.input_form import prefill
from tasks.schedules import Schedule, read_schedules

KICKOFF_TIME = "kickoff_time"
ONE_AT_A_TIME = ConcurrencyPolicy(max_concurrency=1, behavior=ConcurrencyLimitBehavior.SKIP)


def launch_plans_of(
    *workflows: PythonFunctionWorkflow, taken: Container[str], needs: str = ""
) -> dict[str, LaunchPlan]:
    """Make the launch plans of these workflows, and return them by their names.

    Args:
        workflows: Workflows whose entries are wanted.
        taken: Names that a launch plan must not have, as its module has them already.
        needs: Environment variable without which there are no plans; a registration then says on stderr which it
            leaves out.

    Raises:
        UserError: any entry of the file is wrong, also one of another workflow.
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
    return {schedule.name: launch_plan(schedule, by_name[schedule.workflow]) for schedule in schedules}


def launch_plan(schedule: Schedule, workflow: PythonFunctionWorkflow) -> LaunchPlan:
    """Make the launch plan of an entry; a tick is skipped while an execution of the plan is going on."""
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
        name: prefill(parameters[name], value) for name, value in given.items() if isinstance(value, CheckedFields)
    }
    return plan


def failure_notifications() -> List[Email]:
    """Return a mail to the addresses in FLYTE_DDP_NOTIFY, comma-separated, for executions that fail; [] without any."""
    recipients = [address.strip() for address in read_text("FLYTE_DDP_NOTIFY").split(",") if address.strip()]
    phases = [WorkflowExecutionPhase.FAILED, WorkflowExecutionPhase.TIMED_OUT, WorkflowExecutionPhase.ABORTED]
    return [Email(phases=phases, recipients_email=recipients)] if recipients else []


def is_registering() -> bool:
    """Return whether this is a ``pyflyte`` command that registers, or packages, what it imports."""
    context = click.get_current_context(silent=True)
    return context is not None and context.find_root().invoked_subcommand in ("register", "package")
