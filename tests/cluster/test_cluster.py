"""What a cluster must do for this package, each check by itself: ``make cluster-test CONFIG=... IMAGE=... K=lost``."""

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cluster import ROOT, Cluster, encode_as_console, encode_as_flytekit
from flytekit import CronSchedule, LaunchPlan
from flytekit.models.concurrency import ConcurrencyLimitBehavior, ConcurrencyPolicy

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.settings import Settings
from flyte_ddp.datasets import fetch
from flyte_ddp.monitor.source import WindowSource
from flyte_ddp.pods.profiles import PROFILES
from flyte_ddp.run import run_training
from flyte_ddp.sweep.space import Sweep

SHORT: dict[str, Any] = {"epochs": 3, "num_ranks": 2}
PORT = 8000
LONG: dict[str, Any] = {"epochs": 3000, "num_ranks": 2, "eval_interval": 500}
KILL_RANK_1 = """
import os, pathlib
[rank] = [comm.parent for comm in pathlib.Path("/proc").glob("[0-9]*/comm") if comm.read_text().strip() == "rank 1"]
os.kill(int(rank.name), 9)
"""
PRINT_GRADIENT = f"""
import sys, torch
from torch import distributed
rank, address = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"tcp://{{address}}:{PORT}", rank=rank, world_size=2)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
model(torch.tensor([[1.0 + 2 * rank]])).sum().backward()
distributed.destroy_process_group()
print(model.module.weight.grad.item())
"""
INVERTED_DIGITS = """
from sklearn.datasets import load_digits
from flyte_ddp import image_arrays

def read(first):
    images, classes = load_digits(return_X_y=True)
    pixels = (255 - 15 * images).astype("uint8").reshape(-1, 8, 8)
    tests = slice(first, first + 150)
    return image_arrays(pixels[300:], classes[300:], pixels[tests], classes[tests], [*map(str, range(10))])

def inverted(_):
    return read(0)

def also_inverted(_):
    return read(150)
"""


@pytest.fixture(scope="module", autouse=True)
def registration_output(cluster: Cluster) -> str:
    """Register all workflows and return the output."""
    return cluster.register()


def unused_seed(cluster: Cluster) -> int:
    """Return a seed that no earlier check has trained with, so that no result is in the cache."""
    return (int(time.time() * 1000) + len(cluster.launched)) % 2**31


def output_address(execution: Any, name: str) -> str:
    """Return the blob store's address of an output."""
    return str(execution.outputs.literals[name].scalar.blob.uri)


def last_line(message: str) -> str:
    """Return the last line of a message of Flyte's, which is this package's error."""
    return message.strip().splitlines()[-1]


def test_registration(registration_output: str) -> None:
    assert "Successfully registered" in registration_output


def test_training_gives_what_a_local_run_gives(cluster: Cluster, tmp_path: Path) -> None:
    hp = {**SHORT, "seed": unused_seed(cluster)}
    execution = cluster.wait_for_success(cluster.launch_training(**hp))
    outputs = execution.outputs
    (tmp_path / "model.pt").write_bytes(cluster.read_blob(output_address(execution, "model_state")))
    data = fetch("digits", "", tmp_path / "digits", progress="off")
    quiet = Settings(progress="off", wandb_mode="disabled")
    local = run_training(Hyperparameters(**hp), data, tmp_path / "run", quiet)
    assert outputs.get("epoch_accuracies", as_type=list[float]) == pytest.approx(local.epoch_accuracies, abs=0.02)
    weights, expected = (torch.load(path, weights_only=True) for path in (tmp_path / "model.pt", local.model))
    assert weights.keys() == expected.keys()
    for name, value in expected.items():  # to the last bit where the machines compute alike
        torch.testing.assert_close(weights[name], value, rtol=1e-2, atol=1e-3)


def test_the_same_hyperparameters_are_one_cache_entry(cluster: Cluster) -> None:
    hp = {**SHORT, "epochs": 1, "seed": unused_seed(cluster)}
    whole = asdict(Hyperparameters(**hp))
    assert not cluster.is_from_cache(
        cluster.wait_for_success(cluster.launch("training_on_demand", {"hp": encode_as_console(hp)}))
    )
    forms = (encode_as_console(whole), encode_as_flytekit(hp), encode_as_flytekit(whole), Hyperparameters(**hp))
    names = [cluster.launch("training_on_demand", {"hp": form}) for form in forms]
    assert [cluster.is_from_cache(cluster.wait_for_success(name)) for name in names] == [True] * 4


