"""Packaged tasks, run the way pods run them, give what a local run gives and fail as a user's mistake should."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import packaged
import pytest
import torch
from cli import pyflyte
from engine_rules import resolved, value_of
from flyteidl.core.errors_pb2 import ContainerError
from flyteidl.core.execution_pb2 import ExecutionError
from flyteidl.core.literals_pb2 import Literal
from pod import BUCKET, DEADLINE, Cluster, PodEnded, unpacked
from s3_server import s3_server

from benchmarks.running import descendants, process_name
from flyte_ddp.code_digest import library_digest
from flyte_ddp.config import Hyperparameters
from flyte_ddp.run import run_training
from flyte_ddp.settings import Settings

pytestmark = pytest.mark.slow

CHECK, FETCH = "tasks.preparation.check_inputs", "tasks.preparation.fetch_dataset"
TRAIN, PREDICT = "tasks.training.train_model", "tasks.prediction.predict_images"
ELASTIC = "tasks.elastic_training.train_on_elastic"
DASK = "tasks.dask_training.train_on_dask"
SMOKE: dict[str, Any] = {"dataset": "digits", "epochs": 1, "max_steps": 8, "num_ranks": 2}
FASHION = Path("/usr/share/datasets/fashion-mnist")
VERSION = "0.0.0+package"  # of the packaged library, to tell it from the one that is installed here


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The project as it is here, but for the library's version, packaged for a cluster without GPUs."""
    folder = tmp_path_factory.mktemp("cluster")
    project = folder / "project"
    packaged.copy_project(project)
    (project / "flyte_ddp/__init__.py").write_text(f'__version__ = "{VERSION}"\n')
    archive = folder / "package.tgz"
    arguments = ("--pkgs", "workflows", "package", "--image", "flyte-ddp:test", "--copy", "all")
    home, environment = folder / "home", {"FLYTE_DDP_PROFILE": "sandbox", "WANDB_MODE": "offline"}
    ended = pyflyte(*arguments, "--output", str(archive), home=home, directory=project, **environment)
    assert ended.exit_code == 0, ended.output
    (folder / "store/flyte").mkdir(parents=True)
    with s3_server(folder / "store") as server:
        yield Cluster(packaged.read(archive, folder / "package"), server, folder)


def text(value: str) -> Literal:
    literal = Literal()
    literal.scalar.primitive.string_value = value
    return literal


def from_workflow(hp: dict[str, Any]) -> Literal:
    """Hyperparameters as one task hands them to the next."""
    literal = Literal()
    literal.scalar.binary.value = msgpack.packb(hp)
    literal.scalar.binary.tag = "msgpack"
    return literal


def from_console(hp: dict[str, Any]) -> Literal:
    """Hyperparameters as the console's form sends them."""
    literal = Literal()
    literal.scalar.generic.update(hp)
    return literal


def check_inputs(cluster: Cluster, hp: Literal) -> dict[str, Literal]:
    """Inputs of the first task, with what the workflow itself gives it."""
    nodes = cluster.package.workflows["workflows.training.training_wf"].template.nodes
    [node] = [node for node in nodes if node.task_node.reference_id.name == CHECK]
    bound = {binding.var: binding.binding for binding in node.inputs}
    assert set(bound) == {"hp", "kickoff_time", "engine"}
    return {"hp": hp, **{name: Literal(scalar=bound[name].scalar) for name in ("kickoff_time", "engine")}}


@pytest.fixture(scope="module")
def checked(cluster: Cluster) -> PodEnded:
    return cluster.run(CHECK, check_inputs(cluster, from_console(SMOKE)))


@pytest.fixture(scope="module")
def train_inputs(cluster: Cluster, checked: PodEnded) -> dict[str, Literal]:
    assert checked.outputs, checked.log
    [check, train] = cluster.package.workflows["workflows.training.training_wf"].template.nodes
    return resolved(train.inputs, {check.id: checked.outputs})


@pytest.fixture(scope="module")
def trained(cluster: Cluster, train_inputs: dict[str, Literal]) -> PodEnded:
    return cluster.run(TRAIN, train_inputs)


def refused(ended: PodEnded) -> str:
    """The message of a pod that failed by a user's mistake: not tried again, and without outputs."""
    assert ended.error is not None, ended.log
    assert ended.outputs is None
    assert ended.error.kind == ContainerError.NON_RECOVERABLE
    assert ended.error.origin == ExecutionError.USER
    assert ended.error.code.partition(":")[0] == "USER"
    message: str = ended.error.message
    return message


