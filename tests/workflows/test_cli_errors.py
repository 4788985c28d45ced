"""Bad input to ``pyflyte run``: one panel that names the value, the rule and the fix, and nothing like a result."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli import TINY, Ended

RESULTS = ("model.pt", "model.json", "report.html", "predictions*")  # patterns of what looks like a result


def assert_refused(ended: Ended, runs: Path, *words: str) -> None:
    """One panel that says all of ``words``, an exit code, and nothing that looks like a result."""
    assert ended.exit_code != 0, ended.output
    assert "Traceback" not in ended.output
    assert ended.panel, ended.output
    for word in words:
        assert word in ended.panel
    assert len(ended.panel) < 700
    assert not [path for pattern in RESULTS for path in runs.rglob(pattern)]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"dataset": "no_such_package.data:load"}, "no_such_package"),
        ({"init_from": "no/such/weights.pt"}, "init_from='no/such/weights.pt': does not exist"),
        ({"backend": "nccl"}, "backend='nccl'"),
    ],
)
def test_bad_hyperparameters_that_a_task_finds(
    refusal: Callable[..., str], values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    assert words in refusal("training", "training_wf", "--hp", json.dumps(values))
    assert not [path for pattern in RESULTS for path in tmp_path.rglob(pattern)]


def test_a_file_in_place_of_the_runs_folder(refusal: Callable[..., str], tmp_path, monkeypatch) -> None:
    runs = tmp_path / "runs"
    runs.write_text("not a folder")
    said = refusal("training", "training_wf", "--hp", json.dumps(TINY))
    assert str(runs) in said
    assert "FLYTE_DDP_RUNS" in said
    assert runs.read_text() == "not a folder"
