"""What a space may be, and which trials are drawn from it."""

import json
import re
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import yaml
from scipy.stats import kstest

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.sweep import space as space_module
from flyte_ddp.sweep.space import Sweep, check_sweep, draw_trials, flatten_hyperparameters, parse_dimension

BASE = Hyperparameters(num_ranks=1)
SPACE: dict[str, Any] = {
    "learning_rate": {"from": 0.001, "to": 1, "log": True},
    "momentum": {"from": 0.5, "to": 0.95},
    "batch_size": {"from": 32, "to": 256, "step": 32},
    "epochs": {"from": 2, "to": 5},
    "augment": ["none", "crop"],
}


def sweep_of(space: dict[str, Any], **settings: Any) -> Sweep:
    return Sweep(space=space, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ({}, 'space="": must name a hyperparameter'),
        ({"learnin_rate": [1]}, "unknown hyperparameter in space 'learnin_rate': did you mean 'learning_rate'?"),
        ({"options": [{}]}, "unknown hyperparameter in space 'options'"),
        ({"options.modle.width": [1]}, "unknown hyperparameter in space 'options.modle.width': did you mean "),
        ({"dataset": ["digits", "mnist"]}, "space, dataset: must be the same for all trials"),
        ({"seed": [0, 1]}, "space, seed: must be the same for all trials"),
        ({"select_by": ["loss", "accuracy"]}, "space, select_by: must be the same for all trials"),
        ({"learning_rate": []}, "space, learning_rate=[]: must be a list of choices, or a range"),
        ({"learning_rate": 0.1}, "space, learning_rate=0.1: must be a list of choices, or a range"),
        ({"learning_rate": {"from": 1}}, "space, learning_rate={'from': 1}: must be a list"),
        ({"learning_rate": {"from": 0.1, "to": 1, "lgo": True}}, "must be a list of choices, or a range"),
        ({"learning_rate": {"from": "a", "to": 1}}, "must be a list of choices, or a range"),
        ({"learning_rate": {"from": 1, "to": 1}}, "{'from': 1, 'to': 1}: from must be less than to"),
        ({"momentum": {"from": 0, "to": 10**400}}, "must be a list of choices, or a range"),
        ({"options.model.x": {"from": -1e308, "to": 1e308}}, "must have at most 2**53 steps, and ends whose"),
        ({"momentum": {"from": 0, "to": 1, "step": 1e-300}}, "must have at most 2**53 steps"),
        ({"learning_rate": {"from": 0, "to": 1, "log": True}}, "with log, from must be above 0"),
        ({"learning_rate": {"from": 0.1, "to": 1, "step": 0}}, "step must be above 0, and not larger than the range"),
        ({"epochs": {"from": 1, "to": 2.5}}, "space, epochs={'from': 1, 'to': 2.5}: must be whole numbers"),
        ({"momentum": {"from": 0.5, "to": 1}}, "space, momentum: momentum=1.0: must be below 1"),
        ({"optimizer": ["sgd", "adamm"]}, "space, optimizer: unknown optimizer 'adamm': did you mean 'adam'?"),
        ({"batch_size": [0.5]}, "space, batch_size: batch_size=0.5: must be a whole number"),
        ({"keep": ["last", "ema"]}, "space, keep: keep='ema': needs a moving average; set ema_decay"),
        ({"options.objective.loss": ["mse", "l1"]}, "space, options.objective.loss: changes the loss, by which"),
        ({"class_weights": ["", "balanced"]}, "space, class_weights: changes the loss, by which trials are compared"),
        ({"options.model.width": {"from": 8, "to": 64}}, '64}: may mean whole or real numbers; add "step": 1'),
        (
            {"options.model.width": {"from": 0, "to": 2, "log": False}},
            "or write an end with a point for real ones, such as 0.0",
        ),
        (
            {"options.model.eps": ["1e-6"]},
            'space, options.model.eps: options=\'{"model": {"eps": "1e-6"}}\': \'1e-6\' is',
        ),
        ({"momentum": {"from": 0.1, "to": 1, "log": True, "step": 1}}, "and step must be 1 with whole numbers"),
        ({"epochs": {"from": 1, "to": 9, "log": True, "step": 2}}, "and step must be 1 with whole numbers"),
    ],
)
def test_a_bad_space_is_refused(space: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)) as refused:
        check_sweep(sweep_of(space), BASE)
    assert len(refused.value.message) < 400


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"space": "{"}, "space='{': is not JSON"),
        ({"space": "[1]"}, "space='[1]': must be a JSON object"),
        ({"space": '{"epochs": [1], "epochs": [2]}'}, "is not JSON (the key 'epochs' occurs twice"),
        ({"trials": 0}, "trials=0: must be at least 1"),
        ({"seed": 2**32}, "seed=4294967296: must be at most 4294967295"),
        ({"sampler": "random"}, "unknown sampler 'random'"),
        ({"trial": 9}, "unknown sweep setting 'trial': did you mean 'trials'?"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        Sweep(**settings)


def test_without_a_validation_split_nothing_can_be_compared() -> None:
    with pytest.raises(UserError, match=re.escape("validation_fraction=0.0: a sweep compares trials")):
        check_sweep(sweep_of(SPACE), replace(BASE, validation_fraction=0.0))


def test_another_measure_allows_other_losses() -> None:
    check_sweep(sweep_of({"class_weights": ["", "balanced"]}), replace(BASE, select_by="accuracy"))


def test_values_are_within_their_ranges_and_spread_evenly() -> None:
    trials = draw_trials(sweep_of(SPACE, trials=256), BASE, {})
    assert len(trials) == 256
    rates = np.log([hp.learning_rate for hp in trials])
    for name, values in {
        "learning_rate": (rates - np.log(0.001)) / np.log(1000),
        "momentum": (np.array([hp.momentum for hp in trials]) - 0.5) / 0.45,
    }.items():
        assert kstest(values, "uniform").pvalue > 0.5, name
    for name, choices in {"batch_size": range(32, 257, 32), "epochs": range(2, 6), "augment": ("none", "crop")}.items():
        drawn = [flatten_hyperparameters(hp)[name] for hp in trials]
        assert {value: drawn.count(value) for value in choices} == dict.fromkeys(choices, 256 // len(choices))
    assert all(replace(hp, **{name: getattr(BASE, name) for name in SPACE}) == BASE for hp in trials)


def test_whole_numbers_on_a_logarithmic_range_reach_both_ends() -> None:
    dimension = parse_dimension("epochs", {"from": 1, "to": 8, "log": True})
    values = [dimension.place_to_value(place) for place in np.linspace(0, 1, 1000, endpoint=False)]
    assert {*values} == {*range(1, 9)}
    assert {type(value) for value in values} == {int}
    share = values.count(1) / 1000
    assert share == pytest.approx(np.log(2) / np.log(9), abs=0.002)


def test_options_are_set_beside_those_of_the_base() -> None:
    base = replace(BASE, options=json.dumps({"model": {"depth": 3}}))
    trials = draw_trials(sweep_of({"options.model.width": [8, 16]}, trials=4), base, {})
    assert [hp.parse_options() for hp in trials] == [
        {"model": {"depth": 3, "width": flatten_hyperparameters(hp)["options.model.width"]}} for hp in trials
    ]
    assert {flatten_hyperparameters(hp)["options.model.width"] for hp in trials} == {8, 16}
    assert len(trials) == 2, "equal trials are one"


def list_drawn(name: str, ends: dict[str, Any]) -> list[Any]:
    return [flatten_hyperparameters(hp)[name] for hp in draw_trials(sweep_of({name: ends}, trials=64), BASE, {})]


@pytest.mark.parametrize(
    ("ends", "low", "high"),
    [({"from": 0, "to": 1}, 0, 1), ({"from": 8.0, "to": 64}, 8, 64), ({"from": 2, "to": 9.5}, 2, 9.5)],
)
def test_a_range_of_an_option_is_of_all_numbers_between(ends: dict[str, Any], low: float, high: float) -> None:
    drawn = list_drawn("options.model.dropout", ends)
    assert kstest((np.array(drawn) - low) / (high - low), "uniform").pvalue > 0.5
    assert len({*drawn}) == 64


def test_a_range_of_an_option_with_step_1_is_of_whole_numbers() -> None:
    for log in (False, True):
        drawn = list_drawn("options.model.width", {"from": 8, "to": 20, "step": 1, "log": log})
        assert sorted(drawn) == [*range(8, 21)]
        assert {type(value) for value in drawn} == {int}


def test_numbers_that_yaml_takes_for_text_are_numbers() -> None:
    text = """
    learning_rate: {from: 1e-4, to: 1e-1, log: true}
    weight_decay: [1e-4, 1e-3]
    options.model.eps: {from: 1e-8, to: 1e-6}
    """
    space = yaml.safe_load(text)
    assert space["weight_decay"] == ["1e-4", "1e-3"], "as PyYAML reads them"
    numbers = json.loads(re.sub('"(1e-.)"', r"\1", json.dumps(space)))
    check_sweep(sweep_of(space), BASE)
    assert draw_trials(sweep_of(space), BASE, {}) == draw_trials(sweep_of(numbers), BASE, {})


GRIDS: list[dict[str, Any]] = [
    {"learning_rate": [0.01, 0.1, 0.5], "batch_size": [32, 64, 128]},
    {"learning_rate": [0.01, 0.1], "batch_size": [32, 64], "augment": ["none", "crop"]},
    {"learning_rate": [0.01, 0.03, 0.1, 0.3, 1.0], "batch_size": [16, 32, 64, 128, 256]},
    {"options.model.layers": [[8, 8], [64]], "epochs": [1, 2, 3, 4, 5, 6, 7]},
]


@pytest.mark.parametrize("sampler", ["qmc", "tpe"])
@pytest.mark.parametrize("space", GRIDS)
def test_a_space_with_as_many_points_as_trials_is_tried_whole(space: dict[str, Any], sampler: str) -> None:
    points = {json.dumps(values) for values in product(*(space[name] for name in sorted(space)))}
    for trials in (len(points), 2 * len(points)):
        sweep = sweep_of(space, trials=trials, sampler=sampler)
        drawn = [
            json.dumps([flatten_hyperparameters(hp)[name] for name in sorted(space)])
            for hp in draw_trials(sweep, BASE, {})
        ]
        assert (len(drawn), {*drawn}) == (len(points), points)
        said = (
            "" if trials == len(points) else f"{len(points)} of {trials} trials: the space has {len(points)} combinati"
        )
        assert sweep.describe_missing_trials(len(drawn)).startswith(said)


@pytest.mark.parametrize("sampler", ["qmc", "tpe"])
def test_of_a_space_with_more_points_as_many_as_trials_are_tried(sampler: str) -> None:
    if sampler == "tpe":
        pytest.importorskip("optuna")
    before: list[Hyperparameters] = []
    for trials in (9, 18, 24):
        sweep, told = sweep_of(GRIDS[2], trials=trials, sampler=sampler), dict[Hyperparameters, float | None]()
        while len(told) < len(drawn := draw_trials(sweep, BASE, told)):
            told |= {hp: hp.learning_rate for hp in drawn}
        assert len({*drawn}) == trials
        assert drawn[: len(before)] == before
        before = drawn


def test_steps_that_are_too_small_for_floats_come_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space_module, "SOBOL_DRAWS", 256)
    space = {"learning_rate": {"from": 1.0, "to": 1.0000000000000004, "step": 1e-20}}
    sweep = sweep_of(space, trials=9)
    drawn = draw_trials(sweep, BASE, {})
    assert {hp.learning_rate for hp in drawn} == {1.0, np.nextafter(1, 2), 1.0000000000000004}
    assert sweep.describe_missing_trials(3).startswith("3 of 9 trials: other trials would be duplicates")


def test_more_trials_begin_with_those_of_fewer() -> None:
    for fewer, more in ((1, 9), (9, 27), (27, 81)):
        first = draw_trials(sweep_of(SPACE, trials=fewer), BASE, {})
        assert draw_trials(sweep_of(SPACE, trials=more), BASE, {})[:fewer] == first
    assert draw_trials(sweep_of(SPACE, trials=9, seed=1), BASE, {}) != draw_trials(sweep_of(SPACE, trials=9), BASE, {})


def test_combinations_that_the_rules_refuse_are_left_out() -> None:
    """Adam has no use for nesterov, but SGD without momentum cannot have it."""
    space = {"optimizer": ["sgd", "adam"], "momentum": [0.0, 0.9]}
    base = replace(BASE, nesterov=True, optimizer="adam")
    with pytest.raises(UserError, match="space, momentum: nesterov"):
        check_sweep(sweep_of(space), replace(base, optimizer="sgd"))
    check_sweep(sweep_of(space), base)
    drawn = {(hp.optimizer, hp.momentum) for hp in draw_trials(sweep_of(space, trials=64), base, {})}
    assert drawn == {("sgd", 0.9), ("adam", 0.0), ("adam", 0.9)}


def test_where_the_rules_refuse_all_the_last_reason_is_said() -> None:
    with pytest.raises(UserError, match=r"space: the hyperparameters' rules reject all trials; .*: nest"):
        draw_trials(sweep_of({"momentum": [0.0]}), BASE, {})


def test_tpe_draws_nine_at_a_time_and_the_same_again() -> None:
    pytest.importorskip("optuna")
    sweep = sweep_of(SPACE, trials=20, sampler="tpe")

    def draw_all(sweep: Sweep) -> list[Hyperparameters]:
        told: dict[Hyperparameters, float | None] = {}
        counts = []
        while len(told) < len(drawn := draw_trials(sweep, BASE, told)):
            counts.append(len(drawn) - len(told))
            # The best rate is 0.03; a failed trial has no value.
            told |= {hp: abs(np.log(hp.learning_rate / 0.03)) for hp in drawn}
            told[drawn[0]] = None
        assert counts == [9] * (sweep.trials // 9) + ([sweep.trials % 9] if sweep.trials % 9 else [])
        assert [*told] == drawn
        return drawn

    drawn = draw_all(sweep)
    assert draw_all(sweep) == drawn
    more = draw_all(replace(sweep, trials=45))
    assert more[:18] == drawn[:18]
    away = [abs(np.log(hp.learning_rate / 0.03)) for hp in more]
    assert np.median(away[27:]) < 0.6 * np.median(away[:9]), "it learns"


def rate_away(hp: Hyperparameters) -> float | None:
    """Return a trial's value, None for some that fail."""
    return None if hp.epochs == 3 else abs(float(np.log(hp.learning_rate / 0.03)))


def list_steps(sweep: Sweep, step: int) -> list[Hyperparameters]:
    """Draw a sweep, of whose new trials so many at a time are done."""
    told: dict[Hyperparameters, float | None] = {}
    while new := [hp for hp in draw_trials(sweep, BASE, told) if hp not in told]:
        told |= {hp: rate_away(hp) for hp in new[:step]}
    return [*told]


REPEATING = {"learning_rate": [0.01, 0.02, 0.03, 0.1, 0.3], "epochs": [1, 2, 3, 4, 5], "batch_size": [32, 64, 128]}


@pytest.mark.parametrize("space", [SPACE, REPEATING])
def test_a_wave_of_tpe_is_a_function_of_the_waves_before(space: dict[str, Any]) -> None:
    pytest.importorskip("optuna")
    sweep = sweep_of(space, trials=40, sampler="tpe", seed=3)
    expected = list_steps(sweep, 9)
    values = {hp: rate_away(hp) for hp in expected}
    assert len({*expected}) == 40
    assert list_steps(sweep, 4) == expected
    assert draw_trials(sweep, BASE, values) == expected
    assert draw_trials(sweep, BASE, {hp: values[hp] for hp in expected[:18]}) == expected[:27], "fewer are done"
    other = draw_trials(sweep, BASE, dict.fromkeys(expected[:18], 1.0) | {expected[0]: 0.5})
    assert (other[:18], len(other)) == (expected[:18], 27)
    assert other[18:] != expected[18:27], "other values, other trials"
    assert list_steps(replace(sweep, trials=49), 9)[:36] == expected[:36]
    assert list_steps(replace(sweep, seed=4), 9)[:9] != expected[:9]


def test_tpe_is_asked_once_for_a_trial_and_told_of_so_many_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 25 early good trials and many later ones the study knows the good ones and the newest, in their order."""
    optuna = pytest.importorskip("optuna")
    asked, told, ask, add = [], [], optuna.Study.ask, optuna.Study.add_trial
    monkeypatch.setattr(optuna.Study, "ask", lambda study, places: asked.append(study) or ask(study, places))
    monkeypatch.setattr(optuna.Study, "add_trial", lambda study, trial: told.append(trial) or add(study, trial))
    sweep = sweep_of({"learning_rate": {"from": 0.0, "to": 1.0}}, trials=603, sampler="tpe")
    before = {replace(BASE, learning_rate=(1 + place) / 1000): float(place >= 25) for place in range(594)}
    before[[*before][100]] = before[[*before][590]] = None
    drawn = draw_trials(sweep, BASE, before)
    assert (len(drawn), len({*drawn})) == (603, 603)
    assert 9 <= len(asked) <= 11, "a draw may be one of before"
    places = [*range(25), *(place for place in range(393, 594) if place != 590)]
    assert [trial.params["learning_rate"] for trial in told] == [(1 + place) / 1000 for place in places]


def test_combinations_that_the_rules_refuse_are_replaced_by_tpe() -> None:
    pytest.importorskip("optuna")
    space = {"optimizer": ["sgd", "adam"], "momentum": [0.0, 0.9], "learning_rate": {"from": 0.01, "to": 1}}
    sweep = sweep_of(space, trials=20, sampler="tpe")
    base, told = replace(BASE, nesterov=True, optimizer="adam"), dict[Hyperparameters, float | None]()
    while new := [hp for hp in draw_trials(sweep, base, told) if hp not in told]:
        told |= {hp: hp.learning_rate for hp in new}
    assert len(told) == 20
    assert {(hp.optimizer, hp.momentum) for hp in told} == {("sgd", 0.9), ("adam", 0.0), ("adam", 0.9)}


def test_tpe_learns_from_options() -> None:
    pytest.importorskip("optuna")
    base = replace(BASE, model="own:build", options='{"model": {"depth": 2}}')
    sweep = sweep_of({"options.model.width": {"from": 1, "to": 1000, "step": 1}}, trials=63, sampler="tpe")
    told: dict[Hyperparameters, float | None] = {}
    while new := [hp for hp in draw_trials(sweep, base, told) if hp not in told]:
        told |= {hp: abs(hp.parse_options()["model"]["width"] - 300.0) for hp in new}
    assert all(hp.parse_options()["model"]["depth"] == 2 for hp in told)
    away = [*told.values()]
    assert len(away) == 63
    assert np.median(away[36:]) < 0.6 * np.median(away[:18])


@pytest.mark.parametrize(
    "given",
    [
        {"from": 0.001, "to": 1, "log": True},
        {"from": 0.5, "to": 0.95},
        {"from": 32, "to": 256, "step": 32},
        {"from": 1, "to": 300, "log": True, "step": 1},
        {"from": 0.1, "to": 0.7, "step": 0.1},
        [True, 1, "one", 1.5],
    ],
)
def test_each_value_has_a_place_of_its_own(given: Any) -> None:
    dimension = parse_dimension("options.model.size", given)
    for place in np.linspace(0, 1, 1000, endpoint=False).tolist():
        value = dimension.place_to_value(place)
        found = dimension.place_to_value(dimension.value_to_place(value))
        assert type(found) is type(value)
        assert found == (pytest.approx(value, rel=1e-12) if isinstance(value, float) else value)
    assert (
        0
        <= dimension.value_to_place(dimension.place_to_value(0.0))
        <= dimension.value_to_place(dimension.place_to_value(0.9999999))
        <= 1
    )


def test_without_optuna_a_sentence_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(UserError, match=r"optuna is not installed: it comes with the extra 'sweep'; .* uv pip install"):
        check_sweep(sweep_of(SPACE, sampler="tpe"), BASE)
