"""The tutorial's task in a pod, run the way pods run it."""

import subprocess
import time
from pathlib import Path

import packaged
import pytest
from cli import ROOT
from flyteidl.core.errors_pb2 import ContainerError
from flyteidl.core.literals_pb2 import Literal
from msgpack import packb
from pod import BUCKET, DEADLINE, Cluster
from s3_server import s3_server

from examples.sample_data import unpack_mnist_files
from examples.tutorial.tutorial import Hyperparameters, train_mnist
from flyte_ddp import run_ranks

TASK = "examples.tutorial.workflow.pytorch_mnist_task"
HP = {"batch_size": 8, "epochs": 60}  # seconds, so that the pod is told to stop before the end


def terminate_when_saved(process: subprocess.Popen[bytes], checkpoints: Path) -> None:
    deadline = time.monotonic() + DEADLINE
    while not [*checkpoints.rglob("saved-*")] and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.terminate()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_pod_that_is_told_to_stop_saves_and_the_next_attempt_ends_as_an_undisturbed_run(tmp_path: Path) -> None:
    ended, package = packaged.make(tmp_path, "--copy", "all", pkgs="examples.tutorial", directory=ROOT)
    assert ended.exit_code == 0, ended.output
    data = unpack_mnist_files("MNIST", None, tmp_path / "store" / BUCKET / "mnist", count=48)
    hp, folder = Literal(), Literal()
    hp.scalar.binary.tag, hp.scalar.binary.value = "msgpack", packb(HP)
    folder.scalar.blob.uri = f"s3://{BUCKET}/mnist"
    folder.scalar.blob.metadata.type.dimensionality = 1
    inputs, often = {"hp": hp, "data": folder}, {"FLYTE_DDP_CHECKPOINT_SECONDS": "0.2"}
    with s3_server(tmp_path / "store") as server:
        cluster = Cluster(package, server, tmp_path)
        first = cluster.run(TASK, inputs, environment=often, during=terminate_when_saved)
        assert first.error is not None, first.log
        assert first.error.kind == ContainerError.RECOVERABLE, first.error.message
        second = cluster.run(TASK, inputs, environment=often, attempt=1)
    assert second.outputs is not None, second.log
    assert "going on after step" in second.log
    accuracies = second.outputs["epoch_accuracies"].collection.literals
    expected = run_ranks(train_mnist, Hyperparameters(**HP), str(data))
    assert [each.scalar.primitive.float_value for each in accuracies] == expected
