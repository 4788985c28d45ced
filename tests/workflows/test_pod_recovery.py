"""Attempts of packaged tasks that are cut off, run the way pods run them, go on from their checkpoints."""

import json
import subprocess
import time
from pathlib import Path

import pytest
import torch
from engine_rules import packed
from flyteidl.core.errors_pb2 import ContainerError
from pod import DEADLINE, Cluster, PodEnded
from pod_inputs import SMOKE, TRAIN, Inputs
from training_runs import QUIET

from flyte_ddp.config import Hyperparameters
from flyte_ddp.run import run_training

pytestmark = pytest.mark.slow

LONG = {**SMOKE, "epochs": 10, "max_steps": 0, "batch_size": 64}


def take_the_pod_away(process: subprocess.Popen[bytes], checkpoints: Path) -> None:
    """What Kubernetes does when it takes the node away, once there is another checkpoint in the blob store."""
    before, deadline = {*checkpoints.rglob("saved-*")}, time.monotonic() + DEADLINE
    while not {*checkpoints.rglob("saved-*")} - before and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.terminate()


def resumed(cluster: Cluster, ended: PodEnded) -> list[int]:
    """After which steps the attempts at a run began."""
    assert ended.outputs, ended.log
    lines = cluster.stored(ended.outputs["metrics"].scalar.blob.uri).read_text().splitlines()
    return [record["resumed_after_step"] for record in map(json.loads, lines) if record["kind"] == "start"]


def test_an_execution_goes_on_where_another_was_cut_off(cluster: Cluster, train_inputs: Inputs, tmp_path: Path) -> None:
    inputs = {**train_inputs, "hp": packed(LONG), "run_version": packed("cut-off")}
    first = cluster.run(TRAIN, inputs, execution="aborted", during=take_the_pod_away)
    assert first.outputs is None
    assert first.error is not None, first.log
    assert first.error.kind == ContainerError.RECOVERABLE
    assert "stopped by SIGTERM" in first.error.message
    assert first.deck is not None
    assert "This attempt has failed" in first.deck
    second = cluster.run(TRAIN, inputs, execution="launchedagain")
    assert "found the checkpoint of attempt 0 of aborted" in second.log
    assert resumed(cluster, second)[0] == 0
    assert resumed(cluster, second)[-1] > 0
    assert second.outputs
    data = cluster.stored(train_inputs["data"].scalar.blob.uri)
    undisturbed = run_training(Hyperparameters(**LONG), data, tmp_path / "run", QUIET)
    models = undisturbed.model, cluster.stored(second.outputs["model_state"].scalar.blob.uri)
    expected, found = (torch.load(path, weights_only=True) for path in models)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    for words in ("could not be uploaded", "enable_deck"):  # flytekit's warning of a page that it does not publish
        assert words not in first.log + second.log
