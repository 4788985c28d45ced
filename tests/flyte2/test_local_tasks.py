"""Each task of Flyte 2 by ``flyte run --local``, and one registry that both fronts use."""

import csv
import hashlib
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
from cli import ROOT, Ended, pyflyte
from encoded_runs import labelled
from flyte2_cli import Flyte2Ended, run_task

from flyte_ddp.config import Hyperparameters
from flyte_ddp.sweep.space import Sweep, draw_trials

pytestmark = pytest.mark.slow
HP = {"num_ranks": 1, "epochs": 3}
POLICY = {"export": "off"}


def read_released(ended: Ended) -> dict[str, str]:
    """Return version, champion and outcome, which both fronts print alike."""
    assert ended.exit_code == 0, ended.output
    line = ended.output[ended.output.rindex("Released(") :]
    return {name: found for name, _, found in re.findall(r"""(version|champion|outcome)=(['"])(.*?)\2""", line)}


@pytest.mark.flytekit
def test_one_registry_for_both_fronts(tmp_path: Path) -> None:
    """Flyte 2 releases. One front promotes and the other rolls back, and Flyte 2 evaluates, predicts and monitors."""
    runs = tmp_path / "runs"

    def run(file: str, task: str, **inputs: Any) -> Flyte2Ended:
        ended = run_task(file, task, tmp_path, model_name="digits", **inputs)
        assert ended.exit_code == 0, ended.output
        return ended

    def run_pyflyte(workflow: str, **inputs: str) -> Ended:
        words = [word for name, value in inputs.items() for word in (f"--{name}", value)]
        file = str(ROOT / "workflows/release.py")
        return pyflyte("run", file, workflow, "--model_name", "digits", *words, home=tmp_path)

    first = read_released(run("release", "release", hp=HP, policy=POLICY))
    [trained] = runs.glob("digits-*/model.pt")
    assert first["version"] == first["champion"] == hashlib.sha256(trained.read_bytes()).hexdigest()
    assert first["outcome"].startswith("promoted: there is no champion yet")
    worse = read_released(run("release", "release", hp={"num_ranks": 1, "max_steps": 1}, policy=POLICY))
    assert worse["champion"] == first["version"] != worse["version"]
    assert worse["outcome"].startswith("kept: ")

    version = worse["version"][:12]
    by_1 = read_released(run_pyflyte("promote_wf", version=version, reason="a"))
    back_by_2 = read_released(run("release", "rollback", reason="b"))
    by_2 = read_released(run("release", "promote", version=version, reason="c"))
    back_by_1 = read_released(run_pyflyte("rollback_wf", reason="d"))
    champions = [released["champion"] for released in (by_1, back_by_2, by_2, back_by_1)]
    assert champions == [worse["version"], first["version"]] * 2
    log = [json.loads(entry.read_text()) for entry in sorted((runs / "registry/digits/log").iterdir())]
    assert [entry["action"] for entry in log] == ["promote", "promote", "rollback", "promote", "rollback"]
    assert [entry["reason"] for entry in log[1:]] == ["a", "b", "c", "d"]
    assert len({entry["by"] for entry in log}) == 1, "the same user"

    judged = run("release", "evaluate", version=version.upper(), dataset="digits")
    assert "Judged(promotes=False, " in judged.outputs
    [page] = re.findall(r"written to (\S+verdicts\S+)", judged.output)
    assert "Only the challenger is right" in (ROOT / page / "verdict.html").read_text()

    predicted = run("prediction", "predict", dataset="digits")
    [table] = runs.glob("predictions-*/predictions.csv")
    assert f"Predictions(table=File(path='{table}'" in predicted.outputs
    with table.open() as file:
        rows = [*csv.DictReader(file)]
    right = sum(row["truth"] == row["prediction"] for row in rows) / len(rows)
    sidecar = json.loads(trained.with_name("model.json").read_text())
    assert (len(rows), right) == (297, pytest.approx(sidecar["metrics"]["test_accuracy"]))

    watched = run("monitor", "monitor", window={"dataset": "digits"})
    [window] = (runs / "registry/digits/monitor").glob("*/*.json")
    assert not json.loads(window.read_text())["alarm"]
    assert "window 1, no alarm: no column has moved; written to " in watched.output
    [pages] = runs.glob("windows-*")
    assert {path.name for path in pages.iterdir()} == {"window.html", "window.csv", "reference.csv"}
    assert not [*runs.glob("*/*.ckpt")]


def test_a_sweep_trains_its_trials_and_the_best_to_the_end(tmp_path: Path) -> None:
    hp = {"num_ranks": 1, "epochs": 1, "batch_size": 50}
    space = {"space": {"optimizer": ["sgd", "adam"]}, "trials": 2, "rungs": 2}
    ended = run_task("sweep", "sweep", tmp_path, hp=hp, sweep=space)
    assert ended.exit_code == 0, ended.output
    [best] = (tmp_path / "runs").glob("sweep-*/best.json")
    assert best.with_name("sweep.html").exists()
    results = [json.loads(path.read_text()) for path in (tmp_path / "runs/sweeps").glob("*/*.json")]
    assert sorted(found["step"] for found in results) == [9, 9, 27]
    found = Hyperparameters.from_json(best.read_text())
    assert found in draw_trials(
        Sweep.from_dict({**space, "space": json.dumps(space["space"])}), Hyperparameters(**hp), {}
    )
    assert f"optimizer='{found.optimizer}'" in ended.outputs
    [model] = re.findall(r"model_state=File\(path='([^']+)'", ended.outputs)
    assert (
        json.loads(Path(model).with_name("model.json").read_text())["hyperparameters"]["optimizer"] == found.optimizer
    )


def test_images_are_packed_and_the_shards_are_verified(tmp_path: Path) -> None:
    source = labelled(tmp_path / "images", 12)
    ended = run_task("shards", "pack_and_verify", tmp_path, source=source, samples_per_shard=5)
    [index] = (tmp_path / "runs").glob("shards-*/train.json")
    assert f"PackedShards(shards=Dir(path='{index.parent}'" in ended.outputs
    assert f"dataset='shards:{index}')" in ended.outputs
    packed = []
    for shard in index.parent.glob("*.tar"):
        with tarfile.open(shard) as tar:
            contents = [tar.extractfile(member).read() for member in tar if member.name.endswith(".jpg")]  # type: ignore[union-attr]
        packed += contents
    assert sorted(packed) == sorted(path.read_bytes() for path in source.rglob("*.jpg"))
    assert len([*index.parent.glob("*.tar")]) == 3
