"""What a user gets from ``pyflyte run``: files that stay, a cache that is right, and short errors."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import re
import shutil
import socket
import struct
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli import ROOT, Ended, pyflyte

from flyte_ddp.config import Hyperparameters
from tasks.places import without_token
from tasks.preparation import check_inputs

WORKFLOWS = str(ROOT / "workflows/training.py")
TINY: dict[str, Any] = {"num_ranks": 1, "max_steps": 1}
OUTPUTS = {
    "model_state": "model.pt",
    "sidecar": "model.json",
    "report": "report.html",
    "metrics": "metrics.jsonl",
}
RESULTS = ("model.pt", "model.json", "report.html", "predictions*")  # patterns of what looks like a result


def train(hp: dict[str, Any], name: str = "training_wf", **options: Any) -> Ended:
    """``pyflyte run workflows/training.py NAME --hp '{...}'``."""
    return pyflyte("run", WORKFLOWS, name, "--hp", json.dumps(hp), **options)


def outputs(ended: Ended) -> dict[str, Path]:
    """The files that a run which must have succeeded printed as its outputs; all are there."""
    assert ended.exit_code == 0, ended.output
    line = ended.output[ended.output.rindex("TrainingOutputs(") :]
    paths = {name: Path(found) for name, found in re.findall(r"(\w+)=(/[^,)]+)", line)}
    assert {name: path.name for name, path in paths.items()} == OUTPUTS
    for path in paths.values():
        assert path.stat().st_size > 0, path
    return paths


def trained(ended: Ended) -> bool:
    """Whether this call trained; what comes from the cache makes no progress."""
    return "test accuracy" in ended.output


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """Time of change and size of every file."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


def assert_refused(ended: Ended, runs: Path, *words: str) -> None:
    """One panel that says all of ``words``, an exit code, and nothing that looks like a result."""
    assert ended.exit_code != 0, ended.output
    assert "Traceback" not in ended.output
    assert ended.panel, ended.output
    for word in words:
        assert word in ended.panel
    assert len(ended.panel) < 700
    assert not [path for pattern in RESULTS for path in runs.rglob(pattern)]


def test_start_up_imports_nothing_heavy() -> None:
    code = "import sys, workflows.training; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    heavy = {"torch", "torchvision", "wandb", "matplotlib", "sklearn", "ray", "dask", "distributed", "boto3"}
    assert not heavy & set(loaded.stdout.split())


# What is made, and when it is made again


@pytest.mark.slow
def test_a_run_leaves_its_files_and_the_same_run_again_trains_nothing(tmp_path: Path) -> None:
    first = pyflyte("run", WORKFLOWS, "training_wf", "--hp", "config/smoke.json", home=tmp_path)
    files = outputs(first)
    assert trained(first)
    folder = files["model_state"].parent
    assert folder.parent == tmp_path / "runs"
    assert {path.parent for path in files.values()} == {folder}
    weights = torch.load(files["model_state"], weights_only=True)
    assert all(isinstance(tensor, torch.Tensor) for tensor in weights.values())
    sidecar = json.loads(files["sidecar"].read_text())
    assert sidecar["digests"]["weights"] == hashlib.sha256(files["model_state"].read_bytes()).hexdigest()
    assert sidecar["num_ranks"] == 2
    records = [json.loads(line) for line in files["metrics"].read_text().splitlines()]
    assert [record["kind"] for record in records] == ["start", "train", "evaluation", "end"]
    assert f"epoch_accuracies=[{records[2]['test_accuracy']}]" in first.output
    assert "model.pt" in first.output.partition("TrainingOutputs(")[0]  # what was made and where, for people

    preset = json.loads((ROOT / "config/smoke.json").read_text())
    inputs = tmp_path / "inputs.json"
    inputs.write_text(json.dumps({"hp": preset}))
    before = state(tmp_path / "runs")
    spelt_out = train(preset, home=tmp_path)
    from_file = pyflyte("run", WORKFLOWS, "training_wf", "--inputs-file", str(inputs), home=tmp_path)
    for again in (spelt_out, from_file):
        assert outputs(again) == files
        assert not trained(again)
    assert state(tmp_path / "runs") == before

    changed = train({**preset, **TINY, "seed": 1}, home=tmp_path)
    assert trained(changed)
    assert outputs(changed)["model_state"].parent != folder
    assert state(folder) == {path: what for path, what in before.items() if path.startswith(f"{folder}/")}


