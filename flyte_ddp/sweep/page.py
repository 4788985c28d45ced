"""The page of a sweep: curves and values of trials, correlations between rungs, and costs."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from flyte_ddp.core.models.sidecar import read_sidecar
from flyte_ddp.core.text.formatting import format_duration, format_measure, format_setting, name_measure
from flyte_ddp.core.text.sections import Table
from flyte_ddp.report import figures
from flyte_ddp.report.page import render_template, write_html
from flyte_ddp.sweep.halving import TrialResult, describe_share, pick_winner
from flyte_ddp.sweep.space import Sweep, flatten_hyperparameters

PAGES = {"sweep.html": "all trials, to open in a browser", "best.json": "the winner's hyperparameters, for --hp"}
GREYS = ("#5d6878", "#8791a0", "#adb5c1", "#ced4dc")  # of trials left behind, the furthest trials first
RANKS = "Spearman's rank correlation between a rung and the next, over the trials in both. 1 means the same order."
MISLEAD = " With schedule=one_cycle early rungs are misleading, because they end before the learning rate falls."


def write_sweep_page(sweep: Sweep, done: Sequence[TrialResult], sidecar: Path, folder: Path) -> Path:
    """Write ``sweep.html`` and ``best.json`` into an existing folder, and return the path of the HTML page.

    Replaces existing files. ``best.json`` has the winner's hyperparameters. ``done`` are the results of all rungs.
    ``sidecar`` is the path of the winner's model.json. Raises UserError if no trial has reached the end.
    """
    last, winner = {each.trial: each for each in done}, pick_winner(done)  # the last result of each trial
    # Trials that came equally far are ordered by value, the best first.
    ordered = sorted(last.values(), key=lambda each: (each.steps_divisor, each.value is None, each.loss or 0.0))
    names = [dimension.name for dimension in sweep.list_dimensions()]
    varied = {each.trial: [flatten_hyperparameters(each.hp)[name] for name in names] for each in ordered}
    measured = [each.trial for each in ordered if each.value is not None]
    colors = choose_colors(done, measured)
    space = figures.draw_parallel_coordinates(names, [varied[trial] for trial in measured], [*colors.values()])
    main, test = next(iter(read_sidecar(sidecar).metrics.test.items()))
    measure, one_cycle = name_measure(winner.hp.select_by), any(each.hp.schedule == "one_cycle" for each in done)
    any_failed = any(each.failed for each in ordered)
    rows = [
        (
            result.trial,
            *map(format_setting, varied[result.trial]),
            describe_share(result.steps_divisor),
            result.value,
            format_duration(sum(each.seconds for each in done if each.trial == result.trial)),
            *([result.failed] if any_failed else []),
        )
        for result in ordered
    ]
    compared = ("Rung", "Next rung", "Trials in both", "Correlation")
    tables = (
        Table("How well early rungs predict", RANKS + MISLEAD * one_cycle, compared, correlate_rungs(sweep, done)),
        Table("All trials", "", ("Trial", *names, "Trained", measure, "Time", *["Failed"] * any_failed), rows),
    )
    reached = {each.trial: each for each in done if each.steps}.values()  # steps are unknown for failed trials
    page = render_template(
        "sweep.html",
        trials=len(last),
        missing=sweep.describe_missing_trials(len(last)),
        winner=winner,
        won={name: format_setting(value) for name, value in zip(names, varied[winner.trial], strict=True)},
        measure=measure,
        value=format_measure(winner.hp.select_by, winner.value),
        main=name_measure(main),
        test=format_measure(main, test),
        spent=sum(each.step for each in reached),
        full=sum(each.steps for each in reached),
        curves=draw_trial_curves(done, measure, colors, "log" if winner.hp.select_by == "loss" else "linear"),
        space=space,
        sections=figures.make_section_views(tables if sweep.rungs > 1 else tables[1:], {}, ()),
    )
    (folder / "best.json").write_text(winner.hp.to_json(indent=2) + "\n", encoding="utf-8")
    return write_html(folder / "sweep.html", page)


def correlate_rungs(sweep: Sweep, done: Sequence[TrialResult]) -> list[tuple[str, str, int, float | None]]:
    """Return a row for each pair of neighbouring rungs: both shares, number of common trials, rank correlation.

    A share is a text such as "1/9". Failed trials are skipped. The correlation is None if fewer than 3 trials are
    common, or if a rung's values are all equal.
    """
    from scipy.stats import spearmanr

    rows, values = [], {(each.steps_divisor, each.trial): each.value for each in done if each.value is not None}
    for steps_divisor, following in pairwise(sweep.list_divisors()):
        both = [trial for of, trial in values if of == following]
        pairs = [[values[of, trial] for trial in both] for of in (steps_divisor, following)]
        can_be_ordered = len(both) > 2 and all(len({*each}) > 1 for each in pairs)
        correlation = float(spearmanr(*pairs).statistic) if can_be_ordered else None
        rows.append((describe_share(steps_divisor), describe_share(following), len(both), correlation))
    return rows


def choose_colors(done: Sequence[TrialResult], trials: Sequence[int]) -> dict[int, str]:
    """Return the colour of each trial, in the order of ``trials``, best first. Trials that stopped earlier are grey.

    The winner is orange, and other trials that were trained to the end are blue.
    """
    winner, ended = pick_winner(done).trial, {each.trial for each in done if each.steps_divisor == 1}
    behind = [trial for trial in trials if trial not in ended]
    greys = {trial: GREYS[place * len(GREYS) // len(behind)] for place, trial in enumerate(behind)}
    return {
        trial: figures.ORANGE if trial == winner else figures.BLUE if trial in ended else greys[trial]
        for trial in trials
    }


def draw_trial_curves(done: Sequence[TrialResult], measure: str, colors: Mapping[int, str], scale: str) -> str:
    """Return an SVG element with each trial's value by step, the best trial in front.

    ``colors`` are by trial, the best trial first. ``measure`` labels the y axis, and ``scale`` is "log" or "linear".
    """
    kinds, series = {figures.ORANGE: "winner", figures.BLUE: "trained to the end", GREYS[0]: "stopped earlier"}, []
    for trial, color in colors.items():
        points = sorted({step: value for each in done if each.trial == trial for step, value in each.curve}.items())
        if points:
            x, y = zip(*points, strict=True)
            series.append(figures.Series(kinds.pop(color, ""), x, y, color))
    return figures.draw_line_chart(series[::-1], x_label="step", y_label=measure, scale=scale, x_from=0, wide=True)
