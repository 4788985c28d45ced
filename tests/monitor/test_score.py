"""Whether a window's score is worse than the held-out one: against SciPy and scikit-learn, and on drawn samples."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import fisher_exact, permutation_test
from sklearn.metrics import average_precision_score
from torch import Tensor

from flyte_ddp.core.training.evaluate import compute_batch_columns
from flyte_ddp.monitor import score
from flyte_ddp.monitor.score import (
    ALPHA,
    DRAWS,
    HeldOut,
    find_p_value_of_worse,
    measure_samples_with_truth,
    p_value_by_permutations,
    score_window,
)
from flyte_ddp.monitor.window import Score
from flyte_ddp.objectives import Facts, Objective, make_objective

POSITIVE, SEPARATION = 0.034, 1.05  # of a logit in deviations: the average precision is 0.136


def make_rare(measure: str = "average_precision") -> Objective:
    return make_objective("classification", Facts(("no", "yes"), select_by=measure), {})


def draw_rare(random: np.random.Generator, samples: int, separation: float = SEPARATION) -> dict[str, Tensor]:
    """Draw the objective's columns of samples, of which 3.4 % are positive."""
    truth = random.random(samples) < POSITIVE
    logits = torch.from_numpy(random.normal(size=samples) + separation * truth)
    outputs = torch.stack([torch.zeros_like(logits), logits], dim=1)
    return compute_batch_columns(make_rare(), outputs, torch.from_numpy(truth).long(), samples)


def judge(objective: Objective, window: dict[str, Tensor], held_out: dict[str, Tensor], seed: int = 0) -> Score:
    known = HeldOut(measure_samples_with_truth(objective, held_out).score or 0.0, len(held_out["loss"]), held_out)
    return score_window(objective, [window], known, seed)


@pytest.fixture
def all_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws do not stop early, so that p-values are as exact as many draws make them."""
    monkeypatch.setattr(score, "ALPHA", 2.0)
    monkeypatch.setattr(score, "DRAWS", 400)


@pytest.mark.usefixtures("all_draws")
@pytest.mark.parametrize("right", [40, 46, 50, 56])
def test_the_p_value_of_an_accuracy_is_fishers(right: int) -> None:
    truth = torch.zeros(60 + 150, dtype=torch.long)
    places = torch.arange(210)
    wrong = ((places < 60) & (places >= right)) | (places >= 60 + 130)
    outputs = torch.stack([torch.zeros(210), wrong * 2.0 - 1], dim=1)
    objective = make_objective("classification", Facts(("a", "b")), {})
    columns = compute_batch_columns(objective, outputs, truth, 210)
    window, held_out = ({name: each[part] for name, each in columns.items()} for part in (slice(60), slice(60, 210)))
    p = p_value_by_permutations(objective, window, held_out, 0)
    expected = fisher_exact([[right, 60 - right], [130, 20]], alternative="less").pvalue
    assert p == pytest.approx(expected, abs=0.08)
    of_counts = find_p_value_of_worse(objective, window, right / 60, HeldOut(130 / 150, 150, {}), 0)
    assert of_counts == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.usefixtures("all_draws")
@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_the_p_value_of_another_measure_is_that_of_scipys_permutation_test(shift: float) -> None:
    """Of a mean absolute error, of which less is better; the held-out samples' errors are smaller by ``shift``."""
    random = np.random.default_rng(1)
    objective = make_objective("regression", Facts(select_by="mae"), {})
    errors = random.normal(size=60) * (1 + shift), random.normal(size=200)
    window, held_out = (
        compute_batch_columns(objective, torch.from_numpy(each)[:, None], torch.zeros(len(each)), len(each))
        for each in errors
    )

    def subtract(ours: np.ndarray, theirs: np.ndarray) -> float:
        return float(np.abs(theirs).mean() - np.abs(ours).mean())

    expected = permutation_test(errors, subtract, alternative="less", n_resamples=5000, rng=2).pvalue
    assert p_value_by_permutations(objective, window, held_out, 0) == pytest.approx(expected, abs=0.08)
    assert (expected < 0.01) == (shift > 0)


