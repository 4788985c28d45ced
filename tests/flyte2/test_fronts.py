"""The contract of both fronts: what a user gets does not depend on the version of Flyte."""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from cli import PYFLYTE, WORKFLOWS, Ended, pyflyte
from flyte2_cli import FLYTE, LONG, assert_equal_bits, flyte, run_task, stop, task_words
from training_runs import QUIET

from flyte_ddp.config import Hyperparameters
from flyte_ddp.pods.run_inputs import check_and_identify_run
from flyte_ddp.run import run_training

pytestmark = pytest.mark.slow
HP = {"epochs": 2, "num_ranks": 2, "backend": "gloo"}
FILES = ("model.pt", "model.json", "report.html", "metrics.jsonl")
FRONTS = (pytest.param("pyflyte", marks=pytest.mark.flytekit), "flyte")
AGAIN = "is already finished; FLYTE_DDP_FROM_SCRATCH=yes before the command trains again"
PYFLYTE_WORDS = ["run", WORKFLOWS, "training_wf", "--hp"]
MISTAKES = {
    '{"epochs": 0}': "epochs=0: must be at least 1",
    '{"epoch": 3}': "unknown hyperparameter 'epoch': did you mean 'epochs'?",
    '{"dataset": "nowhere"}': "unknown dataset 'nowhere': choose one of",
    '{"dataset": "shards:/nowhere/x.json"}': "index /nowhere/x.json: cannot be read (no such file); check the path",
    '{"epochs": 1, "epochs": 2}': "--hp: the key 'epochs' occurs twice; remove one of the two",
    "[1]": "hyperparameters must be a JSON object, got [1]",
    "seed: 2026-01-01": "--hp hp.yaml: 2026-01-01 is a date in YAML, line 1, column 7; put it in quotes if it is text",
    "epochs: 010": "--hp hp.yaml: 010 is 8 in YAML, line 1, column 9; put it in quotes if it is text",
}


def train_by(front: str, hp: str, home: Path, **environment: str) -> Ended:
    if front == "pyflyte":
        return pyflyte(*PYFLYTE_WORDS, hp, home=home, **environment)
    return run_task("training", "training", home, environment, hp=hp)


def read_state(runs: Path) -> dict[str, int]:
    """Return the time of change of each file of a training."""
    return {str(path): path.stat().st_mtime_ns for path in runs.glob("digits-*/*")}


