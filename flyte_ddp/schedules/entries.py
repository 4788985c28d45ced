"""The entries of config/schedules.yaml: workflows to start, with times and inputs.

A front makes its schedules from the entries.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from croniter import croniter

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.checks.fields import CheckedFields, setting, short_repr
from flyte_ddp.core.checks.parsing import MisreadError
from flyte_ddp.core.errors import UserError
from flyte_ddp.monitor.source import WindowSource
from flyte_ddp.pods.profiles import ENGINES
from flyte_ddp.release.model_files import check_model_name
from flyte_ddp.release.policy import Policy
from flyte_ddp.schedules.yaml_files import describe_read_error, load_strictly
from flyte_ddp.sweep.space import Sweep, check_sweep

ROOT = Path(__file__).parents[2]
FILE = ROOT / "config/schedules.yaml"
EXAMPLE = "{name: weekly, workflow: training_wf, hyperparameters: config/fast.json, cron: 0 3 * * 0}"
RELEASING, MONITORING, SWEEPING = "release_wf", "monitor_wf", "sweep_wf"
TRAINING = ("training_wf", "retraining_wf", *(f"{engine}_training_wf" for engine in ENGINES))
WORKFLOWS = (*TRAINING, RELEASING, MONITORING, SWEEPING)
# The keys of an entry that are inputs, by workflow. Other workflows have hyperparameters alone.
INPUTS = {
    RELEASING: ("hyperparameters", "model_name", "policy"),
    MONITORING: ("model_name", "window"),
    SWEEPING: ("hyperparameters", "sweep"),
}
# The keys that are an object or a file, with the workflow's input and its class.
FORMS: dict[str, tuple[str, type[CheckedFields]]] = {
    "hyperparameters": ("hp", Hyperparameters),
    "policy": ("policy", Policy),
    "window": ("window", WindowSource),
    "sweep": ("sweep", Sweep),
}
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}")
# Five fields as Flyte's scheduler knows them: no seconds, no L, W or #, and Sunday is 0 only.
CRON = re.compile(r"([\d*/,-]+ +){3}([\d*/,-]|[a-z]{3})+ +([0-6*/,-]|[a-z]{3})+", re.IGNORECASE)
DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
Fields = TypeVar("Fields", bound=CheckedFields)


@dataclass(frozen=True)
class Schedule(CheckedFields, called="key"):
    """An entry of the file: the workflow to start, its inputs, and the times."""

    name: str = setting("", "Name of the launch plan.")
    workflow: str = setting("", "Name of the workflow's function.", choices=WORKFLOWS)
    hyperparameters: str = setting("", "Hyperparameters, an object or a file of the repository.", json=True)
    cron: str = setting("", "Times in UTC; without times, only users launch the plan.")
    model_name: str = setting("", f"Name in the registry, for {RELEASING} and {MONITORING}.")
    policy: str = setting("", f"Policy of the release, an object or a file, for {RELEASING}.", json=True)
    sweep: str = setting("", f"The sweep, an object or a file, for {SWEEPING}.", json=True)
    window: str = setting("", f"Location of the window's samples, an object or a file, for {MONITORING}.", json=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not NAME.fullmatch(self.name):
            raise UserError(f"name={self.name!r}: must have only letters, digits and '_', and begin with a letter")
        if self.cron:
            check_cron(self.cron)
        for key in (*FORMS, "model_name"):
            if getattr(self, key) and key not in self.keys:
                raise UserError(f"{key} is not an input of {self.workflow}; remove {key}")
        if "model_name" in self.keys:
            check_model_name(self.model_name)
        self.read_inputs()

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that are inputs of the workflow."""
        return INPUTS.get(self.workflow, ("hyperparameters",))

    def read_inputs(self) -> dict[str, Any]:
        """Return the default inputs of the plan, by the name of the workflow's input. Reads the files of the entry.

        Raises:
            UserError: An input is invalid, or a file cannot be read.
        """
        forms = [(key, *FORMS[key]) for key in self.keys if key in FORMS]
        inputs: dict[str, Any] = {name: read_form(form, key, getattr(self, key)) for key, name, form in forms}
        if "model_name" in self.keys:
            inputs["model_name"] = self.model_name
        if self.workflow == MONITORING:
            inputs["window"].fill_in_time(datetime.now(UTC))  # raises UserError for a window without samples
        if self.workflow == SWEEPING:
            check_sweep(inputs["sweep"], inputs["hp"])
        return inputs


