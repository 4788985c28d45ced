"""Launch plans, one for each entry of config/schedules.yaml. To change the plans, edit that file.

The import of the workflows reads the file. So every ``pyflyte`` command refuses a wrong entry before it sends anything.
"""

import json
import os
import re
import sys
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import click
import yaml
from flytekit import CronSchedule, Email, LaunchPlan
from flytekit.core.workflow import PythonFunctionWorkflow
from flytekit.models.concurrency import ConcurrencyLimitBehavior, ConcurrencyPolicy
from flytekit.models.core.execution import WorkflowExecutionPhase

from flyte_ddp.checked_fields import CheckedFields, short_repr
from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UserError, unknown_name_error
from flyte_ddp.release.policy import Policy
from flyte_ddp.release.registry import check_model_name
from flyte_ddp.settings import read_text
from tasks.command_line import NEEDED, unreadable_reason
from tasks.input_form import prefill_form

ROOT = Path(__file__).parents[1]
FILE = ROOT / "config/schedules.yaml"
EXAMPLE = "{name: weekly, workflow: training_wf, hyperparameters: config/fast.json, cron: 0 3 * * 0}"
KEYS = ("name", "workflow", "cron", "hyperparameters")  # of all entries
RELEASE_KEYS = ("model_name", "policy")  # of entries that release a model
RELEASING = "release_wf"
WORKFLOWS = ("training_wf", "retraining_wf", RELEASING, *(f"{engine}_training_wf" for engine in NEEDED))
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}")
# Five fields as Flyte's scheduler knows them: no seconds, no L, W or #, and Sunday is 0 only.
CRON = re.compile(r"([\d*/,-]+ +){3}([\d*/,-]|[a-z]{3})+ +([0-6*/,-]|[a-z]{3})+", re.IGNORECASE)
DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
KICKOFF_TIME = "kickoff_time"
ONE_AT_A_TIME = ConcurrencyPolicy(max_concurrency=1, behavior=ConcurrencyLimitBehavior.SKIP)
Fields = TypeVar("Fields", bound=CheckedFields)


@dataclass(frozen=True)
class Schedule:
    """An entry of the file: the workflow to start, its inputs, and when."""

    name: str  # of the launch plan
    workflow: str  # name of the workflow's function
    hp: Hyperparameters
    cron: str  # of the starts, in UTC; "" for a plan that only persons launch
    model_name: str  # in the registry; "" for a workflow that releases no model
    policy: Policy  # of the release; unused for a workflow that releases no model


def make_launch_plans(
    *workflows: PythonFunctionWorkflow, taken: Container[str], needs: str = ""
) -> dict[str, LaunchPlan]:
    """Make the launch plans of workflows from config/schedules.yaml, and return them by their names.

    Makes none if ``needs`` names a variable that is not set. A wrong entry, or a name in ``taken``, is a UserError.
    """
    by_name = {workflow.short_name: workflow for workflow in workflows}
    schedules = [schedule for schedule in read_schedules() if schedule.workflow in by_name]
    if needs and not os.environ.get(needs):
        context = click.get_current_context(silent=True)
        if context is not None and context.find_root().invoked_subcommand in ("register", "package"):
            for schedule in schedules:
                print(f"{schedule.name} is left out, as {needs} is not set", file=sys.stderr, flush=True)
        return {}
    for schedule in schedules:
        if schedule.name in taken:
            raise UserError(f"config/schedules.yaml, {schedule.name}: something else has this name; choose another")
    return {schedule.name: make_launch_plan(schedule, by_name[schedule.workflow]) for schedule in schedules}


def make_launch_plan(schedule: Schedule, workflow: PythonFunctionWorkflow) -> LaunchPlan:
    """Make the launch plan of an entry. Flyte skips a tick while an execution of the plan runs."""
    inputs = workflow.python_interface.inputs
    given = {"hp": schedule.hp, "model_name": schedule.model_name, "policy": schedule.policy}
    given = {name: value for name, value in given.items() if name in inputs}
    kickoff = KICKOFF_TIME if KICKOFF_TIME in inputs else None
    recipients = [address.strip() for address in read_text("FLYTE_DDP_NOTIFY").split(",") if address.strip()]
    phases = [WorkflowExecutionPhase.FAILED, WorkflowExecutionPhase.TIMED_OUT, WorkflowExecutionPhase.ABORTED]
    plan = LaunchPlan.get_or_create(
        workflow,
        name=schedule.name,
        default_inputs={**given},
        schedule=CronSchedule(schedule=schedule.cron, kickoff_time_input_arg=kickoff) if schedule.cron else None,
        concurrency=ONE_AT_A_TIME if schedule.cron else None,
        notifications=[Email(phases=phases, recipients_email=recipients)] if recipients else [],
    )
    parameters = plan.parameters.parameters
    for name, value in given.items():
        if isinstance(value, CheckedFields):
            parameters[name] = prefill_form(parameters[name], value)
    return plan