@pytest.fixture(scope="module")
def expected(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of HP, trained by the library without any front."""
    result = run_training(Hyperparameters(**HP), digits, tmp_path_factory.mktemp("expected") / "run", QUIET)
    return torch.load(result.model, weights_only=True)


@pytest.mark.parametrize("front", FRONTS)
def test_a_run_has_the_same_folder_and_the_same_bits_and_is_cached(
    front: str, expected: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call is answered by Flyte's cache. Without the cache, the finished folder answers."""
    ended = train_by(front, json.dumps(HP), tmp_path)
    assert ended.exit_code == 0, ended.output
    [folder] = (tmp_path / "runs").glob("digits-*")
    monkeypatch.setenv("FLYTE_DDP_RUNS", str(tmp_path / "runs"))
    name, _, _ = check_and_identify_run(Hyperparameters(**HP), "", None)[0].partition("@")
    assert folder.name == name
    assert_equal_bits(folder / "model.pt", expected)
    assert f"; written to {folder}\n" in ended.output
    assert [path for path in FILES if f"{folder / path}" not in ended.output] == []
    assert "epoch_accuracies=[" in ended.output, "the outputs have names"

    before = read_state(tmp_path / "runs")
    again = train_by(front, json.dumps(HP), tmp_path)
    assert again.exit_code == 0, again.output
    assert f"{folder / 'model.pt'}" in again.output
    assert "epoch 1/2" not in again.output
    assert "is already finished" not in again.output, "not from the cache"
    assert read_state(tmp_path / "runs") == before

    if front == "flyte":
        shutil.rmtree(tmp_path / ".flyte")
        finished = train_by(front, json.dumps(HP), tmp_path)
        assert AGAIN in finished.output
        assert read_state(tmp_path / "runs") == before
        anew = train_by(front, json.dumps(HP), tmp_path, FLYTE_DDP_FROM_SCRATCH="yes")
        assert "epoch 1/2" in anew.output
        after = read_state(tmp_path / "runs")
        assert after.keys() == before.keys()
        assert after[str(folder / "model.pt")] != before[str(folder / "model.pt")]
        assert_equal_bits(folder / "model.pt", expected)


BY_FLYTE_1 = pytest.param("pyflyte", marks=[pytest.mark.exhaustive, pytest.mark.flytekit])


@pytest.mark.parametrize("front", [BY_FLYTE_1, "flyte"])
@pytest.mark.parametrize("hp", MISTAKES)
def test_a_mistake_is_the_same_sentence_and_trains_nothing(front: str, hp: str, tmp_path: Path) -> None:
    """Other tests have the sentences of Flyte 1, too."""
    value = hp if hp.startswith(("{", "[")) else str(tmp_path / "hp.yaml")
    (tmp_path / "hp.yaml").write_text(hp)
    ended = train_by(front, value, tmp_path)
    assert ended.exit_code == 1, ended.output
    said = " ".join(ended.output.replace("│", " ").split()).replace(f"{tmp_path}/", "")
    assert said.count(MISTAKES[hp]) == 1, said
    assert not [word for word in ("Traceback", "Error invoking command", "Retrying") if word in said], said
    assert len(re.sub("[─╭╮╰╯]", "", said)) < 400, said
    assert not [*(tmp_path / "runs").rglob("model.pt")]


@pytest.mark.flytekit
def test_a_stopped_run_goes_on_from_one_front_to_the_other(
    undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Flyte 1 begins and gets SIGTERM, Flyte 2 gets Ctrl-C, then SIGTERM, and Flyte 2 ends the run."""
    words = task_words("training", "training", {"hp": LONG})
    began = stop(tmp_path, PYFLYTE, [*PYFLYTE_WORDS, json.dumps(LONG)], signal.SIGTERM)
    pressed = stop(tmp_path, FLYTE, words, signal.SIGINT)
    terminated = stop(tmp_path, FLYTE, words, signal.SIGTERM)
    steps = [0]
    for ended, reason in ((began, "SIGTERM"), (pressed, "Ctrl-C"), (terminated, "SIGTERM")):
        assert ended.exit_code == 1, ended.output
        assert f"stopped by {reason}" in ended.panel, ended.output
        said = re.search(r"the same command will go on after step ([\d,]+), which is saved", ended.panel)
        assert said, ended.output
        if ended is not began:
            assert f"going on after step {steps[-1]}," in ended.output
        steps.append(int(said[1].replace(",", "")))
        assert "Traceback" not in ended.output
    assert steps == sorted({*steps}), "each part makes progress"
    ended = run_task("training", "training", tmp_path, hp=LONG)
    assert ended.exit_code == 0, ended.output
    assert f"going on after step {steps[-1]}," in ended.output
    [folder] = (tmp_path / "runs").glob("digits-*")
    assert_equal_bits(folder / "model.pt", undisturbed)
    assert not [*folder.rglob("*.ckpt")]


@pytest.mark.parametrize("front", ["flyte", pytest.param("pyflyte", marks=pytest.mark.flytekit)])
def test_a_stopped_retraining_does_not_promise_to_go_on(front: str, tmp_path: Path) -> None:
    """Each start of a retraining is another run."""
    words = task_words("training", "retraining", {"hp": LONG})
    if front == "pyflyte":
        words = ["run", WORKFLOWS, "retraining_wf", "--hp", json.dumps(LONG)]
    ended = stop(tmp_path, FLYTE if front == "flyte" else PYFLYTE, words, signal.SIGINT)
    assert "stopped by Ctrl-C; the same command will train anew" in ended.panel, ended.output


def test_help_lists_the_arguments_and_the_fields_and_no_schema(tmp_path: Path) -> None:
    ended = flyte("run", "flyte2/release.py", "release", "--help", home=tmp_path, COLUMNS="100")
    assert ended.exit_code == 0
    said = " ".join(ended.output.split())
    assert "run: Folder of a finished run to release without training" in said
    assert "Fields of the JSON of --hp: dataset Data set: digits, " in said
    assert "Fields of the JSON of --policy: rule " in said
    assert "additionalProperties" not in said


@pytest.mark.parametrize(
    ("word", "reason"),
    [("{epochs: 3}", "is not JSON: "), ("missing.json", "No such file"), ("README.md", "is not JSON: ")],
)
def test_an_option_that_cannot_be_read_is_a_sentence(word: str, reason: str, tmp_path: Path) -> None:
    """The SDK would write its own error behind two prefixes."""
    ended = run_task("training", "training", tmp_path, hp=word)
    assert ended.exit_code == 1
    assert f"Error: --hp {word}: {reason}" in ended.output
    assert "Error invoking command" not in ended.output


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("training.py", "training", "--hpp", "{}"), "No such option '--hpp'."),
        (("training.py", "trainin"), "unknown task 'trainin': choose one of fetch_dataset, retraining, train_model, "),
        (("shards.py", "pack_and_verify", "--seed", "x"), "'x' is not a valid integer."),
        (("release.py", "rollback", "--model_name", "digits"), "Missing required parameter(s): --reason"),
        (("release.py", "release"), "model name '': must be letters, digits, '_', '-' and '.' only"),
        (("prediction.py", "predict", "--table", "nothing.csv"), "--table 'nothing.csv': no such file or folder"),
        (("prediction.py", "predict", "--images", "nothing"), "--images 'nothing': no such file or folder; see --help"),
    ],
)
def test_a_mistake_in_the_options_is_a_sentence(words: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    file, *rest = words
    ended = flyte("run", "--local", f"flyte2/{file}", *rest, home=tmp_path)
    assert ended.exit_code != 0
    said = " ".join(ended.output.replace("│", " ").split())
    assert said.count(reason) == 1, said
    assert not [word for word in ("Traceback", "Error invoking command") if word in said], said


def test_options_of_other_tasks_are_not_checked(tmp_path: Path) -> None:
    """A user's file may import a task of this project, and have an option of the same name."""
    (tmp_path / "own.py").write_text(
        "import flyte\nimport flyte2.training\nenv = flyte.TaskEnvironment('own')\n"
        "@env.task\nasync def double(window: int) -> int:\n    return 2 * window\n"
    )
    ended = flyte("run", "--local", "own.py", "double", "--window", "3", home=tmp_path, directory=tmp_path)
    assert ended.exit_code == 0, ended.output
    assert "o0=6" in ended.output
    ended = flyte("run", "--local", "own.py", "double", "--window", "3.json", home=tmp_path, directory=tmp_path)
    assert "'3.json' is not a valid integer." in ended.output
