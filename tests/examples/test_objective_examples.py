"""The examples of own data, models and objectives: run as printed, better than what a constant output reaches."""

import re
from pathlib import Path

import pytest
from cli import ROOT, pyflyte

from flyte_ddp.core.text.json_lines import read_records

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
README = (ROOT / "examples" / "README.md").read_text()
LOWER = ("mae", "perplexity")


@pytest.mark.parametrize(
    ("name", "measure", "floor"),
    [
        ("contrastive/hp", "recall_at_1", 0.9),  # by chance: 0.003
        ("tables/diabetes", "r2", 0.45),  # a linear regression: 0.453
        ("multilabel_photos/hp", "f1", 0.9),  # all labels for all photos: 0.57
        ("counting/hp", "mae", 0.5),  # always 10: 5.2
        ("segmentation/hp", "miou", 0.75),  # background alone: 0.3
        ("augmentation/hp", "accuracy", 0.92),  # without augmentation: 0.90
        ("tables/breast_cancer", "accuracy", 0.94),  # always benign: 0.62
        ("tables/houses", "r2", 0.9),  # a linear regression: 0.67
        ("sequences/hp", "accuracy", 0.97),
        ("texts/padded", "accuracy", 0.95),
        ("texts/own_collate", "accuracy", 0.95),
        ("gpt/hp", "perplexity", 9.0),  # by the characters' frequencies: 29
    ],
)
def test_it_runs_as_printed_and_learns(name: str, measure: str, floor: float, tmp_path: Path) -> None:
    file = f"examples/{name}.json"
    printed = "\n".join(path.read_text() for path in (ROOT / file).parent.glob("*.py"))
    [command] = re.findall(rf"pyflyte (run [^`\n]* {file})\b", printed)
    assert f"`pyflyte {command.replace(file, 'FILE')}`" in README
    assert f"`{file}`" in README or f"[{name.removesuffix('/hp')}](" in README
    ended = pyflyte(*command.split(), home=tmp_path / "home", runs=tmp_path / "runs")
    assert ended.exit_code == 0, ended.output
    [metrics] = (tmp_path / "runs").rglob("metrics.jsonl")
    end = read_records(metrics)[-1]
    found = end[f"test_{measure}"]
    assert found < floor if measure in LOWER else found > floor
