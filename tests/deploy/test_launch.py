"""``deploy/launch.py`` as one types it, against a Flyte whose executions go as the test says."""

import importlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import msgpack
import pytest
import yaml
from cli import ROOT, surroundings
from click.testing import CliRunner, Result
from fake_flyte_admin import FakeFlyteAdmin, Moment, fake_flyte_admin, refused, slow
from flyteidl.admin import launch_plan_pb2
from flyteidl.core import literals_pb2
from flytekit.configuration import Config, ImageConfig, SerializationSettings
from flytekit.remote import FlyteRemote
from processes import wait_until

from flyte_ddp.config import Hyperparameters
from workflows.training import training_on_demand

pytestmark = pytest.mark.filterwarnings("ignore:The '__version__' attribute:DeprecationWarning")  # in rich_click
NAMES = {"model_state": "model.pt", "sidecar": "model.json", "report": "report.html", "metrics": "metrics.jsonl"}
ADDRESSES = {output: f"s3://bucket/f1a2b3c4/{name}" for output, name in NAMES.items()}
CONSOLE = "/console/projects/flytesnacks/domains/development/executions/f1a2b3c4"
OUR_SENTENCE = "image folder s3://b/f: has no images; it must hold class/name.jpg"
OUR_ERROR = f"Trace:\n\n    flyte_ddp.errors.UserError: {OUR_SENTENCE}\n\nMessage:\n\n    UserError: {OUR_SENTENCE}\n"
KILLED = "    FlyteRecoverableException: USER:Recoverable: error=rank 1 was killed, cause=rank 1 was killed\n"
RETRIED = f"[3/3] currentAttempt done. Last Error: USER::\nTrace:\n\n{KILLED}\nMessage:\n\n{KILLED}"
PLATFORM = "[3/3] currentAttempt done. Last Error: SYSTEM::object [n/p] terminated in the background, manually"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script, imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "deploy")
        return importlib.import_module("launch")


@pytest.fixture
def admin() -> Iterator[FakeFlyteAdmin]:
    """Two versions of training_on_demand are registered, of which none is active."""
    with fake_flyte_admin() as running:
        remote = FlyteRemote(Config.for_endpoint(running.endpoint, insecure=True), "flytesnacks", "development")
        for version in ("older", "newer"):
            settings = SerializationSettings(ImageConfig.auto_default_image(), "flytesnacks", "development", version)
            remote.register_launch_plan(training_on_demand, version, serialization_settings=settings)
        accuracies = [{"scalar": {"primitive": {"float_value": value}}} for value in (0.5, 0.875)]
        running.outputs.literals["epoch_accuracies"].collection.literals.extend(
            literals_pb2.Literal(**each) for each in accuracies
        )
        for output, address in ADDRESSES.items():
            running.outputs.literals[output].scalar.blob.uri = address
        yield running