def test_draws_stop_as_soon_as_the_level_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, measure = [0], score.compute_measures

    def count(*given: Any) -> Any:
        counted[0] += 1
        return measure(*given)

    monkeypatch.setattr(score, "compute_measures", count)
    random, objective = np.random.default_rng(3), make_rare()
    p = p_value_by_permutations(objective, draw_rare(random, 2000), draw_rare(random, 2000), 0)
    assert p is not None
    assert p > ALPHA
    assert counted[0] < DRAWS
    counted[0] = 0
    p = p_value_by_permutations(objective, draw_rare(random, 2000, -9), draw_rare(random, 2000, 9), 0)
    assert p == pytest.approx(1 / (DRAWS + 1))
    assert counted[0] == 2 * (DRAWS + 1)


@pytest.mark.slow
def test_average_precision_that_falls_is_found() -> None:
    """From 0.136 to 0.034, the share of the positives, as a model that has lost what it knew."""
    random, objective = np.random.default_rng(0), make_rare()
    large = draw_rare(random, 300_000)
    assert average_precision_score(large["truth"], large["probability"]) == pytest.approx(0.136, abs=0.005)
    held_out = draw_rare(random, 5000)
    same, lost = draw_rare(random, 2000), draw_rare(random, 2000, 0.0)
    assert average_precision_score(lost["truth"], lost["probability"]) == pytest.approx(0.034, abs=0.02)
    assert not judge(objective, same, held_out).worse
    found = judge(objective, lost, held_out)
    assert found.worse
    assert 0 < found.worse_p <= ALPHA
    assert judge(objective, lost, held_out) == found, "the same window has the same verdict"


@pytest.mark.slow
@pytest.mark.parametrize("measure", ["rmse", "mae", "r2"])
def test_an_error_that_grows_is_worse_whatever_measures_it(measure: str) -> None:
    random, objective = np.random.default_rng(0), make_objective("regression", Facts(select_by=measure), {})

    def draw(error: float) -> dict[str, Tensor]:
        truth = torch.from_numpy(random.normal(size=400))
        predicted = truth + error * torch.from_numpy(random.normal(size=400))
        return compute_batch_columns(objective, predicted[:, None], truth, 400)

    held_out = draw(0.5)
    assert judge(objective, draw(0.8), held_out).worse
    assert not judge(objective, draw(0.3), held_out).worse, "better is not worse"
    before = {name: each for name, each in held_out.items() if name != "loss"}
    found = score_window(objective, [draw(0.8)], HeldOut(0.5, 400, before), 0)
    assert found.score is not None
    if measure == "rmse":
        assert found.worse, "of a champion whose columns were not stored"
        assert not score_window(objective, [draw(0.5)], HeldOut(0.5, 400, {}), 0).worse
    else:
        assert found.worse_p is None, "which is no mean of scores"


def test_a_score_that_is_not_defined_has_no_test() -> None:
    random, objective = np.random.default_rng(0), make_rare()
    window, held_out = draw_rare(random, 100), draw_rare(random, 1000)
    none = {name: column[window["truth"] == 0] for name, column in window.items()}
    assert measure_samples_with_truth(objective, none) == Score(truths=len(none["loss"]))
    without = {name: column[held_out["truth"] == 0] for name, column in held_out.items()}
    assert find_p_value_of_worse(objective, held_out, 0.1, HeldOut(0.1, 1000, without), 0) is None
    # Each side has one positive sample, so that most draws leave the window without any.
    order = held_out["truth"].argsort(descending=True)
    rows = order[[0, *range(100, 159)]], order[[1, *range(200, 900)]]
    sides = [{name: column[chosen] for name, column in held_out.items()} for chosen in rows]
    p = p_value_by_permutations(objective, *sides, 0)
    assert p is not None
    assert 0 < p <= 1


@pytest.mark.exhaustive
def test_how_often_it_errs_and_how_often_it_finds() -> None:
    """Of 60 windows; alpha is 0.01, and docs/design/drift.md has the share that is found of 300."""

    def count(separation: float) -> float:
        random, objective = np.random.default_rng(1), make_rare()
        pairs = [(draw_rare(random, 1000, separation), draw_rare(random, 5000)) for _ in range(60)]
        return float(np.mean([judge(objective, *pair).worse for pair in pairs]))

    assert count(SEPARATION) <= 0.01 + 3 * (0.01 * 0.99 / 60) ** 0.5
    assert count(0.0) >= 0.8
