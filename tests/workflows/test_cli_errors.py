"""Bad input to ``pyflyte run``: one panel that names the value, the rule and the fix, and nothing like a result."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli import TINY, Ended

from flyte_ddp.errors import UserError
from flyte_ddp.settings import check_wandb_settings, read_settings

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
        ({"init_from": "no/such/weights.pt"}, "init_from='no/such/weights.pt': there is no such file"),
        ({"backend": "nccl"}, "backend='nccl'"),
    ],
)
def test_bad_hyperparameters_that_a_task_finds(
    refusal: Callable[..., str], values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    assert words in refusal("training", "training_wf", "--hp", json.dumps(values))
    assert not [path for pattern in RESULTS for path in tmp_path.rglob(pattern)]


@pytest.mark.parametrize(
    ("variable", "value", "rule"),
    [
        ("WANDB_PROJECT", "vision#2", "none of / "),
        ("WANDB_PROJECT", "a" * 129, "must have at most 128 characters"),
        ("WANDB_BASE_URL", "wandb.example.com:8080", "must be an address such as https://wandb.example.com"),
    ],
)
def test_a_setting_that_wandb_would_refuse(
    variable: str, value: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match=f"^{variable}='{value}': .*{rule}"):
        check_wandb_settings(read_settings())
    monkeypatch.setenv("WANDB_MODE", "disabled")
    check_wandb_settings(read_settings())


def test_a_file_in_place_of_the_runs_folder(
    refusal: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    runs.write_text("not a folder")
    said = refusal("training", "training_wf", "--hp", json.dumps(TINY))
    assert str(runs) in said
    assert "FLYTE_DDP_RUNS" in said
    assert runs.read_text() == "not a folder"
