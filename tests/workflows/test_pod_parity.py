"""Packaged tasks, run the way pods run them, give what a local run gives and fail as a user's mistake should."""

import hashlib
import io
import json
import re
from pathlib import Path

import msgpack
import numpy as np
import packaged
import pytest
import torch
from engine_rules import resolved, value_of
from pod import Cluster, PodEnded, unpacked
from pod_inputs import CHECK, FETCH, SMOKE, TRAIN, VERSION, Inputs, check_inputs, from_console

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.text.json_lines import read_records
from flyte_ddp.core.user_code.digest import library_digest, package_digest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(cluster: Cluster, train_inputs: Inputs) -> PodEnded:
    return cluster.run(TRAIN, train_inputs)


def test_the_cache_version_is_that_of_the_sources_sent(cluster: Cluster, tmp_path: Path) -> None:
    sent = unpacked(cluster.package, tmp_path) / "flyte_ddp"
    assert package_digest(sent) != package_digest()
    for name in (FETCH, TRAIN):
        task = cluster.package.tasks[name].template
        assert task.metadata.discovery_version == library_digest(sent)
        assert packaged.variables(task)["FLYTE_DDP_CODE"] == package_digest(sent)


def test_the_first_task_identifies_the_run_and_prepares_what_is_here(cluster: Cluster, checked: PodEnded) -> None:
    assert checked.exit_code == 0
    assert checked.error is None
    assert checked.outputs, checked.log
    run = checked.outputs["run_version"].scalar.primitive.string_value
    assert run.startswith("digits-small_cnn-")
    assert "@" not in run, "tokens are for local runs"
    folder = cluster.stored(checked.outputs["data"].scalar.blob.uri)
    assert np.load(folder / "train_inputs.npy").shape[1:] == (8, 8, 1)
    assert len(np.load(folder / "train_targets.npy")) + len(np.load(folder / "test_targets.npy")) == 1797


def test_what_is_downloaded_is_for_a_task_of_its_own(cluster: Cluster) -> None:
    hp = {
        "dataset": "examples.segmentation.shapes:load_shapes",
        "model": "examples.segmentation.shapes:SmallUNet",
        "objective": "segmentation",
    }
    checked = cluster.run(CHECK, check_inputs(cluster, from_console(hp)))
    assert checked.outputs is None
    assert checked.subworkflow, checked.log
    [node] = checked.subworkflow.nodes
    assert node.task_node.reference_id.name == FETCH
    given = {
        binding.var: value_of(binding.binding, {}) for binding in checked.subworkflow.outputs if binding.var != "data"
    }
    assert msgpack.unpackb(given["hp"].scalar.binary.value) == Hyperparameters(**hp).to_dict()
    [template] = checked.subworkflow.tasks
    registered = cluster.package.tasks[FETCH].template
    assert template.metadata == registered.metadata
    assert packaged.container(template).resources == packaged.container(registered).resources
    fetched = cluster.run(FETCH, resolved(node.inputs, {}))
    assert fetched.outputs, fetched.log
    folder = cluster.stored(fetched.outputs["o0"].scalar.blob.uri)
    assert len(np.load(folder / "train_targets.npy")) == 400


def cache_key(cluster: Cluster, checked: PodEnded) -> dict[str, bytes]:
    """The inputs of training that Flyte's cache looks at."""
    assert checked.outputs, checked.log
    [check, train] = cluster.package.workflows["workflows.training.training_wf"].template.nodes
    ignored = cluster.package.tasks[TRAIN].template.metadata.cache_ignore_input_vars
    found = resolved(train.inputs, {check.id: checked.outputs})
    return {name: literal.SerializeToString() for name, literal in found.items() if name not in ignored}


def test_the_same_hyperparameters_are_the_same_to_the_cache(cluster: Cluster, checked: PodEnded) -> None:
    """With all defaults as the console sends them, and a whole number as a float."""
    expected = cache_key(cluster, checked)
    assert expected.keys() == {"hp", "run_version"}
    form = from_console({**Hyperparameters(**SMOKE).to_dict(), "epochs": 1.0})
    assert cache_key(cluster, cluster.run(CHECK, check_inputs(cluster, form))) == expected


def test_training_leaves_a_usable_model_and_its_report_as_deck(cluster: Cluster, trained: PodEnded) -> None:
    assert trained.exit_code == 0, trained.log
    assert trained.outputs, trained.log
    stored = {
        name: cluster.stored(trained.outputs[name].scalar.blob.uri)
        for name in ("model_state", "sidecar", "report", "metrics")
    }
    sidecar = json.loads(stored["sidecar"].read_text())
    assert sidecar["versions"]["flyte_ddp"] == VERSION, "a rank imported another library than the one that was sent"
    assert sidecar["num_ranks"] == 2
    [accuracy] = trained.outputs["epoch_accuracies"].collection.literals
    assert accuracy.scalar.primitive.float_value == sidecar["metrics"]["test_accuracy"]
    weights = stored["model_state"].read_bytes()
    assert hashlib.sha256(weights).hexdigest() == sidecar["digests"]["weights"]
    state = torch.load(io.BytesIO(weights), weights_only=True)
    assert all(isinstance(tensor, torch.Tensor) and tensor.isfinite().all() for tensor in state.values())
    assert not [name for name in state if name.startswith("module.")]
    records = [json.loads(line) for line in stored["metrics"].read_text().splitlines()]
    assert (records[0]["kind"], records[-1]["kind"]) == ("start", "end")
    report = stored["report"].read_text()
    assert report.startswith("<!doctype html>")
    assert trained.deck is not None
    assert report in trained.deck


def test_what_wandb_could_not_be_sent_is_kept(cluster: Cluster, trained: PodEnded) -> None:
    [address] = re.findall(r"wandb: kept offline; send it with: .* send \S+ \(stored in (\S+)\)", trained.log)
    assert read_records(cluster.stored(address) / "metrics.jsonl")[-1]["kind"] == "end"
