"""What ``release_wf --run`` releases: the finished run that it is given, and nothing that was trained again."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import pytest
from cli import ROOT, Ended, pyflyte
from click.testing import CliRunner
from flyteidl.core.literals_pb2 import Literal
from packaged import Package
from pod import BUCKET, Cluster
from pod_inputs import CHECK, SMOKE, TRAIN, Inputs, check_inputs, from_console
from s3_server import S3Server, s3_server
from sidecars import make_sidecar

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.files import file_digest
from flyte_ddp.core.models.sidecar import Digests
from flyte_ddp.release.__main__ import release as commands

pytestmark = pytest.mark.slow
TRAINING, RELEASE = (str(ROOT / f"workflows/{name}.py") for name in ("training", "release"))
LOAD = "tasks.finished_run.load_finished_run"
PLAIN = '{"export": "off"}'
TABLE = """
import numpy as np
from torch import nn
from flyte_ddp import arrays

def data(source):
    rows = np.loadtxt(source, delimiter=",", dtype=np.float32)
    inputs, targets = rows[:, :2], rows[:, 2].astype(int)
    return arrays((inputs[:300], targets[:300]), (inputs[300:], targets[300:]), classes=["cold", "hot"])

def model(num_classes, input_shape):
    return nn.Linear(*input_shape, num_classes)
"""
HP = {"dataset": "table:data", "data_source": "t.csv", "model": "table:model", "learning_rate": 0.1, "num_ranks": 1}


@dataclass
class Trained:
    """A folder with a table, and with the finished run of a model of it."""

    folder: Path
    run: Path

    def release(self, run: str | Path, *arguments: str, name: str = "hot", **environment: str) -> Ended:
        given = ("--model_name", name, "--policy", PLAIN, "--run", str(run), *arguments)
        return pyflyte("run", RELEASE, "release_wf", *given, home=self.folder, directory=self.folder, **environment)

    def weights(self) -> dict[Path, int]:
        """When the weights of each run were written."""
        return {path: path.stat().st_mtime_ns for path in (self.folder / "runs").glob("*/model.pt")}

    @property
    def registry(self) -> Path:
        return self.folder / "runs/registry"

    def verdict(self, name: str) -> dict[str, Any]:
        [path] = (self.registry / name).glob("versions/*/verdict.json")
        return {key: value for key, value in json.loads(path.read_text()).items() if key != "time"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    import numpy as np

    folder = tmp_path_factory.mktemp("table")
    random = np.random.default_rng(0)
    rows = random.normal(size=(500, 2))
    hot = rows.sum(1) + random.normal(0, 0.3, 500) > 0
    np.savetxt(folder / "t.csv", np.column_stack([rows, hot]), "%g", ",")
    (folder / "table.py").write_text(TABLE)
    ended = pyflyte("run", TRAINING, "training_wf", "--hp", json.dumps(HP), home=folder, directory=folder)
    assert ended.exit_code == 0, ended.output
    [path] = (folder / "runs").glob("*/model.pt")
    return Trained(folder, path.parent)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


def test_a_finished_run_is_released_as_if_it_had_just_been_trained(trained: Trained) -> None:
    before, digest = trained.weights(), file_digest(trained.run / "model.pt")
    ended = trained.release(trained.run.relative_to(trained.folder))
    assert ended.exit_code == 0, ended.output
    assert "is a finished run; its model is judged without training" in ended.output
    assert f"Released(version='{digest}', champion='{digest}', outcome='promoted: there is no champion" in ended.output
    assert trained.weights() == before
    hp = ("--model_name", "anew", "--policy", PLAIN, "--hp", json.dumps(HP))
    anew = pyflyte("run", RELEASE, "release_wf", *hp, home=trained.folder, directory=trained.folder)
    assert anew.exit_code == 0, anew.output
    [new] = trained.weights().keys() - before.keys()
    assert trained.verdict("hot") == trained.verdict("anew")
    shutil.rmtree(new.parent)
    shown = CliRunner().invoke(commands, ["show", "hot", digest[:12], "--registry", str(trained.registry)])
    assert shown.exit_code == 0, shown.output
    accuracy = json.loads((trained.run / "model.json").read_text())["metrics"]["test_accuracy"]
    assert shown.output.startswith(f"version     {digest} of hot\nstate       champion\n")
    assert f"\nscore       accuracy {100 * accuracy:.2f} %\n" in shown.output
    assert "dataset=table:data, data_source=t.csv, model=table:model" in shown.output


def test_a_finished_run_is_released_by_its_address(trained: Trained, server: S3Server) -> None:
    """Two of its files are enough; hyperparameters may be given if they are the run's."""
    copied = server.folder / "bucket/runs/first"
    copied.mkdir(parents=True)
    for name in ("model.pt", "model.json"):
        shutil.copy(trained.run / name, copied)
    before, hp = trained.weights(), ("--hp", json.dumps(HP))
    ended = trained.release("s3://bucket/runs/first", *hp, name="remote", **server.aws_environment())
    assert ended.exit_code == 0, ended.output
    assert f"Released(version='{file_digest(trained.run / 'model.pt')}'" in ended.output
    [loaded] = trained.weights().keys() - before.keys()
    assert loaded.parent.name.startswith("loaded-")
    assert not (loaded.parent / "metrics.jsonl").exists()
    copied.joinpath("model.pt").write_bytes(b"other weights")
    refused = trained.release("s3://bucket/runs/first", name="remote", **server.aws_environment())
    assert refused.exit_code == 1
    assert "both files must be of the same run" in refused.panel
    refused = trained.release("s3://nowhere/runs/first", name="remote", **server.aws_environment())
    assert "run='s3://nowhere/runs/first': has no model.json; give the folder of a finished run" in refused.panel


