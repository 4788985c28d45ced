"""A clustered task of Flyte 2 on two hosts: the pods of its JobSet, with their commands, variables and names."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgpack
import pytest
import torch
from flyte2_cli import LONG, assert_equal_bits, kill_a_rank
from flyteidl2.core.execution_pb2 import ContainerError
from hosts import Host, two_hosts
from processes import wait_until

from flyte_ddp.config import Hyperparameters

pytestmark = pytest.mark.slow
Modules = dict[str, ModuleType]
NAME = "r1-a1-0"
FIRST = f"{NAME}-workers-0-0.{NAME}.flyte2.svc.cluster.local"  # the name of the first pod in the cluster's DNS
SECONDS = 200.0  # for a machine that is busy; less than the 300 that torchrun waits for other pods at its end


class JobSet:
    """The two pods of an attempt, with one rank on one core each. The second pod does not see the first pod's files.

    Both see the blob store and the data set.
    """

    def __init__(
        self,
        pods: Any,
        task: Any,
        inputs: dict[str, Any],
        hosts: tuple[Host, Host],
        attempt: int,
        variables: dict[str, str],
    ) -> None:
        from flyte2_pod import make_command

        self.hosts, self.folder = hosts, pods.make_folder(task, inputs)
        cores = sorted(os.sched_getaffinity(0))
        command = make_command(task, self.folder, "r1", pods.sources)
        environment = pods.make_environment(task, self.folder, "r1", attempt) | variables
        self.pods: list[subprocess.Popen[bytes]] = []
        for index, host in enumerate(hosts):
            own = self.folder / host.name
            (own / "home").mkdir(parents=True)
            names = own / "hosts"
            names.write_text(f"127.0.0.1 localhost\n{host.address} {host.name}\n{hosts[0].address} {FIRST}\n")
            jobset = {
                "HOME": str(own / "home"),
                "TMPDIR": str(own),
                "FLYTE_DDP_RESTARTS": str(attempt),
                "FLYTE_DDP_RUNS": str(self.folder / hosts[0].name / "runs"),
                "JOBSET_NAME": NAME,
                "POD_NAMESPACE": "flyte2",
                "JOB_COMPLETION_INDEX": str(index),
                "JOBSET_RESTART_ATTEMPT": "0",
                "JOBSET_MAX_RESTARTS": "0",
                "NNODES": "2",
                "NPROC_PER_NODE": "1",
                "MASTER_PORT": "29500",
                "RDZV_BACKEND": "static",
            }
            core = ("taskset", "--cpu-list", str(cores[index % len(cores)]))
            log = own / "log"
            hidden = self.folder / hosts[0].name if index else None
            self.pods.append(host.start([*core, *command], log, {**environment, **jobset}, hidden=hidden, names=names))

    def lose_second(self) -> None:
        """Kill all processes of the second pod, and end the first pod as JobSet does then."""
        assert self.pods[0].poll() is None, self.read_logs()
        self.hosts[1].kill_all()
        os.killpg(self.pods[0].pid, signal.SIGTERM)

    def wait(self) -> Any:
        """Wait for the end of both pods, and return the exit code of the first pod and the files of both pods."""
        codes = [pod.wait(SECONDS) for pod in self.pods]
        from flyte2_pod import read_pod

        return read_pod(self.folder, codes[0], self.read_logs())

    def read_logs(self) -> str:
        return "\n".join(path.read_text() for path in self.folder.glob("*/log"))


Start = Callable[..., JobSet]


@pytest.fixture
def start(flyte2: Modules, tmp_path: Path, digits: Path) -> Iterator[Start]:
    """Start an attempt of the training on two pods."""
    from flyte.io import Dir
    from flyte2_pod import Pods

    pods = Pods(tmp_path)
    with two_hosts() as hosts:

        def start_attempt(attempt: int = 0, variables: dict[str, str] | None = None, **changes: Any) -> JobSet:
            hp = Hyperparameters(**{**LONG, **changes})
            inputs = {"hp": hp, "data": Dir(path=str(digits)), "run_version": "run"}
            return JobSet(pods, flyte2["elastic_training"].train_on_elastic, inputs, hosts, attempt, variables or {})

        yield start_attempt


def test_after_a_lost_pod_and_a_killed_rank_the_weights_are_those_of_an_undisturbed_run(
    start: Start, tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    """Another attempt follows the lost pod, and replaces the killed rank in place."""

    def wait_for_another_save(job: JobSet) -> None:
        before = {*(tmp_path / "store/checkpoints").rglob("saved-*")}
        wait_until(
            lambda: {*(tmp_path / "store/checkpoints").rglob("saved-*")} - before or job.pods[0].poll() is not None,
            SECONDS,
        )

    job = start()
    wait_for_another_save(job)
    job.lose_second()
    lost = job.wait()
    assert lost.outputs is None, lost.log
    assert lost.error is None or lost.error.kind == ContainerError.RECOVERABLE, lost.log

    job = start(attempt=1)
    wait_for_another_save(job)
    kill_a_rank(job.pods[1].pid)
    ended = job.wait()
    assert ended.exit_code == 0, ended.log
    assert ended.error is None, ended.log
    assert "found the checkpoint of attempt 0 of r1" in ended.log
    assert "rank 1 was killed by SIGKILL" in ended.log
    assert "(1 of 1)" in ended.log, "replaced in place"
    outputs = msgpack.unpackb(ended.outputs["o0"].scalar.binary.value)
    assert_equal_bits(Path(outputs["model_state"]["path"]), undisturbed)
    assert ended.report is not None


def test_a_mistake_is_final_and_ends_both_pods(start: Start) -> None:
    """The backend reads the error only if the JobSet has completed. The second pod does not wait for a launch."""
    job = start(backend="nccl")
    ended = job.wait()
    assert [pod.returncode for pod in job.pods] == [0, 0], ended.log
    assert ended.outputs is None
    assert ended.error is not None, ended.log
    assert ended.error.kind == ContainerError.NON_RECOVERABLE
    assert ended.error.message.startswith("backend='nccl': this host has 0 GPU(s) for 1 Elastic workers")


def test_a_mistake_that_all_workers_find_is_final_and_ends_both_pods(start: Start) -> None:
    """The second pod must not fail, else the backend would retry and lose the text."""
    job = start(variables={"FLYTE_DDP_CODE": "0123456789abcdef"})
    ended = job.wait()
    assert [pod.returncode for pod in job.pods] == [0, 0], ended.log
    assert ended.error is not None, ended.log
    assert ended.error.kind == ContainerError.NON_RECOVERABLE
    assert "but 0123456789abcdef were registered" in ended.error.message
