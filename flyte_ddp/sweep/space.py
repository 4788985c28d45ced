"""What a sweep tries: its settings, the hyperparameters that it varies, and the trials that are drawn from them."""

# No "from __future__ import annotations" here: flytekit derives the console's form from real types.
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flyte_ddp.checks.fields import CheckedFields, setting, short_repr
from flyte_ddp.config import OPTIONS_OF, Hyperparameters
from flyte_ddp.errors import UserError, require_extra, unknown_name_error

ETA = 3  # of the trials of a rung, one in so many goes on, for so many times the steps
WAVE = 9  # trials that tpe draws at once, told of all before
# What decides which samples there are, which of them are held out, and what is measured on these.
FIXED = (
    *("dataset", "data_source", "test_dataset", "num_classes", "sample", "collate", "validation_fraction"),
    *("seed", "objective", "select_by", "num_ranks"),
)
OPTIONS = tuple(f"options.{of}." for of in OPTIONS_OF)
TYPES = {field.name: field.type for field in dataclasses.fields(Hyperparameters) if field.name != "options"}
FORM = 'must be a list of choices, or a range {"from": 1, "to": 9}, perhaps with "log": true or "step": 2'
MakeTrial = Callable[[Iterable[float]], Hyperparameters | None]  # by a place of [0, 1) in each dimension; None: refused


@dataclass(frozen=True)
class Dimension:
    """The choices of a hyperparameter or an option, or its range."""

    name: str
    choices: Sequence[Any] = ()
    low: float = 0.0
    high: float = 0.0
    step: float = 0.0  # 0: none
    log: bool = False
    whole: bool = False  # whether values are whole numbers

    def value_at(self, place: float) -> Any:
        """Return the value at a place of [0, 1)."""
        if self.choices:
            return self.choices[int(place * len(self.choices))]
        if self.log:
            value = self.low * ((self.high + self.whole) / self.low) ** place
        elif self.step:
            value = self.low + self.step * int(place * (1 + int((self.high - self.low) / self.step + 1e-9)))
        else:
            value = self.low + place * (self.high - self.low)
        return min(int(value) if self.whole else value, self.high)


