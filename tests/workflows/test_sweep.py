"""What a user gets from ``pyflyte run workflows/sweep.py``, and from the command without Flyte."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgpack
import packaged
import pytest
from cli import ROOT, Ended, pyflyte, surroundings
from engine_rules import packed
from flyteidl.admin.task_pb2 import TaskSpec
from flyteidl.core.literals_pb2 import Literal, LiteralCollection
from packaged import Package
from pod import Cluster
from pod_inputs import SMOKE, TRAIN, Inputs

from flyte_ddp.config import Hyperparameters
from flyte_ddp.sweep.halving import TrialResult
from flyte_ddp.sweep.space import Sweep, draw_trials

pytestmark = pytest.mark.slow
SWEEP, RELEASE = str(ROOT / "workflows/sweep.py"), str(ROOT / "workflows/release.py")
HP = {"num_ranks": 1, "epochs": 1, "batch_size": 50}  # 27 steps
SPACE = {"learning_rate": {"from": 0.001, "to": 0.3, "log": True}, "optimizer": ["sgd", "adam"]}
TRIALS = {"space": SPACE, "trials": 3, "rungs": 2}


def files(runs: Path) -> dict[Path, int]:
    """When each file of a training, and each result of a rung, was written."""
    kept = [path for path in runs.glob("digits-*/**/*") if path.is_file()]
    return {path: path.stat().st_mtime_ns for path in [*kept, *runs.glob("sweeps/*/*.json")]}


def run_sweep(home: Path, **sweep: object) -> Ended:
    ended = pyflyte(
        "run", SWEEP, "sweep_wf", "--hp", json.dumps(HP), "--sweep", json.dumps({**TRIALS, **sweep}), home=home
    )
    assert ended.exit_code == 0, ended.output
    return ended


def made_in(output: str) -> Path:
    return ROOT / re.findall(r"sweep done; written to (\S+)", output)[-1]


def test_a_sweep_given_again_given_more_trials_and_released(tmp_path: Path) -> None:
    first = run_sweep(tmp_path)
    runs, folder = tmp_path / "runs", made_in(first.output)
    best = Hyperparameters.from_json((folder / "best.json").read_text())
    drawn = draw_trials(Sweep(**TRIALS), Hyperparameters(**HP), {})  # type: ignore[arg-type]
    assert best in drawn
    results = {path: json.loads(path.read_text()) for path in runs.glob("sweeps/*/*.json")}
    assert {part: sum(path.stem == part for path in results) for part in ("3", "1")} == {"3": 3, "1": 1}
    assert {(path.stem, found["step"]) for path, found in results.items()} == {("3", 9), ("1", 27)}
    before = files(runs)
    run_sweep(tmp_path)
    assert files(runs) == before, "nothing is trained again"

    run_sweep(tmp_path, trials=6)
    after = files(runs)
    assert sum(path.name == "3.json" for path in after) == 6
    assert {path: time for path, time in after.items() if path in results} == {path: before[path] for path in results}

    released = pyflyte(
        *("run", RELEASE, "release_wf", "--model_name", "best", "--policy", '{"export": "off"}'),
        *("--hp", str(folder / "best.json")),
        home=tmp_path,
    )
    assert released.exit_code == 0, released.output
    assert "promoted: there is no champion yet" in released.output
    [finished] = [path for path in results if path.stem == "1"]
    winner = hashlib.sha256((runs / finished.parent.name / "model.pt").read_bytes()).hexdigest()
    assert f"version='{winner}'" in released.output, "trained anew, to the same bits"
    after = files(runs)

    command = [sys.executable, "-m", "flyte_ddp.sweep", "hp.json", "sweep.json", "--output", "found"]
    (tmp_path / "hp.json").write_text(json.dumps(HP))
    (tmp_path / "sweep.json").write_text(json.dumps(TRIALS))
    environment = {**surroundings(tmp_path, runs), "PYTHONPATH": str(ROOT)}

    def run_command() -> None:
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr

    run_command()
    assert Hyperparameters.from_json((tmp_path / "found/best.json").read_text()) == best
    assert files(runs) == after, "the same trials"
    (tmp_path / "found/sweep.html").unlink()

    shutil.rmtree(runs / finished.parent.name)
    run_command()
    assert hashlib.sha256((runs / finished.parent.name / "model.pt").read_bytes()).hexdigest() == winner
    assert (tmp_path / "found/sweep.html").exists(), "though only the results were left"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), 'space="": must name a hyperparameter'),
        (("--sweep", '{"space": {"epoch": [1]}}'), "unknown hyperparameter in space 'epoch': did you mean 'epochs'?"),
        (("--sweep", '{"space": {"epochs": [0, 1]}}'), "space, epochs: epochs=0: must be at least 1"),
        (("--sweep", '{"space": {"epochs": [1]}}', "--hp", '{"validation_fraction": 0}'), "validation_fraction=0.0: a"),
    ],
)
def test_mistakes_are_refused(
    refusal: Callable[..., str], arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    assert said in refusal("sweep", "sweep_wf", *arguments)
    assert not [*(tmp_path / "runs").glob("*/model.pt")], "before any training"


def test_pods_of_rungs_are_training_pods_and_are_never_cached(default: Package) -> None:
    rung, training = (default.tasks[name].template for name in ("tasks.sweep.run_rung", "tasks.training.train_model"))
    assert not rung.metadata.discoverable
    assert packaged.variables(rung) == packaged.variables(training)


RUNG, RUN = "tasks.sweep.run_rung", "trial-of-a-sweep"


def test_a_trial_goes_on_in_the_pods_of_other_rungs(cluster: Cluster, train_inputs: Inputs) -> None:
    """And at last in the pod of the ordinary training, as no rung says that the run has a result."""
    hp = Hyperparameters(**{**SMOKE, "max_steps": 9})

    def run_rung(part: int, execution: str = "sweep") -> TrialResult:
        trial = packed(TrialResult(0, hp, RUN, part).to_dict())
        ended = cluster.run(RUNG, {"trial": trial, "data": train_inputs["data"]}, execution=execution)
        assert ended.outputs, ended.log
        return TrialResult.from_dict(msgpack.unpackb(ended.outputs["o0"].scalar.binary.value))

    first, second = run_rung(9), run_rung(3)
    assert (first.step, second.step, first.steps) == (1, 3, 9)
    assert second.value is not None
    assert run_rung(3, "another") == second, "seconds, too: it is stored"
    [stored] = cluster.server.folder.rglob(f"sweeps/{RUN}/9.json")
    stored.unlink()
    assert run_rung(9, "another").value == first.value, "though the checkpoint is beyond that rung"
    inputs = {**train_inputs, "hp": packed(hp.to_dict()), "run_version": packed(RUN)}
    trained = cluster.run(TRAIN, inputs, execution="sweep")
    assert trained.outputs, trained.log
    lines = cluster.stored(trained.outputs["metrics"].scalar.blob.uri).read_text().splitlines()
    starts = [record["resumed_after_step"] for record in map(json.loads, lines) if record["kind"] == "start"]
    assert starts == [0, 1, 3]


def test_a_cluster_is_given_rungs_that_may_lose_trials(cluster: Cluster, train_inputs: Inputs) -> None:
    inputs = {
        "hp": packed({**SMOKE, "max_steps": 0}),
        "sweep": packed({"space": json.dumps(SPACE), "trials": 9, "rungs": 3}),
        "data": train_inputs["data"],
        "data_version": packed("datasets/abc"),
    }
    ended = cluster.run("tasks.sweep.search", inputs)
    assert ended.subworkflow is not None, ended.log
    nodes = [node for node in ended.subworkflow.nodes if node.id != "start-node"]
    arrays = [node.array_node for node in nodes if node.HasField("array_node")]
    assert len(arrays) == 3
    assert {round(array.min_success_ratio, 6) for array in arrays} == {0.0001}
    assert len(nodes) == 3 + 4, "rungs, and what comes next"

    [template] = [task for task in ended.subworkflow.tasks if "map_run_rung" in task.id.name]
    mapped = replace(cluster, package=replace(cluster.package, tasks={"mapped": TaskSpec(template=template)}))
    hp = Hyperparameters(**{**SMOKE, "max_steps": 9})
    trials = [packed(TrialResult(number, hp, f"item-{number}", 9).to_dict()) for number in range(2)]
    inputs = {"trial": Literal(collection=LiteralCollection(literals=trials)), "data": train_inputs["data"]}
    item = mapped.run("mapped", inputs, environment={"BATCH_JOB_ARRAY_INDEX_VAR_NAME": "PLACE", "PLACE": "1"})
    assert item.outputs, item.log
    found = TrialResult.from_dict(msgpack.unpackb(item.outputs["o0"].scalar.binary.value))
    assert (found.trial, found.step, found.failed) == (1, 1, "")
