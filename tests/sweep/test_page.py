"""The figures of a sweep's page, against hand-computed ones."""

import json
import re
from dataclasses import replace
from pathlib import Path

from click.testing import CliRunner
from report_page import Page
from scipy.stats import spearmanr
from sidecars import make_sidecar

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.models.sidecar import Metrics
from flyte_ddp.report.figures import ORANGE
from flyte_ddp.sweep.__main__ import main
from flyte_ddp.sweep.halving import TrialResult
from flyte_ddp.sweep.page import GREYS, choose_colors, correlate_rungs, write_sweep_page
from flyte_ddp.sweep.space import Sweep

BASE = Hyperparameters(num_ranks=1, schedule="constant")
SWEEP = Sweep(space='{"learning_rate": [0.001, 0.01, 0.1, 0.5], "optimizer": ["sgd", "adam"]}', trials=9, rungs=3)
EARLY = [0.9, 0.5, 0.7, 0.2, 0.8, 0.6, 0.4, 0.3]
LATER = {3: 0.15, 7: 0.25, 6: 0.11, 1: 0.3}


def rungs(base: Hyperparameters = BASE) -> list[TrialResult]:
    """Nine trials of 90 steps: all take 10, the four best 30, the best of these all; one fails at once."""
    places = [(rate, kind) for rate in (0.001, 0.01, 0.1, 0.5) for kind in ("sgd", "adam")]
    hps = [replace(base, learning_rate=rate, optimizer=kind) for rate, kind in places]
    first = [
        TrialResult(at, hp, f"r{at}", 9, 10, 90, EARLY[at], seconds=1.5, curve=[[10, EARLY[at]]])
        for at, hp in enumerate(hps)
    ]
    second = [
        replace(first[at], steps_divisor=3, step=30, value=value, curve=[[10, EARLY[at]], [30, value]])
        for at, value in LATER.items()
    ]
    last = replace(second[2], steps_divisor=1, step=90, value=0.1)
    failed = TrialResult(8, replace(base, learning_rate=9.0), "r8", 9, failed="the loss is <not> finite")
    return [*first, failed, *second, last]


def test_the_correlation_is_over_the_trials_in_both_rungs() -> None:
    first, second = correlate_rungs(SWEEP, rungs())
    expected = spearmanr([EARLY[at] for at in LATER], [*LATER.values()]).statistic
    assert first == ("1/9", "1/3", 4, expected)
    assert second == ("1/3", "all", 1, None)


def page(folder: Path, base: Hyperparameters = BASE) -> str:
    sidecar = make_sidecar(metrics=Metrics(test={"accuracy": 0.875, "loss": 0.4}))
    (folder / "model.json").write_text(json.dumps(sidecar.to_json_value()))
    done = rungs(base)
    html = write_sweep_page(SWEEP, done, folder / "model.json", folder)
    assert Hyperparameters.from_json((folder / "best.json").read_text()) == done[-1].hp
    return html.read_text()


def test_the_page_says_all_of_it(tmp_path: Path) -> None:
    text = page(tmp_path)
    plain = " ".join(re.sub("<[^>]*>", " ", text).split())
    assert "Sweep: 9 trials" in plain
    assert "The winner is trial 6: learning_rate 0.5, optimizer sgd ." in plain.replace("sgd.", "sgd .")
    assert "On the test split 87.50" in plain.replace("&#160;", " ")
    assert 4 * 10 + 3 * 30 + 90 == 220
    assert "Steps trained 220 of 720 for all trials in full" in plain
    assert "69.44" in plain, "saved"
    assert "the loss is &lt;not&gt; finite" in text
    assert "mislead" not in text
    assert text.count("<svg") == 2
    assert "mislead" in page(tmp_path, replace(BASE, schedule="one_cycle"))
    one_rung = write_sweep_page(replace(SWEEP, rungs=1), rungs()[-1:], tmp_path / "model.json", tmp_path).read_text()
    assert ("early rungs predict" in text, "early rungs predict" in one_rung) == (True, False)
    assert "left out" not in plain
    assert "8 combinations" not in plain
    more = write_sweep_page(replace(SWEEP, trials=10), rungs(), tmp_path / "model.json", tmp_path).read_text()
    assert "9 of 10 trials: other trials would be duplicates" in more
    assert ">10.00 %<" in page(tmp_path, replace(BASE, select_by="accuracy")).replace("&#160;", " "), (
        "as on the test split"
    )


def test_a_trial_has_one_colour_in_both_charts(tmp_path: Path) -> None:
    """Trial 6 won; of the others the three that came to 30 steps are darkest, the better the darker."""
    done = rungs()
    colors = choose_colors(done, [6, 3, 7, 1, 5, 2, 4, 0])
    assert colors[6] == ORANGE
    assert [colors[trial] for trial in (3, 7, 1, 5, 2, 4, 0)] == [GREYS[place] for place in (0, 0, 1, 1, 2, 2, 3)]
    curves, space = page(tmp_path).split("<svg")[1:]
    for chart in (curves, space):
        assert {color for color in (ORANGE, *GREYS) if color in chart} == {ORANGE, *GREYS}
    drawn = Page("<svg" + curves.partition("</svg>")[0] + "</svg>").elements
    [legend] = [float(found["x"]) for tag, found, inside in drawn if tag == "text" and "winner" in "".join(inside)]
    points = [float(found["x"]) for tag, found, _ in drawn if tag == "use" and float(found["y"]) > 30]
    assert max(points) < legend, "the legend is beside the lines"


def test_the_command_refuses_files_and_folders_before_training(tmp_path: Path) -> None:
    hp, sweep = tmp_path / "hp.json", tmp_path / "sweep.json"
    hp.write_text(BASE.to_json())
    sweep.write_text('{"space": {"learning_rate": [0.1, 0.2]}}')
    ended = CliRunner().invoke(main, [str(hp), str(sweep), "--output", str(hp / "found")])
    assert (
        ended.output
        == f"Error: cannot write {hp / 'found'}: Not a directory; make its folder writable, or choose another folder\n"
    )
    sweep.write_bytes('{"space": {}} ä'.encode("latin-1"))
    ended = CliRunner().invoke(main, [str(hp), str(sweep)])
    assert ended.output.startswith("Error: sweep settings are not valid JSON: 'utf-8' codec can't decode")