@pytest.fixture
def launch(script: ModuleType, admin: FakeFlyteAdmin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls the command; it looks at executions without a pause."""
    monkeypatch.setattr(script, "PAUSE_SECONDS", 0.0)

    def call(*options: str, name: str = "training_on_demand", endpoint: str = admin.endpoint, **config: Any) -> Result:
        path = cluster_file(tmp_path, endpoint, **config)
        return CliRunner().invoke(script.launch, [name, "--config", str(path), *options])

    return call


def cluster_file(folder: Path, endpoint: str, **config: Any) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump({"admin": {"endpoint": endpoint, "insecure": True, "authType": "Pkce"} | config}))
    return path


def lines(result: Result) -> list[str]:
    return result.output.splitlines()


def error(result: Result) -> str:
    """The one sentence that it ended with."""
    assert result.exit_code == 1, result.output
    [line] = result.output.splitlines()
    return line.removeprefix("Error: ")


def test_hyperparameters_are_completed_and_sent_to_the_newest_version(launch: Any, admin: FakeFlyteAdmin) -> None:
    result = launch("--hp", '{"epochs": 3}', "--no-wait")
    assert result.exit_code == 0, result.output
    assert lines(result) == [f"launched training_on_demand newer: http://{admin.endpoint}{CONSOLE}"]
    [sent] = admin.executions
    assert msgpack.unpackb(sent.inputs.literals["hp"].scalar.binary.value) == Hyperparameters(epochs=3).to_dict()


def test_options_reach_cache_and_pods(launch: Any, admin: FakeFlyteAdmin) -> None:
    for options, account, variables in (
        ((), "", {}),
        (("--service-account", "trainer", "--overwrite-cache"), "trainer", {"FLYTE_DDP_FROM_SCRATCH": "yes"}),
    ):
        assert launch("--no-wait", *options).exit_code == 0
        spec = admin.executions[-1].spec
        assert spec.security_context.run_as.k8s_service_account == account
        assert spec.overwrite_cache == bool(options)
        assert {pair.key: pair.value for pair in spec.envs.values} == variables


def test_an_active_version_comes_before_the_newest_and_a_named_one_before_both(
    launch: Any, admin: FakeFlyteAdmin, tmp_path: Path
) -> None:
    [active] = [plan.id for plan in admin.launch_plans if plan.id.version == "older" and "." not in plan.id.name]
    admin.activated.append(launch_plan_pb2.LaunchPlanUpdateRequest(id=active, state=launch_plan_pb2.ACTIVE))
    (tmp_path / "hp.yaml").write_text("epochs: 4\nlearning_rate: 1e-1\n")
    assert launch("--hp", str(tmp_path / "hp.yaml"), "--no-wait").exit_code == 0
    assert launch("--version", "newer", "--no-wait").exit_code == 0
    assert [each.spec.launch_plan.version for each in admin.executions] == ["older", "newer"]
    hp = msgpack.unpackb(admin.executions[0].inputs.literals["hp"].scalar.binary.value)
    assert (hp["epochs"], hp["learning_rate"]) == (4, 0.1)
    assert not admin.executions[1].inputs.literals, "the launch plan has its own"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hp", '{"epochs": 0}'], "epochs=0: must be at least 1"),
        (["--hp", '{"epoch": 3}'], "unknown hyperparameter 'epoch': did you mean 'epochs'?"),
        (["--hp", "[3]"], "hyperparameters must be a JSON object, got [3]"),
        (["--version", "other"], "launch plan 'training_on_demand' other: is not registered in domain 'development'"),
        (["--config", "Makefile"], "--config Makefile: must name a cluster's address, as deploy/sandbox.yaml does"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_sent(
    launch: Any, admin: FakeFlyteAdmin, options: list[str], message: str
) -> None:
    assert error(launch(*options)).startswith(message)
    assert not admin.executions


def test_an_unknown_launch_plan_is_one_sentence(launch: Any) -> None:
    said = "is not registered in domain 'development' of project 'flytesnacks'; register with deploy/register.sh"
    assert error(launch(name="training_on_demnd")).startswith(f"launch plan 'training_on_demnd' of any version: {said}")


def test_outputs_are_named(launch: Any) -> None:
    result = launch()
    assert result.exit_code == 0, result.output
    addresses = [f"  {output:12} {address}" for output, address in sorted(ADDRESSES.items())]
    assert lines(result)[1:] == ["main measure of the test split 0.875", *addresses]


def test_a_release_says_how_it_ended(launch: Any, admin: FakeFlyteAdmin) -> None:
    for output, text in (("version", "1a2b"), ("champion", "3c4d"), ("outcome", "kept: it is no better")):
        admin.outputs.literals[output].scalar.primitive.string_value = text
    admin.course.append(Moment("SUCCEEDED"))
    said = lines(launch())
    assert {"  champion     3c4d", "  outcome      kept: it is no better", "  version      1a2b"} <= {*said}


@pytest.mark.parametrize(
    ("moment", "message"),
    [
        (Moment("FAILED", error=OUR_ERROR), f"FAILED: {OUR_SENTENCE}"),
        (Moment("FAILED", error=RETRIED), "FAILED: rank 1 was killed"),
        (Moment("FAILED", error=PLATFORM), f"FAILED: {PLATFORM}"),
        (Moment("ABORTED", cause="enough"), "ABORTED: enough"),
        (Moment("TIMED_OUT"), "TIMED_OUT: no reason is given"),
    ],
)
def test_a_failure_is_our_sentence_and_where_the_rest_is(
    launch: Any, admin: FakeFlyteAdmin, moment: Moment, message: str
) -> None:
    admin.course = [Moment(), moment]
    said = [f"Error: the execution has {message}", f"the whole error is at http://{admin.endpoint}{CONSOLE}"]
    result = launch()
    assert (result.exit_code, lines(result)[1:]) == (1, said)


def test_a_cluster_that_is_not_there_is_one_sentence(launch: Any) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # taken, so that nobody else can listen there, and not listened on
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        assert error(launch(endpoint=address)).startswith(f"nothing answers at {address}: Connection refused; start")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("UNAUTHENTICATED", "refuses a call (UNIMPLEMENTED): Method not found!; see admin in "),
        ("PERMISSION_DENIED", "refuses a call (PERMISSION_DENIED): in words; see admin in "),
    ],
)
def test_a_refusal_is_one_sentence(launch: Any, admin: FakeFlyteAdmin, code: str, message: str) -> None:
    admin.faults["CreateExecution"] = refused(grpc.StatusCode[code], "in words")
    assert error(launch()).startswith(f"{admin.endpoint} {message}")


def test_a_login_without_a_password_is_one_sentence(launch: Any, admin: FakeFlyteAdmin) -> None:
    said = error(launch(authType="ClientSecret", clientId="flyte-ddp"))
    assert said.startswith(f"{admin.endpoint} asks for a login, which failed: Client ID and Client SECRET both are")


@pytest.mark.canary
def test_a_call_that_takes_too_long_is_one_sentence(
    launch: Any, admin: FakeFlyteAdmin, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "CALL_SECONDS", 0.3)
    admin.faults["CreateExecution"] = slow
    assert error(launch()) == f"{admin.endpoint} is too slow: a call had no answer in time; try again later"


@pytest.mark.slow
def test_ctrl_c_leaves_the_execution_running(admin: FakeFlyteAdmin, tmp_path: Path) -> None:
    admin.course = [Moment()]
    config = cluster_file(tmp_path, admin.endpoint)
    command = [sys.executable, str(ROOT / "deploy/launch.py"), "training_on_demand", "--config", str(config)]
    environment = surroundings(tmp_path / "home", tmp_path / "runs")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes) as process:
        assert process.stdout.readline().startswith("launched training_on_demand newer")
        wait_until(lambda: admin.looks > 1)  # one of them is of the launch
        os.kill(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    where = f"http://{admin.endpoint}{CONSOLE}"
    assert said.strip() == (
        f"Error: no longer waited for, but the execution goes on: watch it, or terminate it, at {where}; or end it "
        f"with: flytectl --config {config} delete execution f1a2b3c4 -p flytesnacks -d development"
    )
    assert len(admin.executions) == 1