def test_pyflyte_run_remote_as_one_types_it(cluster: Cluster) -> None:
    hp = {**SHORT, "epochs": 1, "seed": unused_seed(cluster)}
    names = [cluster.run_remote(hp, FLYTE_DDP_PROFILE=profile) for profile in (cluster.profile, "local")]
    versions = {cluster.wait_for_success(name).spec.launch_plan.version for name in names}
    assert len(versions) == 2, "another profile is another version"


def test_wrong_values_end_in_the_first_task(cluster: Cluster) -> None:
    message = cluster.wait_for_error(cluster.launch("training_on_demand", {"hp": encode_as_console({"epochs": 0})}))
    assert "epochs=0: must be at least 1" in last_line(message)


def test_the_page_of_a_training_while_it_goes_on_and_after_a_failure(cluster: Cluster) -> None:
    name = cluster.launch_training(**LONG, seed=unused_seed(cluster))
    shown = cluster.wait_until(lambda: cluster.read_deck(name, "n1"), "the page of n1")
    assert "Training" in shown
    cluster.abort(name)
    failed = cluster.launch_training(epochs=1, learning_rate=1000.0, schedule="constant", seed=unused_seed(cluster))
    assert "lower learning_rate" in cluster.wait_for_error(failed)
    assert "This attempt has failed" in cluster.read_deck(failed, "n1")


@pytest.mark.parametrize("how", ["deleted", "force-deleted"])
def test_a_lost_pod(kubectl: Cluster, how: str) -> None:
    name = kubectl.launch_training(**LONG, seed=unused_seed(kubectl))
    pod = kubectl.wait_for_training_log(name, "loss")
    time.sleep(3)  # of training; there is a checkpoint after each evaluation and when a pod is told to stop
    force = ("--grace-period=0", "--force") if how == "force-deleted" else ()
    kubectl.kubectl("delete", "pod", pod, "--wait=false", *force)
    kubectl.wait_for_training_log(name, "going on after step", lost=pod)
    kubectl.abort(name)


def test_a_killed_rank_is_replaced_in_its_pod(kubectl: Cluster) -> None:
    name = kubectl.launch_training(**LONG, seed=unused_seed(kubectl))
    pod = kubectl.wait_for_training_log(name, "loss")
    kubectl.kubectl("exec", pod, "--", "python", "-c", KILL_RANK_1)
    assert kubectl.wait_for_training_log(name, "rank 1 was killed by SIGKILL") == pod
    kubectl.abort(name)


def test_a_users_own_loop_goes_on_after_its_pod_is_deleted(kubectl: Cluster) -> None:
    shutil.copy(Path(__file__).with_name("own_task.py"), kubectl.sources)
    seed, num_steps = unused_seed(kubectl), 200
    inputs = ("--seed", str(seed), "--num_steps", str(num_steps), "--step_seconds", "0.2")
    name = kubectl.run_file_remote("--copy", "all", "own_task.py", "add_up", *inputs)
    pod, saved_step = kubectl.wait_for_checkpoint(name)
    kubectl.kubectl("delete", "pod", pod, "--wait=false")
    execution = kubectl.wait_for_success(name)
    assert execution.outputs.get("step", as_type=int) == num_steps
    assert saved_step <= execution.outputs.get("resumed_after_step", as_type=int) < num_steps
    totals = [seed]
    for step in range(1, num_steps + 1):
        totals.append((3 * totals[-1] + 2 * step) % 2**31)
    assert [*map(int, kubectl.read_blob(output_address(execution, "totals")).split())] == totals


def test_an_aborted_run_leaves_no_pod_and_launched_again_goes_on(kubectl: Cluster) -> None:
    hp = {**LONG, "seed": unused_seed(kubectl)}
    first = kubectl.launch_training(**hp)
    kubectl.wait_for_training_log(first, "loss")
    kubectl.abort(first)
    kubectl.wait_until(lambda: not kubectl.list_pods(first), "the end of the aborted execution's pods", 150)
    second = kubectl.launch_training(**hp)
    pod = kubectl.wait_for_training_log(second, "going on after step")
    assert f"of {first}" in kubectl.kubectl("logs", pod).stdout
    kubectl.abort(second)


