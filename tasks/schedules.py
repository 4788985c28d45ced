"""Reads and checks config/schedules.yaml. Each entry becomes a launch plan.

The import of the workflows reads the file. So every ``pyflyte`` command refuses a wrong entry before it sends anything.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from flytekit import CronSchedule

from flyte_ddp.checked_fields import CheckedFields, short_repr
from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UserError, unknown_name_error
from flyte_ddp.release.policy import Policy
from flyte_ddp.release.registry import check_model_name
from tasks.engines import NEEDED

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
Fields = TypeVar("Fields", bound=CheckedFields)


@dataclass(frozen=True)
class Schedule:
    """An entry of the file: the workflow to start, its inputs, and when.

    Args:
        name: Name of the launch plan.
        workflow: Name of the workflow's function.
        hp: Hyperparameters.
        cron: Cron expression of the starts, in UTC. Empty for a plan that only persons launch.
        model_name: Name of the model in the registry. Empty for a workflow that releases no model.
        policy: Policy of the release. Unused for a workflow that releases no model.
    """

    name: str
    workflow: str
    hp: Hyperparameters
    cron: str
    model_name: str
    policy: Policy


@cache
def read_schedules(file: Path = FILE) -> list[Schedule]:
    """Read the file and the presets that it names, check all entries, and return them; [] for an empty file.

    The result is cached for this process.

    Raises:
        UserError: the file or a preset cannot be read, or an entry is wrong. The message names the entry.
    """
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
    """Check an entry of the file and return it as a Schedule; may read a preset.

    Args:
        entry: Value that the YAML parser returned.
        taken: Names of the entries before this one.

    Raises:
        UserError: a key, or the value of one, is missing, unknown or wrong.
    """
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
    policy = read_fields_key(entry, "policy", Policy)
    return Schedule(name, workflow, hp, cron, model_name, policy)


def read_text_key(entry: Mapping[str, Any], key: str) -> str:
    """Return the text under a key of an entry; "" if the key is missing or has no value.

    Raises:
        UserError: the value is no text.
    """
    value = entry.get(key)
    if not isinstance(value, str | None):
        raise UserError(f"{key}={short_repr(value)}: must be text; put it in quotes")
    return value or ""


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


def unreadable_reason(error: Exception) -> str:
    """Return a short reason why a file of JSON or YAML cannot be read, from the exception of reading or parsing it."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, UnicodeDecodeError):
        return f"is not text in UTF-8 (byte {error.start:,})"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        where = f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
        return f"is not valid YAML: {error.problem}, {where}"
    return f"is not valid {'YAML' if isinstance(error, yaml.YAMLError) else 'JSON'}: {error}"


def read_fields_key(entry: Mapping[str, Any], key: str, kind: type[Fields]) -> Fields:
    """Return the hyperparameters or the policy under a key of an entry; fields that are left out have their defaults.

    A text as the value is the path of a JSON or YAML file, which is read. The file must be in the repository, as only
    such a file is part of a registration's version.

    Raises:
        UserError: the file is elsewhere or cannot be read, or a value is refused.
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
