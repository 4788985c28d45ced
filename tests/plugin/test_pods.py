"""A user's own tasks in pods, run the way pods run them."""

import re
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import distributed
import pytest
from flyteidl.core.errors_pb2 import ContainerError
from flyteidl.core.literals_pb2 import Literal
from msgpack import unpackb
from pod import BUCKET, DEADLINE, Cluster, PodEnded

pytestmark = pytest.mark.slow


def number(value: int) -> Literal:
    literal = Literal()
    literal.scalar.primitive.integer = value
    return literal


def text(value: str) -> Literal:
    literal = Literal()
    literal.scalar.primitive.string_value = value
    return literal


def file(cluster: Cluster, name: str, content: str) -> Literal:
    """A file in the blob store."""
    path = cluster.server.folder / BUCKET / name
    path.write_text(content)
    literal = Literal()
    literal.scalar.blob.uri = f"s3://{BUCKET}/{name}"
    return literal


def integers(literal: Literal) -> list[int]:
    return [each.scalar.primitive.integer for each in literal.collection.literals]


def test_what_rank_0_returns_are_the_outputs(cluster: Cluster) -> None:
    inputs = {"start": number(3), "data": file(cluster, "data.txt", "a line")}
    ended = cluster.run("own.train", inputs, environment={"WANDB_MODE": "offline"})
    assert ended.outputs is not None, ended.log
    assert unpackb(ended.outputs["stats"].scalar.binary.value) == {"total": 7.0, "ranks": 2}
    assert cluster.stored(ended.outputs["model"].scalar.blob.uri).read_text() == "a line 7.0"
    assert ended.deck is not None
    assert "made on rank 0 of 2" in ended.deck
    assert "own.train-" in ended.deck, "the page of the run"
    assert [*cluster.server.folder.rglob("own.train-*/*/done-*")], "no later attempt goes on from its saves"
    offline = cluster.server.folder / BUCKET / f"data/xy/{ended.name}-n1-0/wandb"
    assert [*offline.rglob("metrics.jsonl")], "what wandb could not send is kept"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("raise", ContainerError.NON_RECOVERABLE, r"rank 1: ValueError: rank 1 cannot do that"),
        ("recoverable", ContainerError.RECOVERABLE, r"rank 1: FlyteRecoverableException: .*try that again"),
    ],
)
def test_errors_name_the_rank_and_tell_flyte_whether_to_retry(
    cluster: Cluster, how: str, kind: int, message: str
) -> None:
    ended = cluster.run("own.fail", {"how": text(how)})
    assert ended.error is not None, ended.log
    assert ended.error.kind == kind
    assert ended.error.code.startswith("USER:")
    assert re.search(message, ended.error.message), ended.error.message
    if how == "raise":
        assert 'raise ValueError("rank 1 cannot do that")' in ended.error.message, "with its traceback"


def test_the_next_attempt_and_another_execution_go_on_from_what_was_saved(cluster: Cluster) -> None:
    first = cluster.run("own.learn", {"steps": number(5), "note": text("first")})
    assert first.error is not None, first.log
    assert first.error.kind == ContainerError.RECOVERABLE
    assert "rank 1 was killed by SIGKILL" in first.error.message
    other = {"steps": number(5), "note": text("another")}
    ended = cluster.run("own.learn", other, attempt=1, execution="other")
    assert ended.outputs is not None, ended.log
    assert integers(ended.outputs["o0"]) == [4, 5]


@pytest.mark.parametrize("task", [pytest.param("learn", marks=pytest.mark.exhaustive), "learn_on_elastic"])
def test_a_killed_rank_is_replaced_in_the_same_attempt(cluster: Cluster, task: str) -> None:
    inputs = {"steps": number(7)} | ({"note": text("")} if task == "learn" else {})
    ended = cluster.run(f"own.{task}", inputs, environment={"FLYTE_DDP_RESTARTS": "1"})
    assert ended.outputs is not None, ended.log
    assert integers(ended.outputs["o0"]) == [4, 5, 6, 7]
    assert re.search(r"rank 1 was killed by SIGKILL.*; restarted from step 3, in .* s \(1 of 1\)", ended.log), ended.log


