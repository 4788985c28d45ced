"""The settings of a sweep, the space of hyperparameters, and the trials drawn from the space."""

# No "from __future__ import annotations" here: flytekit derives the console's form from real types.
import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import TYPE_CHECKING, Any

from flyte_ddp.config import FIELDS_WITH_OPTIONS, Hyperparameters
from flyte_ddp.core.checks.fields import LARGEST_INT, CheckedFields, setting, short_repr
from flyte_ddp.core.checks.parsing import JsonObject, parse_json, parse_yaml_number
from flyte_ddp.core.checks.records import has_outer_form
from flyte_ddp.core.errors import UserError, require_extra, unknown_name_error

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution

ETA = 3  # the best third of a rung's trials enters the next rung, for three times the steps
WAVE = 9  # trials that tpe draws at once, with the results of all earlier trials
BEST, RECENT = 25, 200  # trials whose results tpe gets: tpe uses at most 25 as good trials
# The most draws until enough draws differ: of tpe for a wave, and of Sobol's points in all.
TPE_DRAWS, SOBOL_DRAWS = 4 * WAVE, 2**16
# Equal for all trials, because these decide about samples, held-out samples and measures.
FIXED = (
    *("dataset", "data_source", "test_dataset", "num_classes", "sample", "collate", "validation_fraction"),
    *("seed", "objective", "select_by", "num_ranks"),
)
OPTIONS = tuple(f"options.{of}." for of in FIELDS_WITH_OPTIONS)
TYPES = {field.name: field.type for field in dataclasses.fields(Hyperparameters) if field.name != "options"}
FORM = 'must be a list of choices, or a range {"from": 1, "to": 9}, optionally with "log": true or "step": 2'


@dataclass(frozen=True)
class Dimension:
    """The choices, or the range, of a hyperparameter or an option."""

    name: str
    choices: Sequence[Any] = ()
    low: float = 0.0
    high: float = 0.0
    step: float = 0.0  # 0: none
    log: bool = False
    whole: bool = False  # whether values are whole numbers

    def count_values(self) -> float:
        """Return the number of different values, or infinity for a continuous range."""
        if self.choices:
            return float(len({*map(json.dumps, self.choices)}))
        if self.step:
            return 1.0 + int((self.high - self.low) / self.step + 1e-9)
        return self.high - self.low + 1.0 if self.whole else math.inf

    def place_to_value(self, place: float) -> Any:
        """Return the value at a position in [0, 1). Positions divide the choices or the range evenly."""
        if self.choices:
            return self.choices[int(place * len(self.choices))]
        if self.log:
            value = self.low * ((self.high + self.whole) / self.low) ** place
        elif self.step:
            value = self.low + self.step * int(place * self.count_values())
        else:
            value = self.low + place * (self.high - self.low)
        return min(int(value) if self.whole else value, self.high)

    def value_to_place(self, value: Any) -> float:
        """Return the position in [0, 1] that :meth:`place_to_value` maps to ``value``, or the middle of the positions.

        Raises ValueError if ``value`` is not among the choices.
        """
        if self.choices:
            texts, text = [*map(json.dumps, self.choices)], json.dumps(value)  # as texts, true differs from 1
            number = texts.index(text) if text in texts else self.choices.index(value)
            return (number + 0.5) / len(self.choices)
        if self.log:
            place = math.log((value + 0.5 * self.whole) / self.low) / math.log((self.high + self.whole) / self.low)
        elif self.step:
            place = (round((value - self.low) / self.step) + 0.5) / self.count_values()
        else:
            place = (value - self.low) / (self.high - self.low)
        return min(max(0.0, place), 1.0)