@cache
def read_schedules(file: Path = FILE) -> list[Schedule]:
    """Return all checked entries of the file, or [] for an empty file. Cached for the process.

    Raises:
        UserError: The file cannot be read, an entry is invalid, or two entries have the same name.
    """
    label = f"{file.parent.name}/{file.name}"
    entries = read_yaml(file, label, "correct it (put a cron in quotes); an empty file has no launch plans") or []
    if not isinstance(entries, list):
        raise UserError(f"{label}: must be a list of entries such as {EXAMPLE}, got {short_repr(entries)}")
    schedules: list[Schedule] = []
    for number, entry in enumerate(entries, 1):
        name = entry.get("name") if isinstance(entry, Mapping) else None
        try:
            values = Schedule.check_field_names(entry)
            schedule = Schedule(**{key: value for key, value in values.items() if value is not None})
        except UserError as error:
            where = name if isinstance(name, str) else f"entry {number}"
            raise UserError(f"{label}, {where}: {error.message}") from None
        if schedule.name in [each.name for each in schedules]:
            raise UserError(f"{label}, {name}: duplicate name; launch plans need different names")
        schedules.append(schedule)
    return schedules


def read_form(kind: type[Fields], key: str, text: str) -> Fields:
    """Return the hyperparameters, policy, sweep or window of an entry, from JSON or from a file of the repository.

    Other files are rejected, because only files of the repository are part of a registration's version. ``key`` names
    the value in errors. An empty ``text`` gives the defaults.

    Raises:
        UserError: The file is not in the repository or cannot be read, or a value is not allowed.
    """
    if not text or text.startswith("{"):
        return kind.from_json(text or "{}")
    must = "must be an object, or a file of the repository such as config/fast.json"
    file = (ROOT / text).resolve()
    if not file.is_relative_to(ROOT.resolve()):
        raise UserError(f"{key}={text!r}: is not in the repository; {must}")
    return kind.from_json(json.dumps(read_yaml(file, f"{key}={text!r}", must), default=str))


def read_yaml(file: Path, label: str, fix: str) -> Any:
    """Return the value of a file of JSON or YAML.

    Raises:
        UserError: The file cannot be read, parsed, or read as written. The text begins with ``label``, and may end with
            ``fix``.
    """
    try:
        return load_strictly(file.read_text(encoding="utf-8"))
    except MisreadError as error:
        raise UserError(f"{label}: {error.message}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{label}: {describe_read_error(error)}; {fix}") from None


def check_cron(text: str) -> None:
    """Raise UserError for a cron expression that Flyte's scheduler rejects, or that never occurs, as 30 February."""
    # flytekit checks with croniter, which accepts a range that ends before it begins. Flyte's scheduler does not.
    place = {name: number for names in (DAYS, MONTHS) for number, name in enumerate(names)}
    ranges = re.findall(r"(\w+)-(\w+)", text.lower())
    try:
        croniter(text).get_next()
        fits = CRON.fullmatch(text) is not None
        fits = fits and all(int(place.get(first, first)) <= int(place.get(last, last)) for first, last in ranges)
    except ValueError:
        fits = False
    if not fits:
        raise UserError(
            f"cron={text!r}: must be five fields, in UTC: minute, hour, day of month, month, day of week (0 to 6, "
            "Sunday is 0), such as 0 3 * * * for every day at 3"
        )
