"""Launch plans, one for each entry of config/schedules.yaml. To change the plans, edit this file.

The file is read when workflows are imported. Therefore every ``pyflyte`` command rejects an invalid entry before
anything is sent.
"""

import json
import os
from collections.abc import Container

import click
from flytekit import CronSchedule, Email, LaunchPlan
from flytekit.core.workflow import PythonFunctionWorkflow
from flytekit.models.concurrency import ConcurrencyLimitBehavior, ConcurrencyPolicy
from flytekit.models.core.execution import WorkflowExecutionPhase

from flyte_ddp.core.checks.fields import CheckedFields
from flyte_ddp.core.errors import UserError, print_to_stderr
from flyte_ddp.core.settings import read_text_variable
from flyte_ddp.pods.environment import REGISTRY_VARIABLE
from flyte_ddp.pods.profiles import ENGINES
from flyte_ddp.schedules.entries import FORMS, MONITORING, RELEASING, Schedule, read_form, read_schedules
from tasks.command_line import describe_missing_engine
from tasks.input_form import prefill_form

KICKOFF_TIME = "kickoff_time"
ONE_AT_A_TIME = ConcurrencyPolicy(max_concurrency=1, behavior=ConcurrencyLimitBehavior.SKIP)


def make_launch_plans(*workflows: PythonFunctionWorkflow, taken: Container[str]) -> dict[str, LaunchPlan]:
    """Make the launch plans of ``workflows`` from config/schedules.yaml, and return the plans by name.

    A registration prints which plans are skipped, and why.

    Raises:
        UserError: An entry is invalid, or its name is in ``taken``.
    """
    by_name = {workflow.short_name: workflow for workflow in workflows}
    context, plans = click.get_current_context(silent=True), dict[str, LaunchPlan]()
    for schedule in read_schedules():
        if schedule.workflow not in by_name:
            continue
        if reason := describe_why_skipped(schedule.workflow):
            if context is not None and context.find_root().invoked_subcommand in ("register", "package"):
                print_to_stderr(f"{schedule.name} is skipped: {reason}")
            continue
        if schedule.name in taken:
            raise UserError(f"config/schedules.yaml, {schedule.name}: the name is already used; choose another name")
        plans[schedule.name] = make_launch_plan(schedule, by_name[schedule.workflow])
    return plans


def describe_why_skipped(workflow: str) -> str:
    """Return why a workflow's launch plans cannot be registered here, or "" if registration is possible."""
    if workflow in (RELEASING, MONITORING) and not os.environ.get(REGISTRY_VARIABLE):
        return f"{REGISTRY_VARIABLE} is not set"
    engine = workflow.removesuffix("_training_wf")
    return describe_missing_engine(engine) if engine in ENGINES else ""


def make_launch_plan(schedule: Schedule, workflow: PythonFunctionWorkflow) -> LaunchPlan:
    """Make the launch plan of an entry. Flyte skips a tick while an execution of the plan runs.

    If an execution fails, Flyte sends an email to the addresses in FLYTE_DDP_NOTIFY.

    Raises:
        UserError: An input is invalid, or a file cannot be read.
    """
    given = schedule.read_inputs()
    kickoff = KICKOFF_TIME if KICKOFF_TIME in workflow.python_interface.inputs else None
    recipients = [address.strip() for address in read_text_variable("FLYTE_DDP_NOTIFY").split(",") if address.strip()]
    phases = [WorkflowExecutionPhase.FAILED, WorkflowExecutionPhase.TIMED_OUT, WorkflowExecutionPhase.ABORTED]
    plan = LaunchPlan.get_or_create(
        workflow,
        name=schedule.name,
        default_inputs=dict(given),
        schedule=CronSchedule(schedule=schedule.cron, kickoff_time_input_arg=kickoff) if schedule.cron else None,
        concurrency=ONE_AT_A_TIME if schedule.cron else None,
        notifications=[Email(phases=phases, recipients_email=recipients)] if recipients else [],
    )
    parameters = plan.parameters.parameters
    for name, value in given.items():
        if isinstance(value, CheckedFields):
            parameters[name] = prefill_form(parameters[name], value)
    return plan


def describe_plan(schedule: Schedule) -> str:
    """Return the values of a schedule that differ from the defaults, as JSON.

    Reads the files that the schedule names. The JSON has the content of the files. If the launch plan is skipped,
    returns the reason instead.
    """
    if reason := describe_why_skipped(schedule.workflow):
        return f"is skipped: {reason}"
    values = json.loads(schedule.json())
    forms = {key: FORMS[key][1] for key in FORMS if key in values}
    return json.dumps(
        values | {key: json.loads(read_form(form, key, values[key]).json()) for key, form in forms.items()}
    )


if __name__ == "__main__":  # deploy/register.sh --dry-run
    for schedule in read_schedules():
        print(schedule.name, describe_plan(schedule))
