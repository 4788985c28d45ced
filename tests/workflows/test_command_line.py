"""What a person sees of ``pyflyte run`` when it ends: where it goes on, one panel for what went wrong, no litter."""

import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import grpc
import pytest
from cli import DEADLINE, WORKFLOWS, is_pyflyte, pyflyte, train
from processes import wait_until
from test_cli_errors import assert_refused

from benchmarks.running import descendants
from flyte_ddp.core.errors import UnreachableError, UserError
from flyte_ddp.schedules.arguments import refuse_misread_input
from tasks.command_line import find_input_file_error, show_errors_in_panels

pytestmark = pytest.mark.slow
LONG = {"num_ranks": 2, "epochs": 12, "batch_size": 64, "eval_interval": 5}


def press_ctrl_c(folder: Path) -> None:
    """As a terminal does, once there is a checkpoint: all processes of the launcher's session get it."""
    wait_until(lambda: any(name.endswith(".ckpt") for _, _, names in os.walk(folder) for name in names), DEADLINE)
    launcher = [pid for pid in descendants(os.getpid()) if is_pyflyte(pid)][-1]
    os.killpg(os.getpgid(launcher), signal.SIGINT)


def test_the_last_line_says_that_the_same_command_goes_on(tmp_path: Path) -> None:
    """And so it does; no temporary file is left."""
    (tmp_path / "temporary").mkdir()
    with ThreadPoolExecutor() as pool:
        disturbance = pool.submit(press_ctrl_c, tmp_path)
        stopped = train(LONG, home=tmp_path, session=True, TMPDIR=str(tmp_path / "temporary"))
        disturbance.result()
    assert stopped.exit_code == 1, stopped.output
    assert "Traceback" not in stopped.output
    assert stopped.panel.startswith("stopped by Ctrl-C")
    said = re.search(r"the same command will go on after step ([\d,]+), which is saved\W*$", stopped.output)
    assert said, stopped.output
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


@pytest.mark.canary
def test_a_rank_that_raises_is_one_panel(tmp_path: Path) -> None:
    """No temporary file of ours is left."""
    temporary = tmp_path / "temporary"
    (temporary / "flyte-of-another-process").mkdir(parents=True)
    (tmp_path / "mine.py").write_text(RAISES)
    here = {"home": tmp_path / "home", "directory": tmp_path, "TMPDIR": str(temporary)}
    ended = train({"model": "mine:model", "num_ranks": 2}, **here)
    assert_refused(ended, tmp_path, "ArithmeticError: own words")
    assert re.match(r"rank [01]: ", ended.panel)
    [file] = (tmp_path / "home/runs").rglob("traceback.txt")
    assert ended.panel.endswith(f"the full error is in {os.path.relpath(file, tmp_path)}")
    text = file.read_text()
    assert text.count('raise ArithmeticError("own words")') == 1
    assert 'mine.py", line 6, in forward' in text
    assert [path.name for path in temporary.iterdir()] == ["flyte-of-another-process"]


@pytest.mark.parametrize(
    ("arguments", "content", "words"),
    [
        (["--hp", "file.yaml"], "epoch: 3", "unknown hyperparameter 'epoch': did you mean 'epochs'?"),
        (["--hp", "file.yaml"], "learning_rate: [", "--hp file.yaml: is not valid YAML: .*, line 1, column 17"),
        (["--hp", "."], "", r"--hp \.: Is a directory; give a JSON or YAML file"),
        (["--inputs-file", "nowhere.json"], "", "--inputs-file nowhere.json: No such file or directory; give"),
        (["--hp=."], "", r"--hp \.: Is a directory; give a JSON or YAML file"),
        (["--hp", "file.yaml"], "options: {model: {eps: 1e-6}}", "'1e-6' is text, not a number"),
    ],
)
def test_inputs_that_cannot_be_read(
    refusal: Callable[..., str], tmp_path: Path, arguments: list[str], content: str, words: str
) -> None:
    (tmp_path / "file.yaml").write_text(content)
    assert re.search(words, refusal("training", "training_wf", *arguments))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("training trainin_wf", "'trainin_wf' not found in module 'workflows.training'; choose one of "),
        ("prediction predict_wf --images nothing-here", "--images 'nothing-here': no such file or folder"),
        (
            "prediction predict_wf --model_name digits --dataset digits --bad_samples -3",
            "bad_samples=-3: must be at le",
        ),
        ("prediction predict_wf --images=nothing-here", "--images 'nothing-here': no such file or folder"),
    ],
)
def test_a_name_or_a_path_that_is_not_there_is_one_sentence(
    refusal: Callable[..., str], command: str, words: str
) -> None:
    assert re.search(words, refusal(*command.split()))