@dataclass(frozen=True)
class Sweep(CheckedFields, called="sweep setting"):
    """How many trials a sweep has, how they are drawn, and in how many rungs most of them are left behind."""

    space: str = setting(
        "",
        "What is varied, a JSON object or its text: by the name of a hyperparameter, or `options.model.NAME` or "
        '`options.objective.NAME`, a list of choices or a range `{"from": 0.01, "to": 1, "log": true}`, or with '
        '`"step": 32`.',
        json=True,
    )
    trials: int = setting(27, "Trials that are drawn; equal ones are trained once.", at_least=1, at_most=1000)
    rungs: int = setting(3, "3 train 1/9, 1/3 and all of a run, each the best third.", at_least=1, at_most=8)
    sampler: str = setting(
        "qmc",
        "qmc: trials cover the space evenly (Sobol's points), and more trials only add to them; tpe: nine at a time, "
        "by what the first rung has shown of those before (Optuna).",
        choices=("qmc", "tpe"),
    )
    seed: int = setting(
        0, "Seed of the draws; the seed of the trainings is a hyperparameter.", at_least=0, at_most=2**32 - 1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.list_dimensions()

    def list_dimensions(self) -> list[Dimension]:
        """Return what is varied; UserError for what is no hyperparameter, must not be varied, or has no range."""
        try:
            found = json.loads(self.space or "{}")
        except ValueError as error:
            raise UserError(f"space={short_repr(self.space)}: is not JSON ({error})") from None
        if not isinstance(found, dict):
            raise UserError(f"space={short_repr(self.space)}: must be a JSON object by the names of hyperparameters")
        return [parse_dimension(name, given) for name, given in sorted(found.items())]

    def list_parts(self) -> list[int]:
        """Return what share of a run's steps each rung has trained at its end: of 27 for 1/27."""
        return [ETA**rung for rung in reversed(range(self.rungs))]

    def count_rungs(self) -> int:
        """Return how often trials are trained beside each other: tpe does the first rung in waves."""
        return self.rungs + (-(-self.trials // WAVE) - 1 if self.sampler == "tpe" else 0)


def parse_dimension(name: str, given: Any) -> Dimension:
    if name in FIXED:
        raise UserError(f"space, {name}: must be the same for all trials, to compare them; set it in the base")
    if name not in TYPES and not any(name.startswith(of) and name != of for of in OPTIONS):
        raise unknown_name_error("hyperparameter in space", name, [*TYPES, *(f"{of}NAME" for of in OPTIONS)])
    what = f"space, {name}={short_repr(given)}"
    if isinstance(given, list) and given:
        return Dimension(name, choices=given)
    if not isinstance(given, dict) or not {"from", "to"} <= given.keys() <= {"from", "to", "log", "step"}:
        raise UserError(f"{what}: {FORM}")
    ends, log, step = [given["from"], given["to"]], given.get("log", False), given.get("step", 0)
    if not all(type(each) in (int, float) and math.isfinite(each) for each in (*ends, step)) or type(log) is not bool:
        raise UserError(f"{what}: {FORM}")
    low, high = ends
    whole = TYPES[name] is int if name in TYPES else all(type(each) is int for each in (*ends, step))
    for rule, broken in {
        "from must be less than to": low >= high,
        "with log, from must be above 0, and there is no step": log and (low <= 0 or step),
        "step must be above 0, and not larger than the range": "step" in given and not 0 < step <= high - low,
        "must be whole numbers": whole and any(each != int(each) for each in (*ends, step)),
    }.items():
        if broken:
            raise UserError(f"{what}: {rule}")
    return Dimension(name, low=low, high=high, step=step or (1 if whole and not log else 0), log=log, whole=whole)


def set_values(base: Hyperparameters, values: Mapping[str, Any]) -> Hyperparameters:
    """Return the base with values by the names of hyperparameters and options; UserError if they do not fit."""
    changes, options = dict(values), base.parse_options()
    for name in values.keys() - TYPES.keys():
        _, of, option = name.split(".", 2)
        options.setdefault(of, {})[option] = changes.pop(name)
        changes["options"] = options
    return dataclasses.replace(base, **changes)


def list_values(hp: Hyperparameters) -> dict[str, Any]:
    """Return all hyperparameters and options by their names in a space."""
    given = hp.parse_options().items()
    return hp.to_dict() | {f"options.{of}.{option}": value for of, each in given for option, value in each.items()}


def check_sweep(sweep: Sweep, base: Hyperparameters) -> None:
    """Raise UserError unless each choice and each end of a range fits the base, and trials can be compared."""
    dimensions = sweep.list_dimensions()
    if not dimensions:
        raise UserError('space="": names nothing to vary; for example {"learning_rate": {"from": 0.01, "to": 1}}')
    if base.validation_fraction == 0:
        raise UserError("validation_fraction=0.0: a sweep compares trials on the validation split; set it above 0")
    for dimension in dimensions:
        if base.select_by == "loss" and dimension.name.startswith(("class_weights", "options.objective.")):
            raise UserError(
                f"space, {dimension.name}: changes the loss, by which trials are compared; set select_by in the base "
                "to another measure, such as accuracy"
            )
        for value in dimension.choices or (dimension.low, dimension.high):
            try:
                set_values(base, {dimension.name: value})
            except UserError as error:
                raise UserError(f"space, {dimension.name}: {error.message}") from None
    if sweep.sampler == "tpe":
        with require_extra("sweep"):
            import optuna  # noqa: F401


def draw_trials(sweep: Sweep, base: Hyperparameters, told: Mapping[Any, float | None]) -> list[Hyperparameters]:
    """Return the first trials of a sweep: with qmc all, with tpe those in ``told`` and the next nine.

    ``told`` has the values of trials, the less the better; None of failed ones. Leaves out equal trials, and those that
    hyperparameters' rules refuse. Fewer trials are the first ones of more. UserError if none is left.
    """
    dimensions, refused = sweep.list_dimensions(), list[UserError]()

    def make_trial(places: Iterable[float]) -> Hyperparameters | None:
        try:
            return set_values(base, {each.name: each.value_at(at) for each, at in zip(dimensions, places, strict=True)})
        except UserError as error:
            refused.append(error)
            return None

    if sweep.sampler == "tpe":
        made = draw_with_tpe(sweep, make_trial, told)
    else:
        from scipy.stats import qmc  # takes half a second

        points = qmc.Sobol(len(dimensions), rng=sweep.seed).random_base2((sweep.trials - 1).bit_length())
        made = [*map(make_trial, points[: sweep.trials])]
    trials = [*dict.fromkeys(filter(None, made))]
    if not trials:
        raise UserError(f"space: its trials do not fit the hyperparameters' rules, the last one: {refused[-1].message}")
    return trials


def draw_with_tpe(
    sweep: Sweep, make_trial: MakeTrial, told: Mapping[Any, float | None]
) -> list[Hyperparameters | None]:
    """Draw all trials anew, up to the first nine of which some are not in ``told``."""
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=sweep.seed))
    places, made = dict[str, BaseDistribution](), list[Hyperparameters | None]()
    for each in sweep.list_dimensions():
        middles = [(at + 0.5) / len(each.choices) for at in range(len(each.choices))]
        places[each.name] = CategoricalDistribution(middles) if middles else FloatDistribution(0.0, 1.0)
    for first in range(0, sweep.trials, WAVE):
        asked = [study.ask(places) for _ in range(min(WAVE, sweep.trials - first))]
        wave = [make_trial(trial.params[name] for name in places) for trial in asked]
        made += wave
        if any(hp and hp not in told for hp in wave):
            break
        for trial, hp in zip(asked, wave, strict=True):
            value = told.get(hp)  # None: refused, or failed
            study.tell(trial, value, state=optuna.trial.TrialState.FAIL if value is None else None)
    return made