@pytest.mark.slow
def test_what_was_deleted_is_made_again(tmp_path: Path) -> None:
    files = outputs(train(TINY, home=tmp_path))
    run, datasets = files["model_state"].parent, tmp_path / "runs/datasets"
    for lost in (files["metrics"], run, datasets):
        shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
        again = train(TINY, home=tmp_path)
        assert outputs(again) == files, lost
        assert len(list(datasets.glob("*/*"))) == 5, lost
        # Lost data are fetched again, and are the same: the model is still theirs.
        assert trained(again) == (lost != datasets), lost
    next(datasets.glob("*/train_images.npy")).unlink()
    other = train({**TINY, "seed": 1}, home=tmp_path)
    assert other.exit_code != 0
    assert "Traceback" not in other.output
    assert all(words in other.panel for words in (str(datasets), "train_images.npy", "delete it"))


@pytest.mark.slow
def test_each_clone_has_its_own_results_and_changed_sources_train_anew(tmp_path: Path) -> None:
    clones = [tmp_path / name for name in ("first", "second")]
    for clone in clones:
        for part in ("flyte_ddp", "tasks", "workflows"):
            shutil.copytree(ROOT / part, clone / part, ignore=shutil.ignore_patterns("__pycache__"))

    def run(clone: Path) -> Ended:
        arguments = ("run", "workflows/training.py", "training_wf", "--hp", json.dumps(TINY))
        own = {"FLYTE_DDP_RUNS": "", "PYTHONPATH": str(clone)}
        return pyflyte(*arguments, home=tmp_path / "home", directory=clone, **own)

    for clone in clones:
        ended = run(clone)
        assert trained(ended)
        assert {path.parents[1] for path in outputs(ended).values()} == {clone / "runs"}
    source = clones[0] / "flyte_ddp/evaluate.py"
    source.write_text(source.read_text().replace('"""', "'''", 2))  # of the same length
    before = state(clones[0] / "runs")
    changed = run(clones[0])
    assert trained(changed)
    assert outputs(changed)["model_state"].parent.name not in {Path(path).parent.name for path in before}
    unchanged = run(clones[1])
    assert not trained(unchanged)
    assert outputs(unchanged)["model_state"].is_relative_to(clones[1])


def write_mnist(folder: Path, seed: int) -> None:
    """A mirror with 40 and 10 random images of 8x8 in MNIST's format, under MNIST's names, and their digests."""
    random = np.random.default_rng(seed)
    sums = []
    folder.mkdir(exist_ok=True)
    for part, count in (("train", 40), ("t10k", 10)):
        for kind, shape, high in (("images-idx3", (count, 8, 8), 256), ("labels-idx1", (count,), 10)):
            array = random.integers(0, high, shape, dtype=np.uint8)
            header = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape)
            content = gzip.compress(header + array.tobytes(), mtime=0)
            name = f"{part}-{kind}-ubyte.gz"
            (folder / name).write_bytes(content)
            sums.append(f"{hashlib.sha256(content).hexdigest()}  {name}\n")
    (folder / "SHA256SUMS").write_text("".join(sums))