@dataclass(frozen=True)
class Sweep(CheckedFields, called="sweep setting"):
    """The settings of a sweep: the space, the number of trials, the sampler, and the number of rungs."""

    space: str = setting(
        "",
        "The hyperparameters to vary, as a JSON object or its text. A hyperparameter's name, `options.model.NAME` or "
        '`options.objective.NAME` has a list of choices or a range, such as `{"from": 0.01, "to": 1, "log": true}` '
        'or `{"from": 32, "to": 256, "step": 32}`.',
        json=True,
    )
    trials: int = setting(
        27, "Number of different trials. A smaller space is tried completely.", at_least=1, at_most=1000
    )
    rungs: int = setting(
        3, "3 rungs train 1/9, 1/3 and all of a run, each with the best third of the trials.", at_least=1, at_most=8
    )
    sampler: str = setting(
        "qmc",
        "qmc: trials cover the space evenly (Sobol's points), and a larger number only adds trials; tpe: nine trials "
        "at a time, proposed by Optuna from the first rung's results of earlier trials.",
        choices=("qmc", "tpe"),
    )
    seed: int = setting(
        0, "Seed of the sampler. The seed of the trainings is a hyperparameter.", at_least=0, at_most=2**32 - 1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.list_dimensions()

    def list_dimensions(self) -> list[Dimension]:
        """Parse the space, and return the hyperparameters and options that are varied, ordered by name.

        Raises UserError if the space is not JSON, if a name is unknown or must not be varied, or if a range is invalid.
        """
        try:
            found = parse_json(self.space or "{}")
        except ValueError as error:
            raise UserError(f"space={short_repr(self.space)}: is not JSON ({error})") from None
        if not isinstance(found, dict):
            raise UserError(f"space={short_repr(self.space)}: must be a JSON object with hyperparameters as keys")
        return [parse_dimension(name, given) for name, given in sorted(found.items())]

    def count_combinations(self) -> float:
        """Return the number of combinations in the space, or infinity with a continuous range."""
        return math.prod(each.count_values() for each in self.list_dimensions())

    def is_adaptive(self) -> bool:
        """Return whether later trials depend on earlier results: with tpe, unless all combinations are tried."""
        return self.sampler == "tpe" and self.count_combinations() > self.trials

    def list_divisors(self) -> list[int]:
        """Return a divisor for each rung: 27 if the rung ends after 1/27 of a run's steps. The last divisor is 1."""
        return [ETA**rung for rung in reversed(range(self.rungs))]

    def count_trial_groups(self) -> int:
        """Return the number of successive groups of trials. A group is trained in parallel.

        A group is a rung. With tpe, the first rung has several groups of up to nine trials.
        """
        return self.rungs + (-(-self.trials // WAVE) - 1 if self.is_adaptive() else 0)

    def describe_missing_trials(self, drawn: int) -> str:
        """Return why a sweep has drawn only ``drawn`` trials, or "" if the sweep has drawn all requested trials."""
        if drawn == self.trials:
            return ""
        why = "other trials would be duplicates, or the hyperparameters' rules reject them"
        if drawn == self.count_combinations():
            why = f"the space has {drawn} combinations"
        return f"{drawn} of {self.trials} trials: {why}"


def parse_dimension(name: str, given: Any) -> Dimension:
    """Parse and check the choices or the range of a hyperparameter or an option.

    ``given`` is the value in the space's JSON. Raises UserError if the name is unknown or must not be varied, or if the
    choices or the range are invalid.
    """
    if name in FIXED:
        raise UserError(f"space, {name}: must be the same for all trials; set it in hp")
    if name not in TYPES and not any(name.startswith(of) and name != of for of in OPTIONS):
        raise unknown_name_error("hyperparameter in space", name, [*TYPES, *(f"{of}NAME" for of in OPTIONS)])
    what = f"space, {name}={short_repr(given)}"
    kind = TYPES.get(name)  # None: an option's, which is not known
    if isinstance(given, list) and given:
        return Dimension(name, choices=[*map(parse_yaml_number, given)] if kind in (int, float) else given)
    if not isinstance(given, dict) or not {"from", "to"} <= given.keys() <= {"from", "to", "log", "step"}:
        raise UserError(f"{what}: {FORM}")
    numbers = low, high, step = [parse_yaml_number(given.get(key, 0)) for key in ("from", "to", "step")]
    log, has_step = given.get("log", False), "step" in given
    if not all(has_outer_form(each, float) for each in numbers) or type(log) is not bool:
        raise UserError(f"{what}: {FORM}")
    integers, width = all(type(each) is int for each in numbers), float(high) - float(low)
    whole = kind is int or (kind is None and has_step and integers)
    for rule, broken in {
        "from must be less than to": low >= high,
        "with log, from must be above 0, and step must be 1 with whole numbers": log
        and (low <= 0 or (has_step and not (whole and step == 1))),
        "step must be above 0, and not larger than the range": has_step and not 0 < step <= high - low,
        "must have at most 2**53 steps, and ends whose difference is finite": width == math.inf
        or (step > 0 and width / step > LARGEST_INT),
        "must be whole numbers": whole and any(each != int(each) for each in numbers),
        'may mean whole or real numbers; add "step": 1 for whole numbers, or write an end with a point for real ones, '
        f"such as {low}.0": kind is None and integers and not has_step and (low, high) != (0, 1),
    }.items():
        if broken:
            raise UserError(f"{what}: {rule}")
    step = 0 if log else step or int(whole)
    return Dimension(name, low=low, high=high, step=step, log=log, whole=whole)


def apply_values(base: Hyperparameters, values: Mapping[str, Any]) -> Hyperparameters:
    """Return a copy of the hyperparameters ``base`` in which ``values`` are set by name.

    The name of an option is, for example, ``options.model.NAME``. Raises UserError if the hyperparameters' rules reject
    the result.
    """
    changes, options = dict(values), base.parse_options()
    for name in values.keys() - TYPES.keys():
        _, of, option = name.split(".", 2)
        options.setdefault(of, {})[option] = changes.pop(name)
        changes["options"] = options
    return dataclasses.replace(base, **changes)


def flatten_hyperparameters(hp: Hyperparameters) -> JsonObject:
    """Return all hyperparameters and given options by the names of a space, such as ``options.model.NAME``."""
    given = hp.parse_options().items()
    return hp.to_dict() | {f"options.{of}.{option}": value for of, each in given for option, value in each.items()}


def get_value(hp: Hyperparameters, name: str) -> Any:
    """Return a hyperparameter or an option by the name of a space. Raises KeyError if the option is missing."""
    if name in TYPES:
        return getattr(hp, name)
    _, of, option = name.split(".", 2)
    return hp.parse_options()[of][option]


def check_sweep(sweep: Sweep, base: Hyperparameters) -> None:
    """Raise UserError unless ``base`` accepts each choice and each end of a range, and trials can be compared.

    Also raises UserError if nothing is varied, or if tpe's extra ``sweep`` is not installed.
    """
    dimensions = sweep.list_dimensions()
    if not dimensions:
        raise UserError('space="": must name a hyperparameter; for example {"learning_rate": {"from": 0.01, "to": 1}}')
    if base.validation_fraction == 0:
        raise UserError("validation_fraction=0.0: a sweep compares trials on the validation split; set it above 0")
    for dimension in dimensions:
        if base.select_by == "loss" and dimension.name.startswith(("class_weights", "options.objective.")):
            raise UserError(
                f"space, {dimension.name}: changes the loss, by which trials are compared; set select_by in hp to "
                "another measure, such as accuracy"
            )
        for value in dimension.choices or (dimension.low, dimension.high):
            try:
                apply_values(base, {dimension.name: value})
            except UserError as error:
                raise UserError(f"space, {dimension.name}: {error.message}") from None
    if sweep.sampler == "tpe":
        with require_extra("sweep"):
            import optuna  # noqa: F401


def draw_trials(sweep: Sweep, base: Hyperparameters, results: Mapping[Any, float | None]) -> list[Hyperparameters]:
    """Return the trials of a sweep that are known so far, as hyperparameters, in the order of the draws.

    If the sampler is tpe and the space has more combinations than ``trials``, returns the trials of the complete waves
    (of nine) in ``results``, and the trials of the next wave. Sets Optuna's log level. Otherwise the points of a Sobol
    sequence are all trials, and all trials are known at once.

    All trials differ. Trials that the hyperparameters' rules reject are skipped. A larger ``sweep.trials`` keeps the
    earlier trials. With tpe, the earlier trials change if ``trials`` reaches the number of combinations.

    Args:
        sweep: The space, and the number of trials to draw.
        base: The hyperparameters that are not varied.
        results: The value of each trained trial by its hyperparameters, in the order of the draws. Less is better, and
            None stands for a failed trial. Only tpe uses the values. An incomplete last wave is drawn again.

    Raises:
        UserError: The hyperparameters' rules reject all trials.
    """
    made = (
        draw_with_tpe(sweep, base, results)
        if sweep.is_adaptive()
        else make_trials(sweep, base, draw_sobol_points(sweep))
    )
    trials = [*dict.fromkeys(each for each in made if isinstance(each, Hyperparameters))]
    if not trials:
        raise UserError(f"space: the hyperparameters' rules reject all trials; the last error: {made[-1]}")
    return trials


def make_trials(sweep: Sweep, base: Hyperparameters, points: Iterable[list[Any]]) -> list[Hyperparameters | UserError]:
    """Return the hyperparameters for each point of a space, or the error if the rules reject the hyperparameters.

    A point has the values of all dimensions, ordered by the dimension's name.
    """
    names, made = [each.name for each in sweep.list_dimensions()], list[Hyperparameters | UserError]()
    for values in points:
        try:
            made.append(apply_values(base, dict(zip(names, values, strict=True))))
        except UserError as error:
            made.append(error)
    return made


def draw_sobol_points(sweep: Sweep) -> list[list[Any]]:
    """Return different points that cover the space evenly. A point has the values of the dimensions, ordered by name.

    The number of points is the number of trials, or of combinations if less. If 65,536 draws give too few different
    points, returns fewer points.
    """
    from scipy.stats import qmc  # takes half a second

    dimensions, wanted = sweep.list_dimensions(), int(min(sweep.trials, sweep.count_combinations()))
    draws, different = 2 ** (wanted - 1).bit_length(), dict[str, list[Any]]()
    while len(different) < wanted and draws <= SOBOL_DRAWS:
        places = qmc.Sobol(len(dimensions), rng=sweep.seed).random(draws)
        points = ([each.place_to_value(at) for each, at in zip(dimensions, point, strict=True)] for point in places)
        different = {json.dumps(values): values for values in points}
        draws *= 2
    return [*different.values()][:wanted]


def draw_with_tpe(
    sweep: Sweep, base: Hyperparameters, results: Mapping[Any, float | None]
) -> list[Hyperparameters | UserError]:
    """Return the trials of all whole waves in ``results``, and the next wave. Trials that the rules reject are errors.

    A wave is a group of nine trials. ``results`` has the value of each trained trial, in the order of the draws. If
    ``results`` has all trials, returns the trials of ``results``. Sets Optuna's log level.
    """
    if len(results) >= sweep.trials:
        return [*results]
    before = dict(islice(results.items(), len(results) // WAVE * WAVE))
    return [*before, *draw_wave(sweep, base, before)]


def draw_wave(
    sweep: Sweep, base: Hyperparameters, before: Mapping[Any, float | None]
) -> list[Hyperparameters | UserError]:
    """Return up to nine trials that are not in ``before``, and the errors of trials that the rules reject.

    ``before`` has the value of each trial of earlier waves. Less is better, and None stands for a failed trial. Each
    wave has a new study of Optuna and a new seed, so earlier waves need not be drawn again. Sets Optuna's log level.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seed = Random(f"{sweep.seed} {len(before) // WAVE}").getrandbits(32)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    dimensions, places = sweep.list_dimensions(), make_optuna_distributions(sweep)
    values = {hp: value for hp, value in before.items() if value is not None}  # TPE learns nothing from failed trials
    known = {*sorted(values, key=values.__getitem__)[:BEST], *[*values][-RECENT:]}
    for hp in (hp for hp in values if hp in known):  # in order, because tpe weighs trials by order
        at = {each.name: each.value_to_place(get_value(hp, each.name)) for each in dimensions}
        study.add_trial(optuna.create_trial(params=at, distributions=places, value=values[hp]))
    wanted, made = min(WAVE, sweep.trials - len(before)), list[Hyperparameters | UserError]()
    different = dict.fromkeys(before)
    for trial in draw_tpe_points(sweep, study, places):
        [hp] = make_trials(sweep, base, [trial])
        made += [hp] if isinstance(hp, UserError) or hp not in different else []
        different |= {hp: None} if isinstance(hp, Hyperparameters) else {}
        if len(different) == len(before) + wanted:
            break
    return made


def make_optuna_distributions(sweep: Sweep) -> "dict[str, BaseDistribution]":
    """Return Optuna's distribution for each dimension, by name. Values are positions in [0, 1), not hyperparameters."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    return {
        each.name: CategoricalDistribution([*dict.fromkeys(map(each.value_to_place, each.choices))])
        if each.choices
        else FloatDistribution(0.0, 1.0)
        for each in sweep.list_dimensions()
    }


def draw_tpe_points(sweep: Sweep, study: "Study", places: "dict[str, BaseDistribution]") -> Iterator[list[Any]]:
    """Yield TPE_DRAWS (36) points that Optuna proposes, and then points that cover the space evenly.

    Points may repeat. A point has the values of the dimensions, ordered by name. ``places`` are the distributions of
    :func:`make_optuna_distributions`.
    """
    for _ in range(TPE_DRAWS):
        found = study.ask(places).params
        yield [each.place_to_value(found[each.name]) for each in sweep.list_dimensions()]
    yield from draw_sobol_points(sweep)
