"""Attempts of packaged tasks that are cut off, run the way pods run them, go on from their checkpoints."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from engine_rules import packed
from flyteidl.core.errors_pb2 import ContainerError
from pod import DEADLINE, Cluster, PodEnded
from pod_inputs import ELASTIC, SMOKE, TRAIN, Inputs

from benchmarks.running import descendants, process_name
from flyte_ddp.config import Hyperparameters
from flyte_ddp.run import run_training
from flyte_ddp.settings import Settings

pytestmark = pytest.mark.slow

LONG = {**SMOKE, "epochs": 25, "max_steps": 0, "batch_size": 64}


def wait_for_another(pattern: str, process: subprocess.Popen[bytes], checkpoints: Path) -> None:
    """Until there is such a file in the blob store that was not there before."""
    before, deadline = {*checkpoints.rglob(pattern)}, time.monotonic() + DEADLINE
    while not {*checkpoints.rglob(pattern)} - before and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


def kill_a_rank(process: subprocess.Popen[bytes], checkpoints: Path) -> None:
    """What the kernel does where a pod runs out of memory: the largest process is a rank, not the task's own."""
    wait_for_another("saved-*", process, checkpoints)
    ranks = [pid for pid in descendants(process.pid) if re.fullmatch(r"rank \d+", process_name(pid))]
    os.kill(ranks[-1], signal.SIGKILL)


def take_the_pod_away(process: subprocess.Popen[bytes], checkpoints: Path) -> None:
    """What Kubernetes does when it takes the node away."""
    wait_for_another("saved-*", process, checkpoints)
    process.terminate()


def kill_as_it_begins(process: subprocess.Popen[bytes], checkpoints: Path) -> None:
    """It has taken up a checkpoint, and its ranks are about to meet."""
    wait_for_another("started-*", process, checkpoints)
    os.killpg(process.pid, signal.SIGKILL)


def resumed(cluster: Cluster, ended: PodEnded) -> list[int]:
    """After which steps the attempts at a run began."""
    assert ended.outputs, ended.log
    lines = cluster.stored(ended.outputs["metrics"].scalar.blob.uri).read_text().splitlines()
    return [record["resumed_after_step"] for record in map(json.loads, lines) if record["kind"] == "start"]


@pytest.mark.parametrize(
    ("task", "ranks"),
    [(TRAIN, 2), pytest.param(ELASTIC, 1, marks=pytest.mark.exhaustive)],  # the profile has one CPU
)
def test_attempts_that_are_cut_off_lose_nothing(
    cluster: Cluster, train_inputs: Inputs, tmp_path: Path, task: str, ranks: int
) -> None:
    """Nor does another execution of the same inputs, after one that was aborted."""
    hp = {**LONG, "num_ranks": ranks}
    inputs = {**train_inputs, "hp": packed(hp), "run_version": packed(f"run-of-{ranks}")}
    first = cluster.run(task, inputs, execution="aborted", during=kill_a_rank)
    second = cluster.run(task, inputs, execution="aborted", attempt=1, during=take_the_pod_away)
    for ended, words in ((first, "was killed by SIGKILL"), (second, "stopped by SIGTERM")):
        assert ended.outputs is None
        assert ended.error is not None, ended.log
        assert ended.error.kind == ContainerError.RECOVERABLE
        assert words in ended.error.message
        assert ended.deck is not None
        assert "This attempt has failed" in ended.deck
    assert cluster.run(task, inputs, execution="aborted", attempt=2, during=kill_as_it_begins).error is None
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
    for words in ("could not be sent", "enable_deck"):  # flytekit's warning of a page that it does not publish
        assert words not in first.log + second.log + third.log
