"""What a user gets from ``pyflyte run``: files that stay, and a cache that is right."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from cli import TINY, WORKFLOWS, Ended, pyflyte, train

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.prepared_folder import VERIFIED
from flyte_ddp.release.policy import Policy

pytestmark = pytest.mark.slow
OUTPUTS = {"model_state": "model.pt", "sidecar": "model.json", "report": "report.html", "metrics": "metrics.jsonl"}
Files = dict[str, Path]


def outputs(ended: Ended) -> Files:
    """The files that a run which must have succeeded printed as its outputs; all are there."""
    assert ended.exit_code == 0, ended.output
    line = ended.output[ended.output.rindex("TrainingOutputs(") :]
    paths = {name: Path(found) for name, found in re.findall(r"(\w+)=(/[^,)]+)", line)}
    assert {name: path.name for name, path in paths.items()} == OUTPUTS
    for path in paths.values():
        assert path.stat().st_size > 0, path
    return paths


def run_folder(ended: Ended) -> Path:
    return outputs(ended)["model_state"].parent


def trained(ended: Ended) -> bool:
    """Whether this call trained; what comes from the cache makes no progress."""
    return "test accuracy" in ended.output


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """Time of change and size of every file."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != VERIFIED]  # of a copy made again
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Path]:
    """A run by a file of YAML, and its home, of which a copy lies beside it."""
    home = tmp_path_factory.mktemp("trained") / "home"
    (home.parent / "hp.yaml").write_text("learning_rate: 1e-1\nnum_ranks: 1\nmax_steps: 1\n")
    ended = pyflyte("run", WORKFLOWS, "training_wf", "--hp", str(home.parent / "hp.yaml"), home=home)
    assert trained(ended)
    shutil.copytree(home, home.with_name("copy"))
    return ended, home


@pytest.fixture
def finished(trained_once: tuple[Ended, Path]) -> tuple[Files, Path]:
    """The outputs of that run, and its home, as they were when it ended."""
    ended, home = trained_once
    shutil.rmtree(home)
    shutil.copytree(home.with_name("copy"), home)
    return outputs(ended), home


def test_a_run_leaves_its_files_and_the_same_run_again_trains_nothing(
    trained_once: tuple[Ended, Path], tmp_path: Path
) -> None:
    """The table of files is aligned and names the folder once."""
    first, home = trained_once
    files, folder = outputs(first), run_folder(first)
    assert folder.parent == home / "runs"
    assert {path.parent for path in files.values()} == {folder}
    weights = torch.load(files["model_state"], weights_only=True)
    assert all(isinstance(tensor, torch.Tensor) for tensor in weights.values())
    sidecar = json.loads(files["sidecar"].read_text())
    assert sidecar["digests"]["weights"] == hashlib.sha256(files["model_state"].read_bytes()).hexdigest()
    assert (sidecar["num_ranks"], sidecar["num_nodes"]) == (1, 1)
    assert sidecar["hyperparameters"]["learning_rate"] == 0.1, "which YAML takes for text"
    records = [json.loads(line) for line in files["metrics"].read_text().splitlines()]
    assert [record["kind"] for record in records] == ["start", "train", "evaluation", "end"]
    assert f"epoch_accuracies=[{records[2]['test_accuracy']}]" in first.output
    table = first.output.rpartition("test accuracy")[2].partition("TrainingOutputs(")[0]
    headline, *rows = table.strip().splitlines()
    assert headline.endswith(f"written to {folder}")  # whole, as it is not below ROOT
    assert [row.split()[0] for row in rows] == [*OUTPUTS.values()]
    assert first.output.rindex(headline) > first.output.rindex("TrainingOutputs("), "what helps a person comes last"
    assert {re.match(r"  \S+ +", row).end() for row in rows} == {len("  metrics.jsonl  ")}  # type: ignore[union-attr]

    inputs = tmp_path / "inputs.json"
    inputs.write_text(json.dumps({"hp": TINY}))
    before = state(home / "runs")
    again = pyflyte("run", WORKFLOWS, "training_wf", "--inputs-file", str(inputs), home=home)
    assert outputs(again) == files
    assert not trained(again)
    assert state(home / "runs") == before


def test_what_was_deleted_is_made_again(finished: tuple[Files, Path]) -> None:
    files, home = finished
    for [path] in (home.glob(pattern) for pattern in ("runs/datasets/*/train_inputs.npy", "runs/*/model.pt")):
        path.unlink()
    again = train(TINY, home=home)
    assert outputs(again) == files
    assert len(list(home.glob("runs/datasets/*/*"))) == 6
    assert trained(again)


def test_a_run_that_flytes_cache_missed_is_not_made_again(finished: tuple[Files, Path]) -> None:
    """Its process was killed right after its end, so that only the run folder knows of it."""
    files, home = finished
    before = state(home / "runs")
    for path in home.iterdir():
        if path.name != "runs":
            shutil.rmtree(path)
    again = train(TINY, home=home)
    assert outputs(again) == files
    assert "is already finished; --overwrite-cache" in again.output
    assert state(home / "runs") == before
    again = pyflyte("run", "--overwrite-cache", WORKFLOWS, "training_wf", "--hp", json.dumps(TINY), home=home)
    assert outputs(again) == files
    assert "is already finished" not in again.output
    assert not [path for path in files.values() if path.stat().st_mtime_ns == before[str(path)][0]]


OWN_DATA = """
from pathlib import Path

import numpy as np

from flyte_ddp.datasets import image_arrays


def load(source):
    images = np.load(Path(source) / "images.npy")
    labels = np.arange(len(images)) % 2
    return image_arrays(images, labels, images[:6], labels[:6], ["even", "odd"])
"""

OWN_MODEL = """
import torch


def linear(num_classes, input_shape):
    channels, height, width = input_shape
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(channels * height * width, num_classes))
"""


def test_own_data_and_model_beside_the_user_retrain_when_they_change(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "own_data.py").write_text(OWN_DATA)
    hp = {"dataset": "own_data:load", "data_source": str(data), "model": "own_model:linear", **TINY}

    def run(level: int, source: str) -> Ended:
        np.save(data / "images.npy", np.full((20, 3, 4, 2), level, dtype=np.uint8))
        (tmp_path / "own_model.py").write_text(source)
        return train(hp, home=tmp_path / "home", directory=tmp_path)

    first = run(10, OWN_MODEL)
    sidecar = json.loads(outputs(first)["sidecar"].read_text())
    assert (sidecar["classes"], sidecar["input"]["channels"]) == (["even", "odd"], 2)
    changed, again = run(11, OWN_MODEL + "\nCHANGED = True\n"), run(10, OWN_MODEL)
    assert [trained(ended) for ended in (first, changed, again)] == [True, True, False]
    assert run_folder(changed) != run_folder(first) == run_folder(again)


def test_help_has_the_hyperparameters_in_columns(tmp_path: Path) -> None:
    """Each has a line that begins with its name; the schema of the console's form is not there."""
    file = str(Path(WORKFLOWS).with_name("release.py"))
    ended = pyflyte("run", file, "release_wf", "--help", home=tmp_path, COLUMNS="80")
    assert ended.exit_code == 0, ended.output
    assert '"properties"' not in ended.output
    beginnings = {line.split()[0] for line in ended.output.splitlines() if re.match("  [a-z]", line)}
    assert {*Hyperparameters.__dataclass_fields__, *Policy.__dataclass_fields__} <= beginnings
    assert max(map(len, ended.output.splitlines())) <= 80
    assert re.search(r"^ +.*\[0\.1\]$", ended.output, re.MULTILINE)