def test_a_schedule_of_every_minute(cluster: Cluster) -> None:
    from workflows.training import retraining_wf

    begin = datetime.now(UTC)
    plan = LaunchPlan.create(
        f"{cluster.version}-every-minute",
        retraining_wf,
        default_inputs={"hp": Hyperparameters(**LONG)},
        schedule=CronSchedule(schedule="* * * * *", kickoff_time_input_arg="kickoff_time"),
        concurrency=ConcurrencyPolicy(max_concurrency=1, behavior=ConcurrencyLimitBehavior.SKIP),
    )
    cluster.activate_launch_plan(plan)

    def started() -> list[Any]:
        found = cluster.remote.recent_executions(limit=50)
        return [each for each in found if each.spec.launch_plan.name == plan.name]

    [first] = cluster.wait_until(started, "the first tick", 150)
    cluster.remember_execution(first.id.name)
    time.sleep(max(0.0, 70 - (datetime.now(UTC) - begin).total_seconds() % 60))  # over the next tick
    assert len(started()) == 1, "a tick is skipped while the run before goes on"
    inputs = cluster.fetch_execution_with_nodes(first.id.name).inputs
    assert inputs.get("kickoff_time", as_type=datetime) >= begin.replace(second=0, microsecond=0)
    cluster.clean_up()  # what follows has the cluster for itself


def test_a_model_is_released_as_on_ones_own_machine(cluster: Cluster) -> None:
    """Promoted, kept, promoted over, and taken back; the registry is a new model's in the bucket of the outputs."""
    execution = cluster.wait_for_success(cluster.launch_training(epochs=1, seed=unused_seed(cluster)))
    bucket = "/".join(output_address(execution, "sidecar").split("/")[:3])
    version, name = f"{cluster.version}-release", f"cluster-test-{int(time.time())}"
    (cluster.sources / "inverted_digits.py").write_text(INVERTED_DIGITS)
    cluster.register(version, FLYTE_DDP_REGISTRY=f"{bucket}/cluster-test-models")

    def run_release(workflow: str, **inputs: Any) -> dict[str, str]:
        inputs = {"model_name": name, **inputs}
        found = cluster.wait_for_success(cluster.launch(f"workflows.release.{workflow}", inputs, version))
        assert found.outputs is not None
        return {key: found.outputs.get(key, as_type=str) for key in ("version", "champion", "outcome")}

    weak, good = (Hyperparameters(epochs=epochs, num_ranks=1) for epochs in (3, 10))
    first = run_release("release_wf", hp=weak)
    assert first["champion"] == first["version"]
    assert first["outcome"].startswith("promoted: there is no champion yet")
    kept = {**first, "outcome": "kept: this model has the champion's weights"}
    assert run_release("release_wf", hp=weak) == kept
    stored = f"{bucket}/cluster-test-models/{name}/versions/{first['version']}"  # has the files of a finished run
    assert run_release("release_wf", run=stored) == kept
    second = run_release("release_wf", hp=good)
    assert second["outcome"].startswith("promoted: +"), second
    back = run_release("rollback_wf", reason="a test")
    assert back == {"version": first["version"], "champion": first["version"], "outcome": "entry 3 of the log: a test"}
    predicted = cluster.launch("workflows.prediction.predict_wf", {"model_name": name, "dataset": "digits"}, version)
    rows = cluster.read_blob(output_address(cluster.wait_for_success(predicted), "table")).decode().splitlines()
    assert len(rows) == 1 + 297

    def watch(dataset: str) -> str:
        inputs = {"model_name": name, "window": WindowSource(dataset=dataset)}
        return cluster.launch("workflows.monitor.monitor_wf", inputs, version)

    cluster.wait_for_success(watch("digits"))
    cluster.wait_for_success(watch("inverted_digits:inverted"))
    said = "inverted_digits:also_inverted: alarm: "
    assert said in cluster.wait_for_error(watch("inverted_digits:also_inverted"))
    refused = cluster.launch("workflows.release.rollback_wf", {"model_name": name, "reason": "once more"}, version)
    said = "has no previous champion; nothing was changed"
    assert last_line(cluster.wait_for_error(refused)).endswith(said)


def test_a_sweep_trains_from_rung_to_rung(cluster: Cluster) -> None:
    """Three trials to a third of their steps, then one, and train_model goes on where that one is."""
    space = {"learning_rate": {"from": 0.01, "to": 0.3, "log": True}}
    sweep = Sweep(space=json.dumps(space), trials=3, rungs=2)
    hp = Hyperparameters(epochs=6, num_ranks=1, seed=unused_seed(cluster))
    execution = cluster.wait_for_success(cluster.launch("workflows.sweep.sweep_wf", {"hp": hp, "sweep": sweep}))
    lines = cluster.read_blob(output_address(execution, "metrics")).decode().splitlines()
    starts = [each["resumed_after_step"] for each in map(json.loads, lines) if each["kind"] == "start"]
    ends = [each for each in map(json.loads, lines) if each["kind"] == "end"]
    assert starts[0] == 0
    assert max(starts) > 0
    assert len(ends) == 1
    page = cluster.read_blob(output_address(execution, "sweep_report")).decode()
    assert "Sweep: 3 trials" in page


