"""The pods of a PyTorchJob as processes: one launches the ranks of both, and each is lost and replaced."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cli import HELPERS
from faulty_runs import HP, equal
from faulty_runs import INTRODUCED as SAME
from trials import Trial, close, starts

from flyte_ddp.core.text.json_lines import read_records
from flyte_ddp.pods.elastic import STORE_VARIABLE
from flyte_ddp.run import Result

pytestmark = pytest.mark.slow
LIMIT = 120.0  # seconds
FIRST, SECOND = socket.gethostname(), "localhost"  # names of the store's host; the first pod has this name


class Job:
    """The pods that run, by the name that they have for the store's host."""

    def __init__(self, trial: Trial, folder: Path, nodes: tuple[int, int] = (2, 2), hp: str = SAME.to_json()) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]
        self.arguments = [hp, str(trial.digits), str(trial.folder), *map(str, nodes)]
        self.folder = folder
        self.pods: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *names: str) -> None:
        """Start pods, each with one rank on one core."""
        for number, name in enumerate(names):
            cores = sorted(os.sched_getaffinity(0))
            command = ["taskset", "--cpu-list", str(cores[number % len(cores)]), sys.executable]
            environment = {**os.environ, "PYTHONPATH": str(HELPERS), STORE_VARIABLE: f"{name}:{self.port}"}
            with self.log(name).open("ab") as file:
                self.pods[name] = subprocess.Popen(
                    [*command, str(HELPERS / "elastic_pod.py"), *self.arguments],
                    stdout=file,
                    stderr=file,
                    env=environment,
                    start_new_session=True,
                )

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def kill(self, name: str) -> None:
        """Kill all processes of a pod, as when its node is lost."""
        os.killpg(self.pods[name].pid, signal.SIGKILL)
        self.pods[name].wait(LIMIT)

    def terminate(self, name: str) -> int:
        self.pods[name].terminate()
        return self.pods[name].wait(LIMIT)

    def succeeds(self) -> bool:
        """Wait for the pod with the launcher. Then end the other pod, as the operator does."""
        code = self.pods[FIRST].wait(LIMIT)
        assert code == 0, self.log(FIRST).read_text() + self.log(SECOND).read_text()
        return self.pods[SECOND].poll() is None and self.terminate(SECOND) == 0


@contextmanager
def running(job: Job) -> Iterator[Job]:
    try:
        job.start(FIRST, SECOND)
        yield job
    finally:
        for pod in job.pods.values():
            if pod.poll() is None:
                os.killpg(pod.pid, signal.SIGKILL)


def test_a_killed_rank_is_replaced_in_place(expected: Result, trial: Trial, tmp_path: Path) -> None:
    trial.inject("SIGKILL", after=3)
    with running(Job(trial, tmp_path)) as job:
        assert job.succeeds()
    assert equal(expected.run_folder, trial.folder)
    [restart] = [each for each in read_records(trial.folder / "metrics.jsonl") if each["kind"] == "restart"]
    assert (restart["step"], restart["reason"]) == (3, "rank 1 was killed by SIGKILL at step 3")
    assert [begin["num_ranks"] for begin in starts(trial.folder)] == [2, 2]


@pytest.mark.exhaustive
@pytest.mark.parametrize("lose", [Job.kill, Job.terminate])
def test_a_lost_pod_is_replaced(
    expected: Result, trial: Trial, tmp_path: Path, lose: Callable[[Job, str], object]
) -> None:
    """It is killed, or must end; the other pod waits for the replacement."""
    trial.inject("hang")
    with running(Job(trial, tmp_path)) as job:
        trial.when_failing(lambda: (lose(job, SECOND), job.start(SECOND))).join()
        assert job.succeeds()
    assert equal(expected.run_folder, trial.folder)
    assert [begin["resumed_after_step"] for begin in starts(trial.folder)] == [0, 3]
    assert ("must end" in job.log(SECOND).read_text()) == (lose is Job.terminate)


@pytest.mark.exhaustive
def test_the_launchers_pod_ends_and_both_containers_start_again(expected: Result, trial: Trial, tmp_path: Path) -> None:
    trial.inject("slow")
    with running(Job(trial, tmp_path)) as job:
        code = []
        trial.when_failing(lambda: code.append(job.terminate(FIRST))).join()
        assert (code, job.pods[SECOND].wait(LIMIT)) == ([128 + signal.SIGTERM], 1)
        assert "is gone" in job.log(SECOND).read_text()
        job.start(FIRST, SECOND)
        assert job.succeeds()
    assert equal(expected.run_folder, trial.folder)
    assert starts(trial.folder)[-1]["resumed_after_step"] >= 3


@pytest.mark.exhaustive
def test_with_a_range_the_other_pod_goes_on_alone(expected: Result, trial: Trial, tmp_path: Path) -> None:
    trial.inject("hang")
    with running(Job(trial, tmp_path, (1, 2), HP.to_json())) as job:
        trial.when_failing(lambda: job.kill(SECOND)).join()
        assert job.pods[FIRST].wait(LIMIT) == 0, job.log(FIRST).read_text()
    assert [begin["num_ranks"] for begin in starts(trial.folder)] == [2, 1]
    assert starts(trial.folder)[-1]["resumed_after_step"] == 3
    assert close(trial.folder, expected.run_folder)
