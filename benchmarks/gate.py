"""Gate: how often equal and better models are promoted, by rule.

Simulated on 10,000 test samples, on which any two equal models differ in 12 % of answers. A year has 365 equal
challengers, one a night, on the same test split. The rule "higher accuracy wins" promotes a challenger with more
right answers than the champion. The rule "McNemar each night" tests at alpha 0.05. The gate spends 0.05 * 6 / (pi^2
k^2) on the k-th night. The champion is overstated by the accuracy on the test split minus the true accuracy. No model
is trained, so nothing depends on the machine.

The same is simulated for F1, RMSE and mean IoU on 300 samples, by the sign-flip test. The figures are lives of 10
nights each, and how often a single test at 0.05 is wrong. The last figure need not be 0.05. In this case the
challenger has the champion's RMSE, but from a few large errors. Therefore the two models are equal and not
exchangeable.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from benchmarks.measuring import Options, Result, Target
from benchmarks.simulated_models import (
    OBJECTIVES,
    Correct,
    changed_model,
    equal_model,
    simulate_columns,
    simulate_truth,
)
from flyte_ddp.release import checks, statistics
from flyte_ddp.release.scores import score_samples
from flyte_ddp.release.statistics import ScoreDifferences, compare_scores

SAMPLES, DISCORDANT, ALPHA, NIGHTS = 10_000, 0.12, 0.05, 365
SCORED, SHORT_LIFE = 300, 10  # samples and nights, of objectives whose scores are not 0 or 1
MARGIN = 0.01
Rule = Callable[[ScoreDifferences, int], bool]  # of the challenger against the champion, on the k-th night
RULES: dict[str, Rule] = {
    "higher accuracy wins": lambda pair, _: pair.gained > pair.lost,
    "McNemar each night": lambda pair, _: checks.judge_superior(pair, ALPHA).passed,
    "the gate": lambda pair, night: checks.judge_superior(pair, statistics.alpha_of_look(ALPHA, night)).passed,
}


def measure(options: Options) -> Result:
    random = np.random.default_rng(0)
    years, pairs, nights = (5, 100, 20) if options.quick else (200, 2000, NIGHTS)
    result = Result(settings={"samples": SAMPLES, "discordant": DISCORDANT, "alpha": ALPHA, "nights": nights})
    equal = [promoted(random, equal_model(random, SAMPLES, DISCORDANT), 1) for _ in range(pairs)]
    limit = ALPHA + 3 * (ALPHA * (1 - ALPHA) / pairs) ** 0.5
    result.targets.append(
        Target(f"{pairs:,} pairs of equal models: promoted", float(np.mean(equal)), "%", at_most=limit)
    )
    for name, rule in RULES.items():
        lives = [year(random, rule, nights) for _ in range(years)]
        for promotions, overstated in lives:
            result.add(f"{name}: promotions in a year of equal models", promotions, "")
            result.add(f"{name}: the champion is overstated by, in points", 100 * overstated, "")
        fooled = float(np.mean([promotions > 0 for promotions, _ in lives]))
        bound = ALPHA + 3 * (ALPHA * (1 - ALPHA) / years) ** 0.5 if name == "the gate" else None
        result.targets.append(Target(f"{name}: years with a false promotion", fooled, "%", at_most=bound))
    found = []
    for _ in range(pairs // 4):
        champion = equal_model(random, SAMPLES, DISCORDANT)
        found.append(promoted(random, champion, 2, gain=0.07, loss=0.05))
    result.targets.append(Target("a true +2 points: promoted", float(np.mean(found)), "%", at_least=0.8))
    for anchored in (False, True):
        result.targets.append(worsening(random, anchored=anchored))
    for objective in OBJECTIVES:
        result.targets += measure_objective(random, objective, 5 if options.quick else 50)
    tests = [compare_with_outliers(random) <= ALPHA for _ in range(20 if options.quick else 200)]
    result.targets.append(
        Target("regression: an equal RMSE from a few large errors, promoted", float(np.mean(tests)), "%")
    )
    return result


def measure_objective(random: np.random.Generator, objective: str, lives: int) -> list[Target]:
    """Simulate lives of equal models, each life on its test split, and return the targets.

    The targets are the shares of lives with a false promotion, of wrong tests at 0.05, and of promoted better models.
    """
    p_values, found = np.ones((lives, SHORT_LIFE)), list[bool]()
    levels = [statistics.alpha_of_look(ALPHA, night + 1) for night in range(SHORT_LIFE)]
    for life in range(lives):
        truth = simulate_truth(random, objective, SCORED)
        champion = score_model(random, objective, truth)
        for night in range(SHORT_LIFE):
            challenger = score_model(random, objective, truth)
            p_values[life, night] = compare_scores(challenger, champion, objective).p_value_of_gain()
            if p_values[life, night] <= levels[night]:
                champion = challenger
        better = score_model(random, objective, truth, error=0.6)
        found.append(compare_scores(better, champion, objective).p_value_of_gain() <= levels[-1])
    fooled = float((p_values <= levels).any(axis=1).mean())
    limits = [ALPHA + 3 * (ALPHA * (1 - ALPHA) / tests) ** 0.5 for tests in (lives, p_values.size)]
    return [
        Target(f"{objective}: lives of {SHORT_LIFE} nights with a false promotion", fooled, "%", at_most=limits[0]),
        Target(
            f"{objective}: p-values of {p_values.size:,} pairs of equal models at most 0.05",
            float((p_values <= ALPHA).mean()),
            "%",
            at_most=limits[1],
        ),
        Target(f"{objective}: a model with 0.6 of the errors promoted", float(np.mean(found)), "%", at_least=0.8),
    ]


def score_model(
    random: np.random.Generator, objective: str, truth: NDArray[np.float64], error: float = 1.0, tails: float = 5.0
) -> NDArray[np.float64]:
    return score_samples(OBJECTIVES[objective], simulate_columns(random, objective, truth, error, tails))


def compare_with_outliers(random: np.random.Generator) -> float:
    """Return the p-value of a model with a few large errors against a champion without large errors.

    Both models have the same expected squared error.
    """
    truth = simulate_truth(random, "regression", SCORED)
    outliers, champion = (score_model(random, "regression", truth, tails=tails) for tails in (5.0, 1000.0))
    return compare_scores(outliers, champion, "squared error").p_value_of_gain()


def promoted(
    random: np.random.Generator, champion: Correct, look: int, *, gain: float = 0.0, loss: float = 0.0
) -> bool:
    """Return whether the gate promotes a challenger on a given look.

    Without a ``gain`` the challenger is as good as the champion. Otherwise it gains and loses the given shares of all
    samples.
    """
    changed = changed_model(random, champion, gain, loss)
    challenger = changed if gain else equal_model(random, SAMPLES, DISCORDANT)
    return RULES["the gate"](compare_scores(challenger, champion, "accuracy"), look)


def year(random: np.random.Generator, rule: Rule, nights: int) -> tuple[int, float]:
    """Return how often a rule promotes an equal model, and by how much the last champion is overstated."""
    champion, promotions = equal_model(random, SAMPLES, DISCORDANT), 0
    for night in range(1, nights + 1):
        challenger = equal_model(random, SAMPLES, DISCORDANT)
        if rule(compare_scores(challenger, champion, "accuracy"), night):
            champion, promotions = challenger, promotions + 1
    return promotions, float(champion.mean()) - (1 - DISCORDANT)


def worsening(random: np.random.Generator, *, anchored: bool) -> Target:
    """Return the total loss after 50 challengers that each lose 0.4 points, under not_worse.

    If ``anchored``, challengers are also compared with the best version ever.
    """
    best = champion = np.ones(SAMPLES, dtype=bool)
    for _ in range(50):
        challenger = changed_model(random, champion, 0.0, 0.004)
        others = (champion, best) if anchored else (champion,)
        pairs = [compare_scores(challenger, other, "accuracy") for other in others]
        if all(checks.judge_not_worse("other", pair, MARGIN, ALPHA).passed for pair in pairs):
            champion = challenger
    what = f"50 x -0.4 points under not_worse, {'with' if anchored else 'without'} the best version: lost in all"
    return Target(what, 1 - float(champion.mean()), "%", at_most=MARGIN if anchored else None)