@cache
def read_schedules(file: Path = FILE) -> list[Schedule]:
    """Return all entries of the file, checked, and read once in a process; [] for no entries."""
    label = f"{file.parent.name}/{file.name}"
    try:
        entries = yaml.safe_load(file.read_text(encoding="utf-8")) or []
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(
            f"{label}: {unreadable_reason(error)}; restore it, or leave it empty to have no launch plans"
        ) from None
    if not isinstance(entries, list):
        raise UserError(f"{label}: must be a list of entries such as {EXAMPLE}, got {short_repr(entries)}")
    schedules: list[Schedule] = []
    for number, entry in enumerate(entries, 1):
        name = entry.get("name") if isinstance(entry, Mapping) else None
        try:
            schedules.append(parse_entry(entry, taken=[schedule.name for schedule in schedules]))
        except UserError as error:
            where = name if isinstance(name, str) else f"entry {number}"
            raise UserError(f"{label}, {where}: {error.message}") from None
    return schedules


def parse_entry(entry: object, taken: list[str]) -> Schedule:
    if not isinstance(entry, Mapping):
        raise UserError(f"must be an object such as {EXAMPLE}, got {short_repr(entry)}")
    name, workflow, cron, model_name = (read_text_key(entry, key) for key in ("name", "workflow", "cron", "model_name"))
    if not NAME.fullmatch(name):
        raise UserError(f"name={name!r}: must be letters, digits and '_' only, and begin with a letter")
    if name in taken:
        raise UserError(f"name={name!r}: an entry before has it too; launch plans need different names")
    if workflow not in WORKFLOWS:
        raise unknown_name_error("workflow", workflow, WORKFLOWS)
    known = (*KEYS, *(RELEASE_KEYS if workflow == RELEASING else ()))
    for key in entry:
        if key not in known:
            raise unknown_name_error(f"key of an entry with {workflow}", str(key), known)
    if cron:
        refuse_bad_cron(cron)
    if workflow == RELEASING:
        check_model_name(model_name)
    hp = read_fields_key(entry, "hyperparameters", Hyperparameters)
    return Schedule(name, workflow, hp, cron, model_name, read_fields_key(entry, "policy", Policy))


def read_text_key(entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str | None):
        raise UserError(f"{key}={short_repr(value)}: must be text; put it in quotes")
    return value or ""


def read_fields_key(entry: Mapping[str, Any], key: str, kind: type[Fields]) -> Fields:
    """Return the hyperparameters or the policy under a key of an entry: an object, or a file's path.

    The file must be in the repository, as only such a file is part of a registration's version.
    """
    values = entry.get(key) or {}
    if isinstance(values, str):
        must = "must be an object, or a file of the repository such as config/fast.json"
        file = (ROOT / values).resolve()
        if not file.is_relative_to(ROOT.resolve()):
            raise UserError(f"{key}={values!r}: is not in the repository; {must}")
        try:
            values = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(f"{key}={values!r}: {unreadable_reason(error)}; {must}") from None
    return kind.from_json(json.dumps(values, default=str))


def refuse_bad_cron(text: str) -> None:
    """Raise UserError for a cron expression that Flyte's scheduler refuses or that never comes, such as 30 February."""
    # flytekit checks with croniter, which accepts a range that ends before it begins. Flyte's scheduler does not.
    place = {name: number for names in (DAYS, MONTHS) for number, name in enumerate(names)}
    ranges = re.findall(r"(\w+)-(\w+)", text.lower())
    try:
        CronSchedule(schedule=text)
        fits = CRON.fullmatch(text) is not None
        fits = fits and all(int(place.get(first, first)) <= int(place.get(last, last)) for first, last in ranges)
    except ValueError:
        fits = False
    if not fits:
        raise UserError(
            f"cron={text!r}: must be five fields, in UTC: minute, hour, day of month, month, day of week (0 to 6, "
            "Sunday is 0), such as 0 3 * * * for every day at 3"
        )
