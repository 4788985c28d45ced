"""The examples of other objectives: run as printed, and better than what a constant output reaches."""

import re
from pathlib import Path

import pytest
from cli import ROOT, pyflyte

from flyte_ddp.json_lines import read_records

README = (ROOT / "examples" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "module", "measure", "floor"),
    [
        ("multilabel_photos", "photos", "f1", 0.9),  # all labels for all photos: 0.57
        ("counting", "counting", "mae", 0.5),  # always 10: 5.2
        ("segmentation", "shapes", "miou", 0.75),  # background alone: 0.3
        ("augmentation", "digits", "accuracy", 0.92),  # without augmentation: 0.90
        ("contrastive", "pairs", "recall_at_1", 0.9),  # by chance: 0.003
    ],
)
def test_it_runs_as_printed_and_learns(name: str, module: str, measure: str, floor: float, tmp_path: Path) -> None:
    [command] = re.findall(r"^pyflyte (run .*)$", (ROOT / f"examples/{name}/{module}.py").read_text(), re.MULTILINE)
    assert f"`pyflyte {command.replace(name, 'NAME')}`" in README
    ended = pyflyte(*command.split(), home=tmp_path / "home", runs=tmp_path / "runs")
    assert ended.exit_code == 0, ended.output
    [metrics] = (tmp_path / "runs").rglob("metrics.jsonl")
    end = read_records(metrics)[-1]
    found = end[f"test_{measure}"]
    assert found < floor if measure == "mae" else found > floor
    assert not any("nothing was learned" in note for note in end["notes"])