def test_the_cache_version_is_that_of_the_sources_sent(cluster: Cluster, tmp_path: Path) -> None:
    digest = library_digest(unpacked(cluster.package, tmp_path) / "flyte_ddp")
    assert digest != library_digest()
    for name in (FETCH, TRAIN):
        task = cluster.package.tasks[name].template
        assert task.metadata.discovery_version == digest
        assert {pair.key: pair.value for pair in task.container.env}["FLYTE_DDP_CODE"] == digest


def test_the_first_task_identifies_the_run_and_prepares_what_is_here(cluster: Cluster, checked: PodEnded) -> None:
    assert checked.exit_code == 0
    assert checked.error is None
    assert checked.outputs, checked.log
    run = checked.outputs["run_version"].scalar.primitive.string_value
    assert run.startswith("digits-small_cnn-")
    assert "@" not in run, "tokens are for local runs"
    folder = cluster.stored(checked.outputs["data"].scalar.blob.uri)
    assert np.load(folder / "train_images.npy").shape[1:] == (8, 8, 1)
    assert len(np.load(folder / "train_labels.npy")) + len(np.load(folder / "test_labels.npy")) == 1797


def test_the_page_of_the_first_task_says_what_is_trained(checked: PodEnded) -> None:
    assert checked.deck is not None, checked.log
    assert "1,500, of which 150 are for validation" in checked.deck
    assert len(checked.deck) < 300_000


@pytest.mark.skipif(not FASHION.is_dir(), reason="needs Debian's package dataset-fashion-mnist")
def test_what_is_downloaded_is_for_a_task_of_its_own(cluster: Cluster) -> None:
    hp = {"dataset": "fashion_mnist", "data_source": str(FASHION)}
    checked = cluster.run(CHECK, check_inputs(cluster, from_console(hp)))
    assert checked.outputs is None
    assert checked.subworkflow, checked.log
    [node] = checked.subworkflow.nodes
    assert node.task_node.reference_id.name == FETCH
    given = {
        binding.var: value_of(binding.binding, {}) for binding in checked.subworkflow.outputs if binding.var != "data"
    }
    assert msgpack.unpackb(given["hp"].scalar.binary.value) == Hyperparameters(**hp).to_dict()
    [template] = checked.subworkflow.tasks
    registered = cluster.package.tasks[FETCH].template
    assert template.metadata == registered.metadata
    assert template.container.resources == registered.container.resources
    fetched = cluster.run(FETCH, resolved(node.inputs, {}))
    assert fetched.outputs, fetched.log
    folder = cluster.stored(fetched.outputs["o0"].scalar.blob.uri)
    assert len(np.load(folder / "train_labels.npy")) == 60_000


def cache_key(cluster: Cluster, checked: PodEnded) -> dict[str, bytes]:
    """The inputs of training that Flyte's cache looks at."""
    assert checked.outputs, checked.log
    [check, train] = cluster.package.workflows["workflows.training.training_wf"].template.nodes
    ignored = cluster.package.tasks[TRAIN].template.metadata.cache_ignore_input_vars
    found = resolved(train.inputs, {check.id: checked.outputs})
    return {name: literal.SerializeToString() for name, literal in found.items() if name not in ignored}


def test_the_same_hyperparameters_are_the_same_to_the_cache(cluster: Cluster, checked: PodEnded) -> None:
    whole = Hyperparameters(**SMOKE).to_dict()
    forms = [from_workflow(SMOKE), from_workflow(whole), from_console(whole), from_workflow({**SMOKE, "epochs": 1.0})]
    expected = cache_key(cluster, checked)
    assert expected.keys() == {"hp", "run_version"}
    for form in forms:
        assert cache_key(cluster, cluster.run(CHECK, check_inputs(cluster, form))) == expected