def test_other_data_than_the_runs_are_refused(trained: Trained) -> None:
    table, before = trained.folder / "t.csv", trained.weights()
    content = table.read_text()
    table.write_text(content.partition("\n")[2])
    refused = trained.release(trained.run, name="later")
    table.write_text(content)
    assert refused.exit_code == 1
    digest = json.loads((trained.run / "model.json").read_text())["digests"]["data"]
    said = f"was trained on data with the SHA-256 {digest[:12]}..., and today's data of dataset='table:data'"
    assert said in refused.panel
    assert "omit run to train on today's data" in refused.panel
    assert trained.weights() == before
    assert not (trained.registry / "later").exists()


def altered(folder: Path, **values: Any) -> str:
    """Write a sidecar of a finished run, with other values at the top; return its folder."""
    folder.mkdir()
    sidecar = make_sidecar(hyperparameters=HP, digests=Digests(data="d", weights="w")).to_json_value()
    (folder / "model.json").write_text(json.dumps({**sidecar, **values}))
    return folder.name


@pytest.mark.parametrize(
    ("values", "arguments", "said"),
    [
        (None, (), "run='finished': has no model.json; give the folder of a finished run, which the training prints"),
        ({}, (), "run='finished': has no model.pt; give the folder of a finished run"),
        ({}, ("--hp", '{"epochs": 3}'), "hp: has epochs=3, but the model of run='finished' was trained with 10; omit"),
        (
            {"digests": {}},
            (),
            "model.json is damaged, so give the model.json of a finished run: digests.weights is missing",
        ),
        ({"hyperparameters": {"epoch": 1}}, (), "a hyperparameter that this release of flyte-ddp rejects: unknown"),
    ],
)
def test_what_is_no_finished_run(
    refusal: Callable[..., str],
    values: dict[str, Any] | None,
    arguments: tuple[str, ...],
    said: str,
    tmp_path: Path,
) -> None:
    (tmp_path / "finished").mkdir() if values is None else altered(tmp_path / "finished", **values)
    assert said in refusal("release", "release_wf", "--model_name", "x", "--run", "finished", *arguments)
    assert not (tmp_path / "runs/registry").exists()


def text(value: str) -> Literal:
    literal = Literal()
    literal.scalar.primitive.string_value = value
    return literal


def test_pods_read_the_run_from_its_address(cluster: Cluster, train_inputs: Inputs) -> None:
    trained = cluster.run(TRAIN, train_inputs)
    assert trained.outputs, trained.log
    finished = cluster.server.folder / BUCKET / "finished"
    finished.mkdir()
    for name, output in (("model.pt", "model_state"), ("model.json", "sidecar")):
        shutil.copy(cluster.stored(trained.outputs[output].scalar.blob.uri), finished / name)
    environment, address = cluster.server.aws_environment(), text(f"s3://{BUCKET}/finished")
    given = {**check_inputs(cluster, from_console({"epochs": 1})), "run": address}
    checked = cluster.run(CHECK, given, environment=environment)
    assert checked.outputs, checked.log
    assert checked.outputs["run_version"] == text("")
    assert msgpack.unpackb(checked.outputs["hp"].scalar.binary.value) == Hyperparameters(**SMOKE).to_dict()
    loaded = cluster.run(LOAD, {"run": address, "data": checked.outputs["data"]}, environment=environment)
    assert loaded.outputs, loaded.log
    for output in ("model_state", "sidecar"):
        contents = [cluster.stored(each.outputs[output].scalar.blob.uri).read_bytes() for each in (trained, loaded)]
        assert contents[0] == contents[1]
    assert loaded.outputs["epoch_accuracies"] == trained.outputs["epoch_accuracies"]
    refused = cluster.run(CHECK, {**given, "run": text("runs/digits")})
    assert refused.error is not None
    assert "is a folder of your machine, which pods cannot reach; copy the folder" in refused.log


def test_a_cluster_trains_only_where_no_finished_run_is_given(default: Package) -> None:
    """Both branches wait for the data's validation; what comes after takes the outputs of either."""
    nodes = {node.metadata.name: node for node in default.workflows["workflows.release.release_wf"].template.nodes}
    branch = nodes["model"].branch_node.if_else
    compared = branch.case.condition.comparison
    assert compared.left_value.var == f"{nodes['check_inputs'].id}.run_version"
    assert (compared.operator, compared.right_value.primitive.string_value) == (compared.EQ, "")
    taken = branch.case.then_node, branch.else_node
    assert [node.task_node.reference_id.name for node in taken] == [LOAD, TRAIN]
    for node in taken:
        [data] = [binding.binding.promise for binding in node.inputs if binding.var == "data"]
        assert (data.node_id, data.var) == (nodes["validate_dataset"].id, "data")
        outputs = default.tasks[node.task_node.reference_id.name].template.interface.outputs.variables
        assert outputs["model_state"].type.blob.format == "python_pickle"
    judged = {binding.var: binding.binding.promise for binding in nodes["judge_model"].inputs}
    assert {judged[name].node_id for name in ("model_state", "sidecar")} == {nodes["model"].id}