def test_saves_of_other_code_are_named_and_another_execution_goes_on_from_them_if_told_to(cluster: Cluster) -> None:
    inputs = {"steps": number(6), "note": text("")}
    first = cluster.run("own.learn", inputs, execution="first")
    assert first.error is not None, first.log
    [run] = {saved.parents[1] for saved in cluster.server.folder.rglob("own.learn-*/first/saved-*")}
    run = run.rename(run.with_name(f"{run.name.rpartition('-')[0]}-01234567"))  # as if the code had been another
    fix = f"if only lines after the last save have changed, set FLYTE_DDP_GO_ON={run.name} to resume"
    anew = cluster.run("own.learn", inputs, execution="anew")
    assert anew.error is not None, anew.log
    assert f"{run.name}, with the same inputs and different code, has saved step 3: {fix}" in anew.log
    told = {"FLYTE_DDP_GO_ON": run.name}
    ended = cluster.run("own.learn", inputs, attempt=1, execution="told", environment=told)
    assert ended.outputs is not None, ended.log
    assert integers(ended.outputs["o0"]) == [4, 5, 6]


def terminate_when_saved(process: subprocess.Popen[bytes], checkpoints: Path) -> None:
    deadline = time.monotonic() + DEADLINE
    while not [*checkpoints.rglob("own.go_on-*/*/saved-*")] and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.terminate()


@pytest.mark.exhaustive
def test_sigterm_gives_the_body_time_to_save(cluster: Cluster) -> None:
    first = cluster.run("own.go_on", {}, during=terminate_when_saved)
    assert first.error is not None, first.log
    assert first.error.kind == ContainerError.RECOVERABLE
    assert "stopped by SIGTERM" in first.error.message
    second = cluster.run("own.go_on", {}, attempt=1)
    assert second.outputs is not None, second.log
    assert second.outputs["o0"].scalar.primitive.integer > 1
    assert f"after step {second.outputs['o0'].scalar.primitive.integer:,}" in first.error.message


@pytest.mark.exhaustive
def test_ranks_in_two_pods_of_a_pytorchjob(cluster: Cluster) -> None:
    """The operator's variables; the pod without the launcher stays until the operator deletes it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    over = threading.Event()

    def delete_when_over(process: subprocess.Popen[bytes], _: Path) -> None:
        while process.poll() is None:
            if over.wait(0.05):
                process.terminate()  # again, where Elastic was ending its workers and has swallowed it
                with suppress(subprocess.TimeoutExpired):
                    process.wait(2)

    def run(store: str) -> PodEnded:
        variables = {"PET_NNODES": "2", "PET_RDZV_ENDPOINT": f"{store}:{port}"}
        ended = cluster.run("own.on_elastic", {"value": number(4)}, environment=variables, during=delete_when_over)
        over.set()
        return ended

    with ThreadPoolExecutor(2) as threads:
        pods = [*threads.map(run, (socket.gethostname(), "localhost"))]  # the first is where the store's name leads
    [ended] = [pod for pod in pods if pod.outputs is not None] or [pytest.fail(pods[0].log + pods[1].log)]
    assert unpackb(ended.outputs["stats"].scalar.binary.value) == {"total": 8.0, "ranks": 2}
    assert cluster.stored(ended.outputs["model"].scalar.blob.uri).read_text() == "8.0"
    assert not [pod.error for pod in pods if pod.error]
    assert [*cluster.server.folder.rglob("own.on_elastic-*/*/done-*")]


def test_a_dynamic_task_is_a_workflow_of_pods(cluster: Cluster) -> None:
    ended = cluster.run("own.many", {"number": number(2)})
    assert ended.subworkflow is not None, ended.log
    assert [task.id.name for task in ended.subworkflow.tasks] == ["own.square"]


@pytest.mark.exhaustive
def test_rank_0_on_another_host_uploads_the_outputs(cluster: Cluster, tmp_path, monkeypatch) -> None:
    """On workers that know neither the project nor the task's pod."""
    monkeypatch.chdir(tmp_path)
    for name, value in {**cluster.server.flyte_environment(), "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as workers:
        environment = {"DASK_SCHEDULER_ADDRESS": workers.scheduler_address}
        ended = cluster.run("own.on_dask_here", {"value": number(4)}, environment=environment)
    assert ended.outputs is not None, ended.log
    assert unpackb(ended.outputs["stats"].scalar.binary.value) == {"total": 8.0, "ranks": 2}
    assert cluster.stored(ended.outputs["model"].scalar.blob.uri).read_text() == "8.0"