def test_training_leaves_a_usable_model(cluster: Cluster, trained: PodEnded) -> None:
    assert trained.exit_code == 0, trained.log
    assert trained.outputs, trained.log
    stored = {
        name: cluster.stored(trained.outputs[name].scalar.blob.uri)
        for name in ("model_state", "sidecar", "report", "metrics")
    }
    sidecar = json.loads(stored["sidecar"].read_text())
    assert sidecar["versions"]["flyte_ddp"] == VERSION, "a rank imported another library than the one that was sent"
    assert sidecar["num_ranks"] == 2
    [accuracy] = trained.outputs["epoch_accuracies"].collection.literals
    assert accuracy.scalar.primitive.float_value == sidecar["metrics"]["test_accuracy"]
    weights = stored["model_state"].read_bytes()
    assert hashlib.sha256(weights).hexdigest() == sidecar["digests"]["weights"]
    state = torch.load(io.BytesIO(weights), weights_only=True)
    assert all(isinstance(tensor, torch.Tensor) and tensor.isfinite().all() for tensor in state.values())
    assert not [name for name in state if name.startswith("module.")]
    records = [json.loads(line) for line in stored["metrics"].read_text().splitlines()]
    assert (records[0]["kind"], records[-1]["kind"]) == ("start", "end")
    assert stored["report"].read_text().startswith("<!doctype html>")


def test_what_wandb_could_not_be_sent_is_kept(cluster: Cluster, trained: PodEnded) -> None:
    [said] = re.findall(r"wandb: kept offline.*; send it with: wandb sync (\S+), which you find in (\S+)", trained.log)
    name, address = said
    [file] = cluster.stored(f"{address}/{name}").glob("*.wandb")
    assert file.stat().st_size > 1000


def test_the_deck_holds_the_report(cluster: Cluster, trained: PodEnded) -> None:
    assert trained.outputs, trained.log
    assert trained.deck is not None
    report = cluster.stored(trained.outputs["report"].scalar.blob.uri).read_text()
    assert report in trained.deck


def test_the_model_predicts(cluster: Cluster, trained: PodEnded) -> None:
    assert trained.outputs, trained.log
    plan = cluster.package.launch_plans["workflows.prediction.predict_wf"]
    defaults = {name: each.default for name, each in plan.spec.default_inputs.parameters.items() if not each.required}
    model = {name: trained.outputs[name] for name in ("model_state", "sidecar")}
    ended = cluster.run(PREDICT, {**defaults, **model, "dataset": text("digits")})
    assert ended.outputs, ended.log
    with cluster.stored(ended.outputs["table"].scalar.blob.uri).open() as file:
        rows = list(csv.DictReader(file))
    correct = sum(row["prediction"] == row["truth"] for row in rows) / len(rows)
    assert ended.deck is not None
    assert f"{100 * correct:.2f}" in ended.deck
    assert ended.deck.count("data:image/png") == 24
    assert len(ended.deck) < 300_000
    sidecar = json.loads(cluster.stored(trained.outputs["sidecar"].scalar.blob.uri).read_text())
    assert correct == pytest.approx(sidecar["metrics"]["test_accuracy"])


@pytest.mark.parametrize(
    ("task", "encoded", "values", "message"),
    [
        (CHECK, from_workflow, {"learning_rat": 0.1}, "unknown hyperparameter 'learning_rat': did you mean 'learning_"),
        (CHECK, from_console, {"epochs": "4"}, "epochs='4': must be a whole number"),
        (TRAIN, from_console, {"learning_rate": "1e-1"}, "learning_rate='1e-1': must be a finite number"),
        (ELASTIC, from_workflow, {"keep": "ema"}, "keep='ema': there is no moving average"),
        (DASK, from_workflow, {"epochs": 0}, "epochs=0: must be at least 1"),
    ],
)
def test_bad_hyperparameters_are_the_users_mistake(
    cluster: Cluster, train_inputs: dict[str, Literal], task: str, encoded: Any, values: dict[str, Any], message: str
) -> None:
    hp = encoded({**SMOKE, **values})
    ended = cluster.run(task, check_inputs(cluster, hp) if task == CHECK else {**train_inputs, "hp": hp})
    assert message in refused(ended)


def test_other_inputs_that_cannot_be_read_are_the_systems_fault(
    cluster: Cluster, train_inputs: dict[str, Literal]
) -> None:
    error = cluster.run(TRAIN, {**train_inputs, "run_version": from_workflow(SMOKE)}).error
    assert error is not None
    assert error.origin == ExecutionError.SYSTEM


def test_a_loss_that_is_not_finite_is_the_users_mistake(cluster: Cluster, train_inputs: dict[str, Literal]) -> None:
    hp = {**SMOKE, "learning_rate": 1000.0, "schedule": "constant", "max_steps": 0}
    ended = cluster.run(TRAIN, {**train_inputs, "hp": from_workflow(hp), "run_version": text("not-finite")})
    message = refused(ended)
    assert ended.deck is not None
    assert "This attempt has failed" in ended.deck
    assert "the loss is" in message
    assert "lower learning_rate (now 1000)" in message