def test_a_wave_of_a_sweep_may_have_no_trials(cluster: Cluster) -> None:
    """Of ten trials there are two different ones, so that the second wave is empty."""
    sweep = Sweep(space='{"schedule": ["constant", "cosine"]}', trials=10, rungs=1, sampler="tpe")
    hp = Hyperparameters(epochs=1, num_ranks=1, seed=unused_seed(cluster))
    execution = cluster.wait_for_success(cluster.launch("workflows.sweep.sweep_wf", {"hp": hp, "sweep": sweep}))
    assert "Sweep: 2 trials" in cluster.read_blob(output_address(execution, "sweep_report")).decode()


@pytest.mark.parametrize("root", ["writable", "read-only"])
def test_podsecurity_restricted(restricted: Cluster, root: str, tmp_path: Path) -> None:
    """The read-only root filesystem needs the template of deploy/, here under a name of this run's own."""
    pod = ("run", "refused", "--image", restricted.image, "--dry-run=server")
    if 'violates PodSecurity "restricted' not in restricted.kubectl(*pod, check=False).stderr:
        pytest.skip(f"kubectl may not label the namespace {restricted.namespace}")
    version, template = restricted.version, f"{restricted.version}-{root}"
    if root == "read-only":
        if PROFILES[restricted.profile].pod_template:
            pytest.skip(f"the profile {restricted.profile} names a pod template of its own")
        version = template
        found, _ = yaml.safe_load_all((ROOT / "deploy/pod-template-read-only.yaml").read_text())
        (tmp_path / "template.yaml").write_text(yaml.safe_dump({**found, "metadata": {"name": template}}))
        restricted.kubectl("apply", "--filename", str(tmp_path / "template.yaml"))
        restricted.register(version, "workflows/training.py", FLYTE_DDP_POD_TEMPLATE=template)
    try:
        hp = Hyperparameters(**SHORT, seed=unused_seed(restricted))
        name = restricted.launch("training_on_demand", {"hp": hp}, version)
        restricted.wait_for_success(name)
    finally:
        restricted.kubectl("delete", "podtemplate", template, "--ignore-not-found")
    contexts = [pod["spec"]["containers"][0]["securityContext"] for pod in restricted.list_pods(name)]
    assert {context.get("readOnlyRootFilesystem", False) for context in contexts} == {root == "read-only"}


def run_pod(cluster: Cluster, name: str, namespace: str, *command: str) -> None:
    """Start a pod with the image, also where PodSecurity "restricted" is enforced, and wait until it has started."""
    where = ("--namespace", namespace)
    confined = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {"name": name, "image": cluster.image, "command": command, "securityContext": confined}
    container["imagePullPolicy"] = "IfNotPresent"
    pod = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    overrides = {"spec": {"containers": [container], "securityContext": pod}}
    run = ("run", name, "--image", cluster.image, "--restart", "Never", "--overrides", json.dumps(overrides))
    cluster.kubectl(*where, *run)
    phase = (*where, "get", "pod", name, "-o", "jsonpath={.status.phase}")
    cluster.wait_until(lambda: cluster.kubectl(*phase).stdout in ("Running", "Succeeded"), name)


@pytest.fixture
def stranger(kubectl: Cluster) -> Iterator[tuple[str, str]]:
    """Yield a namespace with a pod that stands for strangers, and the address of a rank that waits for another one."""
    other = f"{kubectl.version}-elsewhere"
    try:
        if kubectl.kubectl("create", "namespace", other, check=False).returncode != 0:
            pytest.skip("kubectl may not make a namespace")
        run_pod(kubectl, "stranger", other, "sleep", "infinity")
        run_pod(kubectl, "rank-0", kubectl.namespace, "python", "-c", PRINT_GRADIENT, "0", "0.0.0.0")
        yield other, kubectl.kubectl("get", "pod", "rank-0", "-o", "jsonpath={.status.podIP}").stdout
    finally:
        kubectl.kubectl("delete", "pod", "rank-0", "rank-1", "--ignore-not-found", "--now", check=False)
        kubectl.kubectl("delete", "namespace", other, "--ignore-not-found", "--wait=false", check=False)


