"""Bad input to ``pyflyte run``: one panel that names the value, the rule and the fix, and nothing like a result."""

import re
from pathlib import Path
from typing import Any

import pytest
from cli import TINY, Ended, pyflyte, train
from mounts import ALONE, need_mounts

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


def slow(*values: Any) -> Any:
    """A case that takes more than a second."""
    return pytest.param(*values, marks=pytest.mark.slow)


def also(*values: Any) -> Any:
    """One more case of a rule, that takes its two seconds in the full run only."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.exhaustive])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"dataset": "no_such_package.data:load"}, ("no_such_package", "install it")),
        also({"init_from": "no/such/weights.pt"}, ("init_from='no/such/weights.pt': there is no such file",)),
        also({"backend": "nccl"}, ("backend='nccl'", "sees no GPU", "gloo")),
        also(
            {"learning_rate": 1000, "schedule": "constant", "epochs": 20, "num_ranks": 2}, ("the loss is", "(now 1000)")
        ),
    ],
)
def test_bad_hyperparameters_that_a_task_finds(values: dict[str, Any], words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "temporary/flyte-of-another-process").mkdir(parents=True)
    ended = train(values, home=tmp_path, TMPDIR=str(tmp_path / "temporary"))
    assert_refused(ended, tmp_path, *words)
    assert [path.name for path in (tmp_path / "temporary").iterdir()] == ["flyte-of-another-process"]


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


@pytest.mark.slow
def test_a_setting_that_wandb_would_refuse_is_in_nobody_elses_way(tmp_path: Path) -> None:
    setting = {"WANDB_MODE": "offline", "WANDB_PROJECT": "team/project"}
    package = ("--pkgs", "workflows", "package", "--image", "image:1", "--output", str(tmp_path / "package.tgz"))
    for ended in (pyflyte(*package, home=tmp_path, **setting), train(TINY, home=tmp_path, **setting)):
        assert_refused(ended, tmp_path, "WANDB_PROJECT='team/project'", "WANDB_ENTITY")
    shown = pyflyte("run", "tasks/shards.py", "pack_shards", "--source", "nowhere", home=tmp_path, **setting)
    assert_refused(shown, tmp_path, "nowhere")


@pytest.mark.slow
def test_a_file_in_place_of_the_runs_folder(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.write_text("not a folder")
    ended = train(TINY, home=tmp_path)
    assert_refused(ended, tmp_path, str(runs), "FLYTE_DDP_RUNS")
    assert runs.read_text() == "not a folder"


@pytest.mark.parametrize(
    ("options", "folder", "words"),
    [
        slow("ro", "home", ("could not be created", ".flyte/local-cache", "FLYTE_LOCAL_CACHE_ENABLED=false")),
        also("size=4k", "home", ("database or disk is full", "FLYTE_LOCAL_CACHE_ENABLED=false")),
        also("ro", "runs", ("Read-only file system", "FLYTE_DDP_RUNS")),
        also("size=60k", "runs", ("disk is full", "free some space")),  # at the data
        also("size=210k", "runs", ("No space left", "free some space")),  # at the model
        also("size=300k", "runs", ("No space left", "free some space")),  # at the report
    ],
)
def test_a_disk_that_cannot_be_written_to(options: str, folder: str, words: tuple[str, ...], tmp_path: Path) -> None:
    runs, disk = tmp_path / "runs", tmp_path / folder
    disk.mkdir()
    need_mounts(disk)
    # What is left on that disk can be seen from inside only.
    mount, find = f'mount -t tmpfs -o {options} tmpfs "{disk}"', f'echo "LEFT:"; find "{runs}" -type f'
    script = f'{mount} && "$@"; code=$?; {find}; exit $code'
    ended = train(TINY, home=tmp_path / "home", runs=runs, wrapper=(*ALONE, "sh", "-c", script, "sh"))
    assert_refused(ended, tmp_path, str(disk), *words)
    left = {path.rpartition("/")[2] for path in ended.output.partition("LEFT:")[2].split()}
    assert not [name for name in left if re.search(r"model\.|report|predictions|tmp", name)], left