def test_a_pod_with_other_gpus_than_requested_names_both_numbers(
    cluster: Cluster, train_inputs: dict[str, Literal]
) -> None:
    environment = {"FLYTE_DDP_GPUS": "2", "CUDA_VISIBLE_DEVICES": ""}
    message = refused(cluster.run(TRAIN, train_inputs, environment=environment))
    assert "0 GPU(s) visible but 2 requested" in message


def test_an_image_with_another_library_is_refused(
    cluster: Cluster, train_inputs: dict[str, Literal], tmp_path: Path
) -> None:
    image = unpacked(cluster.package, tmp_path / "image")
    (image / "flyte_ddp/__init__.py").write_text('__version__ = "stale"\n')
    message = refused(cluster.run(TRAIN, train_inputs, image=image))
    assert f"this pod runs library sources {library_digest(image / 'flyte_ddp')}" in message


LONG = {**SMOKE, "epochs": 25, "max_steps": 0, "batch_size": 64}


def wait_for_another_checkpoint(process: subprocess.Popen[bytes], checkpoints: Path) -> None:
    """Until there is one in the blob store that was not there before."""
    before, deadline = {*checkpoints.rglob("saved-*")}, time.monotonic() + DEADLINE
    while not {*checkpoints.rglob("saved-*")} - before and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


def kill_a_rank(process: subprocess.Popen[bytes], checkpoints: Path) -> None:
    """What the kernel does where a pod runs out of memory: the largest process is a rank, not the task's own."""
    wait_for_another_checkpoint(process, checkpoints)
    ranks = [pid for pid in descendants(process.pid) if re.fullmatch(r"rank \d+", process_name(pid))]
    os.kill(ranks[-1], signal.SIGKILL)


def take_the_pod_away(process: subprocess.Popen[bytes], checkpoints: Path) -> None:
    """What Kubernetes does when it takes the node away."""
    wait_for_another_checkpoint(process, checkpoints)
    process.terminate()


def kill_the_pod(process: subprocess.Popen[bytes], checkpoints: Path) -> None:
    """What is left then is what was sent before."""
    wait_for_another_checkpoint(process, checkpoints)
    os.killpg(process.pid, signal.SIGKILL)


def kill_before_it_begins(process: subprocess.Popen[bytes], _: Path) -> None:
    """It has not even looked for a checkpoint."""
    os.killpg(process.pid, signal.SIGKILL)


def kill_as_it_begins(process: subprocess.Popen[bytes], checkpoints: Path) -> None:
    """It has taken up a checkpoint, and its ranks are about to meet."""
    before, deadline = {*checkpoints.rglob("started-*")}, time.monotonic() + DEADLINE
    while not {*checkpoints.rglob("started-*")} - before and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)


def resumed(cluster: Cluster, ended: PodEnded) -> list[int]:
    """After which steps the attempts at a run began."""
    assert ended.outputs, ended.log
    lines = cluster.stored(ended.outputs["metrics"].scalar.blob.uri).read_text().splitlines()
    return [record["resumed_after_step"] for record in map(json.loads, lines) if record["kind"] == "start"]


@pytest.mark.parametrize(("task", "ranks"), [(TRAIN, 2), (ELASTIC, 1)])  # the profile has one CPU
def test_attempts_that_are_cut_off_lose_nothing(
    cluster: Cluster, train_inputs: dict[str, Literal], tmp_path: Path, task: str, ranks: int
) -> None:
    """Nor does another execution of the same inputs, after one that was aborted."""
    hp = {**LONG, "num_ranks": ranks}
    inputs = {**train_inputs, "hp": from_workflow(hp), "run_version": text(f"run-of-{ranks}")}
    first = cluster.run(task, inputs, execution="aborted", during=kill_a_rank)
    second = cluster.run(task, inputs, execution="aborted", attempt=1, during=take_the_pod_away)
    for ended, words in ((first, "was killed by SIGKILL"), (second, "stopped by SIGTERM")):
        assert ended.outputs is None
        assert ended.error is not None, ended.log
        assert ended.error.kind == ContainerError.RECOVERABLE
        assert words in ended.error.message
    for attempt, during in ((2, kill_before_it_begins), (3, kill_as_it_begins)):
        assert cluster.run(task, inputs, execution="aborted", attempt=attempt, during=during).error is None
    third = cluster.run(task, inputs, execution="launchedagain")
    assert "found the checkpoint of attempt 1 of aborted" in third.log
    assert resumed(cluster, third)[0] == 0
    assert resumed(cluster, third)[-1] > 0
    assert third.outputs
    data = cluster.stored(train_inputs["data"].scalar.blob.uri)
    settings = Settings(progress="off", wandb_mode="disabled")
    undisturbed = run_training(Hyperparameters(**hp), data, tmp_path / "run", settings)
    models = undisturbed.model, cluster.stored(third.outputs["model_state"].scalar.blob.uri)
    expected, found = (torch.load(path, weights_only=True) for path in models)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert "could not be sent" not in first.log + second.log + third.log


