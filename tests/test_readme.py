"""What the README and its pages say is so: their tables are the code's, and the examples run."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli import ROOT, WORKFLOWS, pyflyte, surroundings
from document_tables import PAGES, TABLE
from training_runs import train_in

import flyte_ddp
from flyte_ddp.config import Hyperparameters
from flyte_ddp.text.json_lines import read_records

README = ROOT / "README.md"
OWN_CODE = ROOT / "docs" / "own-code.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_have_the_tables_of_the_code(page: Path) -> None:
    [(_, table, _)] = TABLE.findall(page.read_text())
    assert table.strip() == PAGES[page]().strip(), "run `python tests/helpers/document_tables.py` to write it again"


def example(page: Path, begins: str) -> str:
    """The block of Python that begins so."""
    [code] = re.findall(rf"```python\n({re.escape(begins)}.*?)```", page.read_text(), re.DOTALL)
    return code


@pytest.mark.slow
def test_the_example_in_python_runs_as_printed(tmp_path: Path) -> None:
    """In a process where all that is not the library's is far away; and its names come from one place."""
    code = example(README, "from pathlib import Path")
    (tmp_path / "example.py").write_text(code)
    done = subprocess.run([sys.executable, "example.py"], check=False, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    accuracy, path = done.stdout.split()
    assert float(accuracy.rstrip("%")) > 80
    assert path == str(Path("runs/first/model.pt"))
    assert (tmp_path / path).exists()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_example_of_ones_own_model_and_data_works(tmp_path: Path) -> None:
    [hp] = re.findall(r"--hp '(\{\"dataset\": \"mine:points\".*?\})'", OWN_CODE.read_text())
    (tmp_path / "mine.py").write_text(example(OWN_CODE, "# mine.py"))
    ended = pyflyte("run", WORKFLOWS, "training_wf", "--hp", hp, home=tmp_path / "home", directory=tmp_path)
    assert ended.exit_code == 0, ended.output
    assert float(re.findall(r"test accuracy ([\d.]+)%", ended.output)[-1]) > 95


@pytest.mark.slow
def test_the_page_of_ones_own_table_runs_as_printed(tmp_path: Path) -> None:
    """All commands after the installation, with another home; no page that they make speaks of images."""
    page = ROOT / "docs" / "own-table.md"
    folder, home = tmp_path / "wine", tmp_path / "home"
    folder.mkdir()
    (folder / "wine.py").write_text(example(page, "# wine.py"))
    [hp] = re.findall(r"```json\n(.*?)```", page.read_text(), re.DOTALL)
    (folder / "hp.json").write_text(hp)
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    blocks = [block for language, block in fenced if not language][1:]
    script = "".join([*blocks, f"python - <<END\n{example(page, 'from pathlib import Path')}END"])
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**surroundings(home, folder / "runs"), "PATH": path}
    settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    printed = ""
    for part in re.split(
        r"^(pyflyte .*\n)", script.replace("mkdir ../wine && cd ../wine", "set -e"), flags=re.MULTILINE
    ):
        if part.startswith("pyflyte"):
            words = part.replace("$FLYTE_DDP", str(ROOT)).split()[1:]
            ended = pyflyte(*words, home=home, runs=folder / "runs", directory=folder)
            code, output = ended.exit_code, ended.output
        else:
            done = subprocess.run(["bash", "-c", part], check=False, cwd=folder, env=environment, **settings)
            code, output = done.returncode, done.stdout
        assert code == 0, output
        printed += output
    assert float(re.findall(r"test accuracy ([\d.]+)%", printed)[-1]) > 90
    written = sorted(folder.rglob("predictions.csv"), key=lambda path: path.stat().st_mtime)
    files, champions = ([*csv.DictReader(path.read_text().splitlines())] for path in written)
    assert [row["id"] for row in files] == ["1", "2", "3", "4", "5"]
    assert files == champions
    [verdict] = folder.glob("runs/verdicts-*/verdict.html")
    [card] = folder.glob("runs/registry/wine/versions/*/README.md")
    assert (card.parent / "model.onnx").exists()
    assert "| Input | float [13] |" in card.read_text()
    texts = [
        verdict.read_text().partition("<body")[2],
        written[0].with_suffix(".html").read_text().partition("<body")[2],
    ]
    for text in texts:
        assert not re.search("image|picture|pixel", re.sub("<[^>]*>", " ", text), re.IGNORECASE)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_example_of_ones_own_optimiser_runs(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [hp] = re.findall(r"--hp '(\{\"model\": \"resnet18\", \"optimizer.*?\})'", OWN_CODE.read_text())
    (tmp_path / "tuning.py").write_text(example(OWN_CODE, "# tuning.py"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    changes = {"num_ranks": 1, "max_steps": 10, "learning_rate": 0.01}
    result = train_in(tmp_path / "run", Hyperparameters.from_dict({**json.loads(hp), **changes}), digits)
    steps = [record for record in read_records(result.metrics) if record["kind"] == "train"]
    assert [record["learning_rate"] for record in steps] == [pytest.approx(0.001 * 0.1**2)]
    assert [record["epoch"] for record in steps] == [1], "an epoch is 1,000 draws, 8 batches"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_examples_of_ones_own_objective_run(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = re.findall(r"^--hp '(\{\"dataset\": \"digits\", \"objective.*\})'$", OWN_CODE.read_text(), re.MULTILINE)
    (tmp_path / "losses.py").write_text(example(OWN_CODE, "# losses.py"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    changes = {"num_ranks": 1, "epochs": 5}
    runs = [
        train_in(tmp_path / str(place), Hyperparameters.from_dict({**json.loads(hp), **changes}), digits)
        for place, hp in enumerate(given)
    ]
    assert [[*run.measures] for run in runs] == [
        ["accuracy", "balanced_accuracy", "f1", "loss"],
        ["relative_error", "loss"],
    ]
    assert runs[0].measures["accuracy"] > 0.7
    assert runs[1].measures["relative_error"] < 0.6
    assert "gamma" in runs[0].sidecar.read_text()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_task_of_ones_own_project_trains(tmp_path: Path) -> None:
    page = ROOT / "docs" / "your-project.md"
    [hp] = re.findall(r"pyflyte run my_workflows.py train_wf --hp '(.*?)'", page.read_text())
    (tmp_path / "my_workflows.py").write_text(example(page, "# my_workflows.py"))
    ended = pyflyte("run", "my_workflows.py", "train_wf", "--hp", hp, home=tmp_path / "home", directory=tmp_path)
    assert ended.exit_code == 0, ended.output
    assert "model.pt" in ended.output


@pytest.mark.slow
def test_the_page_of_ones_own_loop_runs_as_printed(tmp_path: Path) -> None:
    """As a script, and as a task, which trains for one epoch."""
    page = ROOT / "docs" / "own-loop.md"
    for name in ("mine.py", "my_workflows.py"):
        (tmp_path / name).write_text(example(page, f"# {name}"))
    done = subprocess.run([sys.executable, "mine.py"], check=False, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0.95
    assert {"metrics.jsonl", "model.pt", "report.html"} <= {path.name for path in (tmp_path / "runs/mine").iterdir()}
    words = "run", "my_workflows.py", "train_wf", "--epochs", "1"
    ended = pyflyte(*words, home=tmp_path / "home", directory=tmp_path)
    assert ended.exit_code == 0, ended.output
    assert "model.pt" in ended.output


KILLED = """
import os, signal, sys
from pathlib import Path
import mine
from flyte_ddp import run_ranks
from flyte_ddp.loops.current_rank import CurrentRank

def train(marker, step_to_die_at):
    save = CurrentRank.save
    def save_and_die(self, step, state):
        save(self, step, state)
        if step == step_to_die_at and not Path(marker).exists():
            self._checkpoints.wait_until_written()
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
    CurrentRank.save = save_and_die
    return mine.train(3)

if __name__ == "__main__":
    print(run_ranks(train, "killed", int(sys.argv[2]), num_ranks=2, folder=sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_loop_of_the_page_does_the_work_at_the_end_of_an_epoch_after_a_kill_at_its_last_step(
    tmp_path: Path,
) -> None:
    """Records, weights and the returned value are those of a run that nothing disturbs, bit for bit."""
    (tmp_path / "mine.py").write_text(example(ROOT / "docs" / "own-loop.md", "# mine.py"))
    (tmp_path / "killed.py").write_text(KILLED)
    step = 29  # the last of an epoch
    environment = {**os.environ, "FLYTE_DDP_CHECKPOINT_SECONDS": "1e-6", "FLYTE_DDP_PROGRESS": "off"}

    def run(folder: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "killed.py", folder, str(step)]
        return subprocess.run(command, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True)

    assert "rank 0 was killed by SIGKILL" in run("run").stderr
    resumed, undisturbed = run("run"), run("undisturbed")
    assert resumed.stdout == undisturbed.stdout != "", resumed.stderr
    records = [
        [{**record, "time": 0} for record in read_records(tmp_path / folder / "metrics.jsonl")]
        for folder in ("run", "undisturbed")
    ]
    starts, recorded = (
        [[each for each in of if each["kind"] == kind] for of in records] for kind in ("start", "record")
    )
    assert [each["resumed_after_step"] for each in starts[0]] == [0, step]
    assert recorded[0] == recorded[1]
    assert [each["step"] for each in recorded[0] if "accuracy" in each] == [29, 58, 87]
    weights = [torch.load(tmp_path / folder / "model.pt", weights_only=True) for folder in ("run", "undisturbed")]
    assert [name for name, value in weights[0].items() if not torch.equal(value, weights[1][name])] == []


def test_the_public_names_are_there() -> None:
    assert all(getattr(flyte_ddp, name) for name in flyte_ddp.__all__)
    with pytest.raises(AttributeError, match="no attribute 'fetsch'"):
        flyte_ddp.fetsch  # noqa: B018
