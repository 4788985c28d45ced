"""A device that fails, and one whose memory is too small: what the run says, and what is left of it."""

import os
import re
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faults
import pytest
import torch
import torch.distributed as dist
from cli import HELPERS
from faulty_runs import HP, equal, saved
from processes import children_of
from training_runs import train_in

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import MachineError, RankError
from flyte_ddp.core.launch.supervise.failure_report import Cause, FailureReport
from flyte_ddp.core.launch.supervise.failures import find_first_failure
from flyte_ddp.core.parallel.distributed import translate_collective_errors, translate_device_errors
from flyte_ddp.core.training.checkpointing import Checkpointer
from flyte_ddp.run import Result

HOST = re.escape(socket.gethostname())
EPOCH = 14  # steps, of which each is a pass of the model of a single rank
ONE = replace(HP, num_ranks=1)
NCCL = "NCCL error in: NCCL.cpp:77, unhandled {} error (run with NCCL_DEBUG=INFO for details)\nLast error:\n{}"


@pytest.fixture(scope="module")
def expected(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run that nothing disturbs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(HELPERS)
        return train_in(tmp_path_factory.mktemp("expected") / "run", ONE, digits)


@pytest.fixture
def fail(digits: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trains until the model of the last rank has failed, and returns the error."""

    def train(hp: Hyperparameters, kind: str, at: str = "training", after: int = EPOCH + 3) -> RankError:
        fault = {"rank": hp.num_ranks - 1, "at": at, "kind": kind, "pass": after}
        if hp.num_ranks == 1:  # in this process
            monkeypatch.setattr(faults, "FAULT", {**fault, "marker": tmp_path / "marker"})
            monkeypatch.setattr(faults, "passed", {})
        else:
            faults.inject(monkeypatch, tmp_path / "marker", **fault)
        with pytest.raises(RankError) as caught:
            train_in(tmp_path / "run", hp, digits)
        assert children_of(os.getpid()) == []
        return caught.value

    return train


def test_of_a_lost_device_nothing_is_copied_and_the_checkpoint_stays(
    fail: Any, expected: Result, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, copied = Checkpointer.take_snapshot, list[int]()

    def note_step(checkpoints: Checkpointer) -> Any:
        copied.append(checkpoints.state.step)
        return take(checkpoints)

    monkeypatch.setattr(Checkpointer, "take_snapshot", note_step)
    error = fail(ONE, "lost device")
    assert re.match(
        f"rank 0: MachineError: cpu:0 of host {HOST} failed: CUDA error: unspecified launch failure; .*start",
        str(error),
    )
    assert error.recoverable
    assert isinstance(error.__cause__.__cause__, torch.AcceleratorError)
    assert copied == [EPOCH]
    assert saved(tmp_path / "run").step == EPOCH
    assert equal(train_in(tmp_path / "run", ONE, digits).run_folder, expected.run_folder)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RuntimeError("CUDA error: uncorrectable ECC error encountered\nmore"), "uncorrectable ECC error encountered"),
        (dist.DistBackendError(NCCL.format("cuda", "Cuda failure 719 'unspecified launch failure'")), "719 'unspec"),
        (dist.DistBackendError(NCCL.format("system", "socketPollConnect: connect returned Connection refused")), None),
        (RuntimeError("No CUDA GPUs are available"), "No CUDA GPUs are available"),
        (RuntimeError("an unspecified launch failure of my own"), None),
    ],
)
def test_what_is_a_lost_device(error: RuntimeError, says: str | None) -> None:
    with pytest.raises(RuntimeError) as caught, translate_device_errors("cuda:3"):
        raise error
    assert (caught.value is error) == (says is None)
    if says is not None:
        assert isinstance(caught.value, MachineError)
        assert re.match(f"cuda:3 of host {HOST} failed: .*{says}", str(caught.value))
        assert "more" not in str(caught.value)


@pytest.mark.parametrize(("at", "after"), [("training", 5), ("evaluation", 1)])
def test_a_device_without_memory_is_told_with_torchs_figures_and_a_fix(fail: Any, at: str, after: int) -> None:
    error = fail(replace(ONE, accumulation_steps=3), "full device", at, after)
    assert error.message.startswith("rank 0: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 ")
    assert error.message.endswith(
        "1.10 GiB is reserved by PyTorch but unallocated; raise accumulation_steps (now 3), which changes no result "
        f"without BatchNorm, or lower batch_size ({ONE.batch_size} on 1 rank(s)) or test_batch_size "
        f"({ONE.test_batch_size})"
    )
    assert not error.recoverable


@pytest.mark.parametrize(
    ("message", "worth_another_try"), [(NCCL.format("system", "shm"), True), ("wrong type", False)]
)
def test_nccls_system_errors_are_worth_another_try(message: str, worth_another_try: bool) -> None:
    """Also where all ranks, which are on one host, have them."""
    report = FailureReport(Cause.PEER, "DistBackendError", message, "", 0.0)
    handles = [
        SimpleNamespace(rank=rank, report=report, exitcode=1, completed=False, lost=False, host="h")
        for rank in range(2)
    ]
    assert find_first_failure(handles, 600.0).recoverable == worth_another_try


@pytest.mark.parametrize("kind", ["lost device", "full device"])
def test_in_a_wait_for_others_an_error_of_the_own_device_keeps_its_type(kind: str) -> None:
    with pytest.raises(RuntimeError) as caught, translate_collective_errors():
        raise faults.DEVICE_ERRORS[kind]
    assert caught.value is faults.DEVICE_ERRORS[kind]