TWICE = "occurs twice; remove one of the two"


@pytest.mark.parametrize(
    ("arguments", "content", "said"),
    [
        (["--hp", "file.yaml"], "epochs: 3\nepochs: 50", "--hp file.yaml: duplicate key 'epochs', line 2, "),
        (["--hp", '{"epochs": 3, "epochs": 50}'], "", f"--hp: the key 'epochs' {TWICE}"),
        (
            ["--inputs-file", "file.yaml"],
            "hp: {seed: 1, seed: 2}",
            "file.yaml: duplicate key 'seed', line 1, ",
        ),
    ],
)
def test_what_flytekit_would_misread_is_refused(tmp_path: Path, arguments: list[str], content: str, said: str) -> None:
    (tmp_path / "file.yaml").write_text(content)
    ended = pyflyte("run", WORKFLOWS, "training_wf", *arguments, home=tmp_path, directory=tmp_path)
    assert_refused(ended, tmp_path, said)


@pytest.mark.parametrize(
    ("option", "content", "said"),
    [
        ("--policy", '{"margin": 0.1, "margin": 0.2}', f"the key 'margin' {TWICE}"),
        ("--sweep", '{"space": {"seed": [1], "seed": [2]}}', f"the key 'seed' {TWICE}"),
        ("--window", "images: a\nimages: b", "duplicate key 'images', line 2, column 1; remove one of the two"),
        ("--inputs-file", 'hp: \'{"seed": 1, "seed": 2}\'', f"--hp: the key 'seed' {TWICE}"),
        (
            "--hp",
            "epochs: 010",
            "010 is 8 in YAML, line 1, column 9; put it in quotes if it is text; a number must have no",
        ),
        ("--hp", "epochs: 1:30", "1:30 is 90 in YAML, line 1, column 9; put it in quotes if it is text"),
        ("--hp", "data_source: 2026-11-28", "2026-11-28 is a date in YAML, line 1, column 14; put it in quotes if"),
    ],
)
def test_what_is_misread_is_named_with_its_place(tmp_path: Path, option: str, content: str, said: str) -> None:
    file = tmp_path / "file"
    file.write_text(content)
    with pytest.raises(UserError, match=re.escape(said)) as refused:
        refuse_misread_input(option, str(file))
    assert refused.value.message.startswith(("--hp: ", f"{option} {file}: "))


def test_what_is_read_as_it_is_written_passes(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(
        "{seed: 0, weight_decay: 0.5, dataset: a:b, model: '010', sample: \"1:30\", epochs: 10}"
    )
    refuse_misread_input("--hp", str(tmp_path / "file"))


def test_words_that_are_no_json_or_yaml_pass(tmp_path: Path) -> None:
    """A workflow of a user's own may have something else of that name."""
    (tmp_path / "broken").write_text("margin: [")
    for word in ("strict", "5", str(tmp_path), str(tmp_path / "broken"), "x" * 300, "{" * 50, "{" + "1" * 5_000):
        refuse_misread_input("--policy", word)
    refuse_misread_input("--other", '{"a": 1, "a": 2}')


def test_what_own_code_raises_is_not_the_mistake_of_a_file_that_can_be_read(tmp_path, monkeypatch) -> None:
    file = tmp_path / "file.yaml"
    file.write_text("epochs: 3")
    monkeypatch.setattr("sys.argv", ["pyflyte", "run", "workflow.py", "training_wf", "--hp", str(file)])
    raised = UnicodeDecodeError("utf-8", b"", 0, 1, "mine")
    assert find_input_file_error(raised) is None
    file.write_bytes(b"\xff")
    assert "is not text" in find_input_file_error(raised).message


class FailedCall(grpc.RpcError):
    """A call that ended with a status."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self.code, self.details = lambda: code, lambda: "in\nwords"


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        ("UNAVAILABLE", UnreachableError, "does not answer (UNAVAILABLE: in words); check admin in "),
        ("PERMISSION_DENIED", UserError, "rejected a call (PERMISSION_DENIED: in words); check admin in "),
    ],
)
def test_a_failed_call_to_a_cluster_is_one_sentence(code: str, kind: type[UserError], said: str) -> None:
    with pytest.raises(kind) as shown, show_errors_in_panels(click.Context(click.Command("run"))):
        raise ValueError from FailedCall(grpc.StatusCode[code])
    assert said in shown.value.message
    assert type(shown.value) is kind
