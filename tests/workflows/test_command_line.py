"""What a person sees of ``pyflyte run`` when it ends: where it goes on, one panel for what went wrong, no litter."""

import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from cli import DEADLINE, ROOT, WORKFLOWS, Ended, is_pyflyte, pyflyte, train
from processes import wait_until
from test_cli_errors import also, assert_refused

from benchmarks.running import descendants
from tasks.command_line import input_file_error, show_errors_in_panels

pytestmark = pytest.mark.slow
LONG = {"num_ranks": 2, "epochs": 20, "batch_size": 64, "eval_interval": 5}
ELASTIC = {"name": "elastic_training_wf", "workflow": str(ROOT / "workflows/elastic_training.py")}


def disturbed(disturb: Callable[[int], None], folder: Path, **options: Any) -> Ended:
    """A run to whose launcher this is done once there is a checkpoint; it leads a session of its own."""

    def wait_and_disturb() -> None:
        wait_until(lambda: any(name.endswith(".ckpt") for _, _, names in os.walk(folder) for name in names), DEADLINE)
        disturb([pid for pid in descendants(os.getpid()) if is_pyflyte(pid)][-1])

    with ThreadPoolExecutor() as pool:
        disturbance = pool.submit(wait_and_disturb)
        ended = train(LONG, home=folder, session=True, **options)
        disturbance.result()
    assert ended.exit_code == 1, ended.output
    assert "Traceback" not in ended.output
    return ended


def press_ctrl_c(launcher: int) -> None:
    """As a terminal does: all processes get it."""
    os.killpg(os.getpgid(launcher), signal.SIGINT)


def terminate(launcher: int) -> None:
    os.kill(launcher, signal.SIGTERM)


@pytest.mark.parametrize(
    ("disturb", "words", "options"),
    [
        (press_ctrl_c, "stopped by Ctrl-C", {}),
        also(terminate, "stopped by SIGTERM", ELASTIC),
    ],
)
def test_the_last_line_says_that_the_same_command_goes_on(
    disturb: Callable[[int], None], words: str, options: dict[str, str], tmp_path: Path
) -> None:
    """And so it does; no temporary file is left."""
    (tmp_path / "temporary").mkdir()
    stopped = disturbed(disturb, tmp_path, TMPDIR=str(tmp_path / "temporary"), **options)
    assert stopped.panel.startswith(words)
    said = re.search(r"the same command will go on after step ([\d,]+), which is saved\W*$", stopped.output)
    assert said, stopped.output
    if options:  # torch leaves files of its own
        return
    assert [*(tmp_path / "temporary").iterdir()] == []
    again = train(LONG, home=tmp_path)
    assert f"going on after step {said[1]}," in again.output
    assert again.exit_code == 0
    assert not [*tmp_path.rglob("*.ckpt")]


RAISES = """
from torch import nn

class Broken(nn.Linear):
    def forward(self, images):
        raise ArithmeticError("own words")

def model(num_classes, input_shape):
    return Broken(64, num_classes)
"""


@pytest.mark.parametrize("options", [{}, also(ELASTIC)])
@pytest.mark.canary
def test_a_rank_that_raises_is_one_panel(options: dict[str, str], tmp_path: Path) -> None:
    """No temporary file of ours is left."""
    temporary = tmp_path / "temporary"
    (temporary / "flyte-of-another-process").mkdir(parents=True)
    (tmp_path / "mine.py").write_text(RAISES)
    here = {"home": tmp_path / "home", "directory": tmp_path, "TMPDIR": str(temporary), **options}
    ended = train({"model": "mine:model", "num_ranks": 2}, **here)
    assert_refused(ended, tmp_path, "ArithmeticError: own words")
    assert re.match(r"rank [01]: ", ended.panel)
    [file] = (tmp_path / "home/runs").rglob("traceback.txt")
    assert ended.panel.endswith(f"the whole error is in {os.path.relpath(file, tmp_path)}")
    text = file.read_text()
    assert text.count('raise ArithmeticError("own words")') == 1
    assert 'mine.py", line 6, in forward' in text
    torchs_own = ("torchelastic_", "pytorch-errorfile-")  # the second of the rank that raised
    left = {path.name for path in temporary.iterdir() if not path.name.startswith(torchs_own)}
    assert left == {"flyte-of-another-process"}


@pytest.mark.parametrize(
    ("arguments", "content", "words"),
    [
        (["--hp", "file.yaml"], "epoch: 3", "unknown hyperparameter 'epoch': did you mean 'epochs'?"),
        (["--hp", "file.yaml"], "", "must be a JSON object"),
        (["--hp", "file.yaml"], "learning_rate: [", "--hp file.yaml: is not valid YAML: .*, line 1, column 17"),
        (["--hp", "."], "", r"--hp \.: Is a directory; give a file of JSON or YAML, such as {\"epochs\": 3}"),
        (["--hp", "nowhere.json"], "", "should be a valid json object, nowhere.json"),
        (["--inputs-file", "nowhere.json"], "", "--inputs-file nowhere.json: No such file or directory; give"),
        (["--epochs", "3"], "", "No such option"),
    ],
)
def test_inputs_that_cannot_be_read(
    refusal: Callable[..., str], tmp_path: Path, arguments: list[str], content: str, words: str
) -> None:
    (tmp_path / "file.yaml").write_text(content)
    assert re.search(words, refusal("training", "training_wf", *arguments))


@pytest.mark.parametrize(
    "raised", [yaml.YAMLError("mine"), UnicodeDecodeError("utf-8", b"", 0, 1, "mine"), OSError(2, "x")]
)
def test_what_own_code_raises_is_not_the_mistake_of_a_file_that_can_be_read(
    raised: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file.yaml"
    file.write_text("epochs: 3")
    monkeypatch.setattr("sys.argv", ["pyflyte", "run", "workflow.py", "training_wf", "--hp", str(file)])
    assert input_file_error(raised) is None
    file.write_bytes(b"\xff")
    assert "is not text" in input_file_error(raised).message


def test_a_mistake_on_the_command_line_is_one_panel(tmp_path: Path) -> None:
    ended = pyflyte("run", WORKFLOWS, "nightly_training", home=tmp_path)
    assert_refused(ended, tmp_path, "'nightly_training': did you mean 'nightly_retraining'?", "training_on_demand")


def test_an_error_of_our_own_is_no_panel() -> None:
    """It is no user's mistake, so whoever fixes it needs its traceback."""
    with pytest.raises(IsADirectoryError), show_errors_in_panels(click.Context(click.Command("run"))):
        raise OSError(21, "Is a directory", ".")


@pytest.mark.parametrize(
    ("model", "images", "words"),
    [
        ("model.pt", "nothing-here", "--images 'nothing-here': there is no such path"),
        ("model.pt", "", "--images '': there is no such path"),
        ("model.pt", "model.json", "--images 'model.json': is a file; see --help for what it takes"),
        ("model.pt", ".", "sidecar model.json has format None"),
    ],
)
def test_what_predictions_cannot_be_made_from(
    refusal: Callable[..., str], tmp_path: Path, model: str, images: str, words: str
) -> None:
    (tmp_path / "model.json").write_text("{}")
    (tmp_path / "model.pt").write_bytes(b"PK\x05\x06" + bytes(18))
    arguments = ("--model_state", model, "--sidecar", "model.json", "--images", images)
    assert words in refusal("prediction", "predict_wf", *arguments)
    assert not [*tmp_path.rglob("predictions-*")]