def test_a_stranger_does_not_reach_ranks_behind_the_network_policy(
    kubectl: Cluster, stranger: tuple[str, str], tmp_path: Path
) -> None:
    """First without a policy, then with one that admits nobody, with the stranger among the operators, and as it is."""
    other, address = stranger
    connect = f"import socket; socket.create_connection(({address!r}, {PORT}), 3)"

    def connects(pod: str, namespace: str) -> bool:
        command = ("--namespace", namespace, "exec", pod, "--", "python", "-c", connect)
        return kubectl.kubectl(*command, check=False).returncode == 0

    def apply(*operators: str, **spec: Any) -> None:
        policy = yaml.safe_load((ROOT / "deploy/network-policy.yaml").read_text())
        policy["metadata"]["name"] = kubectl.version  # so that one which is already there stays
        _, admitted = policy["spec"]["ingress"][0]["from"]
        admitted["namespaceSelector"]["matchExpressions"][0]["values"] += operators
        policy["spec"].update(spec)
        (tmp_path / "policy.yaml").write_text(yaml.safe_dump(policy))
        kubectl.kubectl("apply", "--filename", str(tmp_path / "policy.yaml"))

    kubectl.wait_until(lambda: connects("rank-0", kubectl.namespace), "the port of rank 0")
    if not connects("stranger", other):
        pytest.skip("a network policy of this cluster's own keeps strangers out")
    try:
        apply(podSelector={}, policyTypes=["Ingress"], ingress=[])
        deadline = time.monotonic() + 60
        while connects("stranger", other):
            if time.monotonic() > deadline:
                pytest.skip("this cluster's network does not enforce network policies")
            time.sleep(1)
        apply(other)
        kubectl.wait_until(lambda: connects("stranger", other), "a connection from an operator", 60)
        apply()
        kubectl.wait_until(lambda: not connects("stranger", other), "the refusal of a stranger", 60)
        run_pod(kubectl, "rank-1", kubectl.namespace, "python", "-c", PRINT_GRADIENT, "1", address)
        ranks = ("rank-0", "rank-1")
        kubectl.wait_until(
            lambda: [kubectl.kubectl("logs", rank).stdout[-4:] for rank in ranks] == ["2.0\n"] * 2,
            "both ranks' gradient",
        )
        kubectl.wait_for_success(kubectl.launch_training(**SHORT, seed=unused_seed(kubectl)))
    finally:
        kubectl.kubectl("delete", "networkpolicy", kubectl.version, "--ignore-not-found")


@pytest.mark.parametrize(
    ("engine", "resource", "ranks"),
    [
        ("elastic", "pytorchjobs.kubeflow.org", "training.kubeflow.org/replica-index=1"),
        ("ray", "rayjobs.ray.io", "ray.io/node-type=worker"),
        ("dask", "daskjobs.kubernetes.dask.org", "dask.org/component=worker"),
    ],
)
@pytest.mark.usefixtures("restricted")
def test_an_engine(kubectl: Cluster, engine: str, resource: str, ranks: str) -> None:
    """On two nodes, of which one is lost."""
    if kubectl.kubectl("get", "crd", resource, check=False).returncode != 0:
        pytest.skip(f"this cluster has no {resource}")
    version = f"{kubectl.version}-{engine}"
    kubectl.register(version, f"workflows/{engine}_training.py", FLYTE_DDP_NODES="2")
    hp = Hyperparameters(epochs=800, num_ranks=2, eval_interval=100, seed=unused_seed(kubectl))
    name = kubectl.launch(f"workflows.{engine}_training.{engine}_training_wf", {"hp": hp}, version)
    logs = ("logs", "-l", f"execution-id={name}", "--tail=-1")
    kubectl.wait_until(lambda: "epoch 100/800" in kubectl.kubectl(*logs, check=False).stdout, f"epoch 100 of {name}")
    lost = kubectl.kubectl("get", "pods", "-l", f"execution-id={name},{ranks}", "-o", "name").stdout.split()[-1]
    kubectl.kubectl("delete", lost, "--wait=false")
    execution = kubectl.wait_for_success(name)
    assert len(execution.outputs.get("epoch_accuracies", as_type=list[float])) == 8
    records = map(json.loads, kubectl.read_blob(output_address(execution, "metrics")).splitlines())
    starts = [record for record in records if record["kind"] == "start"]
    assert [start["num_ranks"] for start in starts] == [2] * len(starts)
    assert starts[-1]["resumed_after_step"] > 0
    sidecar = json.loads(kubectl.read_blob(output_address(execution, "sidecar")))
    assert (sidecar["num_ranks"], sidecar["num_nodes"]) == (2, 2)