@pytest.mark.slow
def test_changed_data_behind_the_same_address_train_anew(tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    hp = {**TINY, "dataset": "mnist", "data_source": str(mirror), "batch_size": 8, "epochs": 1}
    digests = []
    for seed in (0, 1):
        write_mnist(mirror, seed)
        ended = train(hp, home=tmp_path)
        assert trained(ended), seed
        digests.append(json.loads(outputs(ended)["sidecar"].read_text())["digests"]["data"])
    assert digests[0] != digests[1]
    write_mnist(mirror, 0)  # and back
    back = train(hp, home=tmp_path)
    assert not trained(back)
    assert json.loads(outputs(back)["sidecar"].read_text())["digests"]["data"] == digests[0]


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


@pytest.mark.slow
def test_own_data_and_model_beside_the_user_train_anew_when_they_change(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "own_data.py").write_text(OWN_DATA)
    hp = {"dataset": "own_data:load", "data_source": str(data), "model": "own_model:linear", **TINY}

    def run(level: int, source: str) -> Ended:
        np.save(data / "images.npy", np.full((20, 3, 4, 2), level, dtype=np.uint8))
        (tmp_path / "own_model.py").write_text(source)
        return train(hp, home=tmp_path / "home", directory=tmp_path)

    first = run(10, OWN_MODEL)
    assert trained(first)
    sidecar = json.loads(outputs(first)["sidecar"].read_text())
    assert sidecar["classes"] == ["even", "odd"]
    assert sidecar["input"]["channels"] == 2
    assert not trained(run(10, OWN_MODEL))
    seen = {outputs(first)["model_state"]}
    for level, source in ((11, OWN_MODEL), (10, OWN_MODEL + "\n# changed\n")):
        ended = run(level, source)
        assert trained(ended)
        assert outputs(ended)["model_state"] not in seen
        seen.add(outputs(ended)["model_state"])


@pytest.mark.slow
def test_launch_plans_by_name(tmp_path: Path) -> None:
    on_demand = train(TINY, name="training_on_demand", home=tmp_path)
    assert trained(on_demand)
    on_change = train(TINY, name="retraining_on_change", home=tmp_path)
    assert not trained(on_change)
    assert outputs(on_change) == outputs(on_demand)
    nights = [train(TINY, name="nightly_retraining", home=tmp_path) for _ in range(2)]
    assert all(trained(night) for night in nights)
    folders = [outputs(ended)["model_state"].parent for ended in (on_demand, *nights)]
    assert len(set(folders)) == 3


def test_a_retry_of_one_tick_is_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYTE_DDP_RUNS", str(tmp_path))
    moments = [datetime(2030, 1, day, 3, tzinfo=timezone.utc) for day in (2, 2, 3)]
    versions = [check_inputs(hp=Hyperparameters(), kickoff_time=moment).run_version for moment in moments]
    first, retry, next_night = (without_token(version) for version in versions)
    assert first == retry != next_night


# Bad input that only comes to light in a task


def also(*values: Any) -> Any:
    """A case that takes its two seconds in the full run only."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"dataset": "no_such_package.data:load"}, ("no_such_package", "install it")),
        ({"dataset": "mnist", "data_source": "no/such/mirror"}, ("'no/such/mirror'", "no such directory")),
        ({"batch_size": 3, "num_ranks": 2, "accumulation_steps": 2}, ("batch_size=3", "at least", "raise batch_size")),
        also({"dataset": "json:no_such_callable"}, ("json", "no_such_callable")),
        also({"dataset": "a:b:c"}, ("'a:b:c'", "package.module:callable")),
        also({"model": "no_such_package:Net"}, ("no_such_package", "install it")),
        also({"init_from": "no/such/weights.pt"}, ("no/such/weights.pt", "no such file")),
        also({"dataset": "mnist", "data_source": "ftp://host/mnist"}, ("'ftp://host/mnist'", "https://")),
        also({"backend": "nccl"}, ("backend='nccl'", "none is visible", "gloo")),
    ],
)
def test_bad_hyperparameters_that_a_task_finds(values: dict[str, Any], words: tuple[str, ...], tmp_path: Path) -> None:
    assert_refused(train(values, home=tmp_path), tmp_path, *words)


def test_more_ranks_than_the_pod_has_gpus(tmp_path: Path) -> None:
    ended = train({"num_ranks": 4}, home=tmp_path, FLYTE_DDP_GPUS="2")
    assert_refused(ended, tmp_path, "num_ranks=4", "2 GPU(s)", "set num_ranks to at most 2")


def test_fewer_gpus_than_the_pod_was_given(tmp_path: Path) -> None:
    ended = train({}, home=tmp_path, FLYTE_DDP_GPUS="1", CUDA_VISIBLE_DEVICES="")
    assert_refused(ended, tmp_path, "0 GPU(s) visible", "1 requested")


def test_bf16_where_there_is_none(tmp_path: Path) -> None:
    patch = "import flyte_ddp.hardware\nflyte_ddp.hardware.cpu_has_bf16 = lambda: False\n"
    (tmp_path / "sitecustomize.py").write_text(patch)
    hp = {"precision": "bf16", "backend": "gloo"}
    ended = train(hp, home=tmp_path / "home", PYTHONPATH=str(tmp_path))
    assert_refused(ended, tmp_path, "precision='bf16'", "no bf16", "precision='fp32' or 'auto'")


def test_hyperparameters_that_are_no_json(tmp_path: Path) -> None:
    ended = pyflyte("run", WORKFLOWS, "training_wf", "--hp", "{'epochs': 3}", home=tmp_path)
    assert_refused(ended, tmp_path, "--hp", "valid json object")


FASHION = Path("/usr/share/datasets/fashion-mnist")
LABELS = "train-labels-idx1-ubyte.gz"


def altered(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.skipif(not FASHION.is_dir(), reason="needs Debian's package dataset-fashion-mnist")
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("altered", (LABELS, "damaged or altered", "copy it again")),
        also("truncated", (LABELS, "damaged or altered", "copy it again")),
        also("missing", (LABELS, "no such file", "must hold")),
        also("empty", (LABELS, "no such file", "must hold")),
    ],
)
def test_a_damaged_data_set(damage: str, words: tuple[str, ...], tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    for file in sorted(FASHION.iterdir()) if damage != "empty" else ():
        (mirror / file.name).symlink_to(file)
    labels = mirror / LABELS
    labels.unlink(missing_ok=True)
    if damage in ("truncated", "altered"):
        content = (FASHION / LABELS).read_bytes()
        labels.write_bytes(altered(content) if damage == "altered" else content[: len(content) // 2])
    ended = train({"dataset": "fashion_mnist", "data_source": str(mirror)}, home=tmp_path / "home")
    assert_refused(ended, tmp_path / "home", str(mirror), *words)
    assert not list(tmp_path.glob("home/runs/datasets/*/*"))


@pytest.mark.slow
def test_a_mirror_that_is_not_reachable(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # taken, so that nobody else can listen there, and not listened on
        mirror = f"http://127.0.0.1:{closed.getsockname()[1]}/mnist"
        ended = train({"dataset": "mnist", "data_source": mirror}, home=tmp_path)
    assert_refused(ended, tmp_path, mirror, "Connection refused", "check the address")


@pytest.mark.slow
def test_a_model_whose_output_does_not_fit(tmp_path: Path) -> None:
    """It is the user's own, in the working directory, from which both ranks import it."""
    (tmp_path / "own_model.py").write_text(OWN_MODEL.replace("width, num_classes)", "width, num_classes + 1)"))
    hp = {"model": "own_model:linear", "num_ranks": 2, "batch_size": 64}
    ended = train(hp, home=tmp_path / "home", directory=tmp_path)
    assert_refused(ended, tmp_path, "'own_model:linear'", "(32, 11)", "(32, 10)", "num_classes")


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_loss_that_is_not_finite(num_ranks: int, tmp_path: Path) -> None:
    hp = {"learning_rate": 1000, "schedule": "constant", "epochs": 20, "num_ranks": num_ranks}
    ended = train(hp, home=tmp_path)
    assert_refused(ended, tmp_path, "training loss is", "must be finite", "lower learning_rate (now 1000)")
    found = re.search(r"loss is (\S+) at epoch (\d+), step (\d+)", ended.panel)
    assert found
    assert not math.isfinite(float(found[1]))


def test_a_file_in_place_of_the_runs_folder(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.write_text("not a folder")
    ended = train(TINY, home=tmp_path)
    assert_refused(ended, tmp_path, str(runs), "FLYTE_DDP_RUNS")
    assert runs.read_text() == "not a folder"


def on_a_disk(options: str, folder: Path, after: str = ":") -> tuple[str, ...]:
    """A command that starts another one with ``folder`` on a file system of its own."""
    script = f'mount -t tmpfs -o {options} tmpfs "{folder}" && "$@"; code=$?; {after}; exit $code'
    return ("unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh")


def can_mount(folder: Path) -> bool:
    try:
        subprocess.run([*on_a_disk("size=64k", folder), "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


@pytest.mark.parametrize(
    ("size", "words"),
    [
        pytest.param("60k", "disk is full", id="at the data"),
        pytest.param("210k", "No space left", marks=pytest.mark.slow, id="at the model"),
        pytest.param("300k", "No space left", marks=pytest.mark.slow, id="at the report"),
    ],
)
def test_a_full_disk(size: str, words: str, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    if not can_mount(runs):
        pytest.skip("needs the right to mount")
    # What is left on that disk can be seen from inside only.
    wrapper = on_a_disk(f"size={size}", runs, after=f'echo "LEFT:"; find "{runs}" -type f')
    ended = train(TINY, home=tmp_path, wrapper=wrapper)
    assert_refused(ended, tmp_path, str(runs), words, "free some space")
    left = {path.rpartition("/")[2] for path in ended.output.partition("LEFT:")[2].split()}
    assert not [name for name in left if re.search(r"model\.|report|predictions|tmp", name)], left


def test_a_read_only_runs_folder(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    if not can_mount(runs):
        pytest.skip("needs the right to mount")
    ended = train(TINY, home=tmp_path, wrapper=on_a_disk("ro", runs))
    assert_refused(ended, tmp_path, str(runs), "Read-only file system", "FLYTE_DDP_RUNS")