def test_another_pod_takes_the_place_of_a_lost_one_of_several(
    cluster: Cluster, train_inputs: dict[str, Literal]
) -> None:
    """As a training operator has it take that; to Flyte it is one attempt, and rank 0's pod is the first to end."""
    inputs = {**train_inputs, "hp": from_workflow({**LONG, "epochs": 4, "seed": 2}), "run_version": text("several")}
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    pods: list[PodEnded] = []
    outputs, before = cluster.server.folder / BUCKET, len(cluster.pods)

    def run(host: str, during: Callable[[subprocess.Popen[bytes], Path], None]) -> None:
        several = {"FLYTE_DDP_NODES": "2", "PET_NNODES": "2:2", "PET_RDZV_ENDPOINT": f"{host}:{port}"}
        pods.append(cluster.run(ELASTIC, inputs, environment=several, during=during))

    def delete_when_there_are_outputs(process: subprocess.Popen[bytes], _: Path) -> None:
        deadline = time.monotonic() + DEADLINE
        mine = cluster.pods[-1].name
        while not (found := {path.parts[-3] for path in outputs.glob("pod*/meta/outputs.pb")} & ran()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert process.poll() is None or mine in found, "others wait"
        process.terminate()

    def ran() -> set[str]:
        return {pod.name for pod in cluster.pods[before:]}

    def run_others() -> None:
        run("localhost", take_the_pod_away)
        run("localhost", delete_when_there_are_outputs)

    others = threading.Thread(target=run_others)

    def start_others(process: subprocess.Popen[bytes], checkpoints: Path) -> None:
        while len(descendants(process.pid)) < 1 and process.poll() is None:  # of equal hosts the older one has rank 0
            time.sleep(0.02)
        others.start()
        delete_when_there_are_outputs(process, checkpoints)

    run(socket.gethostname(), start_others)
    others.join()
    lost, *kept = pods
    assert (lost.exit_code, lost.outputs, lost.error) == (128 + signal.SIGTERM, None, None), lost.log
    (with_rank_0,) = [pod for pod in kept if pod.outputs]
    assert [pod.error for pod in kept] == [None, None]
    assert resumed(cluster, with_rank_0)[0] == 0
    assert resumed(cluster, with_rank_0)[-1] > 0


def test_two_pods_killed_at_the_same_step_are_the_last(cluster: Cluster, train_inputs: dict[str, Literal]) -> None:
    inputs = {**train_inputs, "hp": from_workflow({**LONG, "batch_size": 63}), "run_version": text("futile")}
    ended = [cluster.run(TRAIN, inputs, attempt=attempt, during=kill_as_it_begins) for attempt in (0, 1)]
    assert [each.error for each in ended] == [None, None]
    assert (
        "2 attempts got no further than step 0, where they began, so no other one is made; the last one: it was killed"
        in (refused(cluster.run(TRAIN, inputs, attempt=2)))
    )


def test_executions_that_have_a_result_or_are_not_wanted_are_passed_over(
    cluster: Cluster, train_inputs: dict[str, Literal]
) -> None:
    inputs = {**train_inputs, "hp": from_workflow({**LONG, "seed": 1}), "run_version": text("done")}
    first = cluster.run(TRAIN, inputs, execution="first")
    assert resumed(cluster, first) == [0]
    assert resumed(cluster, cluster.run(TRAIN, inputs, execution="first", attempt=1))[-1] > 0, "lost before Flyte knew"
    assert resumed(cluster, cluster.run(TRAIN, inputs, execution="second")) == [0]
    cluster.run(TRAIN, inputs, execution="aborted", during=take_the_pod_away)
    asked = {"FLYTE_DDP_FROM_SCRATCH": "yes"}
    assert resumed(cluster, cluster.run(TRAIN, inputs, execution="third", environment=asked)) == [0]
