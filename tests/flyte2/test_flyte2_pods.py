"""Tasks of Flyte 2, run the way pods run them: by ``a0``, with SIGTERM, a killed rank, a mistake and later attempts."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgpack
import pytest
import torch
from flyte2_cli import LONG, assert_equal_bits, kill_a_rank
from flyteidl2.core.execution_pb2 import ContainerError
from processes import wait_until

from benchmarks.running import descendants
from flyte_ddp.config import Hyperparameters
from flyte_ddp.pods.profiles import read_profile

pytestmark = pytest.mark.slow
UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
During = Callable[[subprocess.Popen[bytes]], None]
Modules = dict[str, ModuleType]


@pytest.fixture
def pods(flyte2: Modules, tmp_path: Path) -> Any:
    from flyte2_pod import Pods  # imports flyte

    return Pods(tmp_path)


def make_inputs(digits: Path, **changes: Any) -> dict[str, Any]:
    from flyte.io import Dir

    return {"hp": Hyperparameters(**{**LONG, **changes}), "data": Dir(path=str(digits)), "run_version": "run"}


def after_a_save(checkpoints: Path, action: Callable[[int], object]) -> During:
    """Return a function that calls the action with the process id of ``a0``, once there is another checkpoint."""

    def disturb(process: subprocess.Popen[bytes]) -> None:
        before = {*checkpoints.rglob("saved-*")}
        wait_until(lambda: {*checkpoints.rglob("saved-*")} - before or process.poll() is not None, 300.0)
        action(process.pid)

    return disturb


def test_a_pod_saves_at_sigterm_and_the_next_replaces_a_killed_rank(
    flyte2: Modules, pods: Any, digits: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    """The first attempt is retried, and the second ends with an undisturbed run's weights, a report and outputs."""
    train, inputs, asked = flyte2["training"].train_model, make_inputs(digits), []

    def terminate(pid: int) -> None:
        os.kill(pid, signal.SIGTERM)
        asked.append(time.monotonic())

    first = pods.run(train, inputs, during=after_a_save(pods.checkpoints, terminate))
    assert time.monotonic() - asked[0] < read_profile().grace_seconds
    assert first.outputs is None, first.log
    assert first.error is not None, first.log
    assert first.error.kind == ContainerError.RECOVERABLE
    assert "stopped by SIGTERM" in first.error.message
    assert "Traceback" not in first.error.message
    assert first.report is not None
    assert "This attempt has failed" in first.report

    second = pods.run(
        train,
        inputs,
        attempt=1,
        environment={"FLYTE_DDP_RESTARTS": "1"},
        during=after_a_save(pods.checkpoints, kill_a_rank),
    )
    assert second.error is None, second.log
    assert second.outputs is not None, second.log
    assert "found the checkpoint of attempt 0 of r1" in second.log
    assert "rank 1 was killed by SIGKILL" in second.log
    assert "(1 of 1)" in second.log, "replaced in place"
    outputs = msgpack.unpackb(second.outputs["o0"].scalar.binary.value)
    weights, sidecar, metrics = (Path(outputs[name]["path"]) for name in ("model_state", "sidecar", "metrics"))
    assert_equal_bits(weights, undisturbed)
    assert outputs["epoch_accuracies"][-1] == json.loads(sidecar.read_text())["metrics"]["test_accuracy"]
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [record["resumed_after_step"] for record in records if record["kind"] == "start"]
    assert steps == sorted({*steps}), "each start is after the step of the one before"
    assert len(steps) == 3
    assert second.report is not None
    assert Path(outputs["report"]["path"]).read_text() in second.report
    assert second.report.count("<!doctype html>") >= 1


def test_after_the_loss_of_a_pod_the_same_attempt_resumes(
    flyte2: Modules, pods: Any, digits: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    """Flyte 2 starts a lost pod again without another number of the attempt."""
    train, inputs = flyte2["training"].train_model, make_inputs(digits)
    lost = pods.run(train, inputs, during=after_a_save(pods.checkpoints, lambda pid: os.killpg(pid, signal.SIGKILL)))
    assert (lost.outputs, lost.error) == (None, None), lost.log
    again = pods.run(train, inputs)
    assert again.outputs is not None, again.log
    assert "found the checkpoint of attempt 0 of r1" in again.log
    outputs = msgpack.unpackb(again.outputs["o0"].scalar.binary.value)
    assert_equal_bits(Path(outputs["model_state"]["path"]), undisturbed)


@pytest.mark.exhaustive
def test_as_process_1_a_pod_saves_at_sigterm(flyte2: Modules, pods: Any, digits: Path) -> None:
    """The kernel drops signals to process 1 for which the process has no handler."""
    if (
        shutil.which("unshare") is None
        or subprocess.run([*UNSHARE, "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("new PID namespaces are not permitted here")

    def terminate(pid: int) -> None:
        [first, *_] = descendants(pid)
        os.kill(first, signal.SIGTERM)

    ended = pods.run(
        flyte2["training"].train_model,
        make_inputs(digits),
        wrapper=UNSHARE,
        during=after_a_save(pods.checkpoints, terminate),
    )
    assert ended.error is not None, ended.log
    assert ended.error.kind == ContainerError.RECOVERABLE
    assert "stopped by SIGTERM" in ended.error.message
    assert len({*pods.checkpoints.rglob("saved-*")}) == 2


def test_a_mistake_is_final(flyte2: Modules, pods: Any, digits: Path) -> None:
    ended = pods.run(flyte2["training"].train_model, make_inputs(digits, backend="nccl"))
    assert ended.outputs is None
    assert ended.error is not None, ended.log
    assert ended.error.kind == ContainerError.NON_RECOVERABLE
    assert ended.error.message == "backend='nccl': this process sees no GPU; use backend='gloo' or 'auto'"
    assert ended.error.code == "UserError"
    assert "Traceback" not in ended.log, "the text is enough"


@pytest.mark.exhaustive
def test_other_code_than_the_deployed_is_refused(flyte2: Modules, pods: Any, digits: Path) -> None:
    ended = pods.run(
        flyte2["training"].train_model, make_inputs(digits), environment={"FLYTE_DDP_CODE": "0123456789abcdef"}
    )
    assert ended.error is not None, ended.log
    assert ended.error.kind == ContainerError.NON_RECOVERABLE
    assert "but 0123456789abcdef were registered" in ended.error.message
