"""What the README and its pages say is so: their tables are the code's, and the examples run."""

import csv
import importlib
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli import ROOT, WORKFLOWS, pyflyte, surroundings
from document_tables import PAGES, TABLE
from training_runs import train_in

import flyte_ddp
from flyte_ddp.config import Hyperparameters

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
    """All commands after the installation, with another home."""
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
    assert [*folder.glob("runs/registry/wine/versions/*/model.onnx")]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_examples_of_ones_own_optimiser_and_objective_run(digits: Path, tmp_path: Path, monkeypatch) -> None:
    text = OWN_CODE.read_text()
    given = re.findall(r"--hp '(\{\"model\": \"resnet18\", \"optimizer.*?\})'", text)
    given += re.findall(r"^--hp '(\{\"dataset\": \"digits\", \"objective.*\})'$", text, re.MULTILINE)
    for name in ("tuning.py", "losses.py"):
        (tmp_path / name).write_text(example(OWN_CODE, f"# {name}"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    changes = {"num_ranks": 1, "max_steps": 10}
    runs = [
        train_in(tmp_path / str(place), Hyperparameters.from_dict({**json.loads(hp), **changes}), digits)
        for place, hp in enumerate(given)
    ]
    measures = [{*run.measures} for run in runs]
    assert measures[1:] == [{"accuracy", "balanced_accuracy", "f1", "loss"}, {"relative_error", "loss"}]


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
def test_the_page_of_ones_own_loop_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """As a script, and as a task, which trains for one epoch."""
    for name in ("mine.py", "my_workflows.py"):
        (tmp_path / name).write_text(example(ROOT / "docs" / "own-loop.md", f"# {name}"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FLYTE_DDP_RUNS", str(tmp_path / "runs"))
    runpy.run_path("mine.py", run_name="__main__")
    assert float(capsys.readouterr().out) > 0.95
    assert {"metrics.jsonl", "model.pt", "report.html"} <= {path.name for path in (tmp_path / "runs/mine").iterdir()}
    _, model = importlib.import_module("my_workflows").train_wf(epochs=1)
    assert Path(model.path).name == "model.pt"
    for name in ("mine", "my_workflows"):
        del sys.modules[name]


def test_the_public_names_are_there() -> None:
    assert all(getattr(flyte_ddp, name) for name in flyte_ddp.__all__)
    with pytest.raises(AttributeError, match="no attribute 'fetsch'"):
        flyte_ddp.fetsch  # noqa: B018
