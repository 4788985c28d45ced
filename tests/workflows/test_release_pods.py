"""The judgement and the promotion as pods do them, one after the other, with a registry in object storage."""

import json
from collections.abc import Mapping

import msgpack
import pytest
from engine_rules import packed, resolved
from faulty_proxy import locking_proxy
from flyteidl.core.literals_pb2 import Literal
from pod import BUCKET, Cluster, PodEnded
from pod_inputs import SMOKE, TRAIN, Inputs

from flyte_ddp.errors import UserError
from flyte_ddp.pods.paths import registry_address

pytestmark = pytest.mark.slow
JUDGE, CARRY_OUT = (f"tasks.release.{name}" for name in ("judge_model", "carry_out_verdict"))
PROFILE, VALIDATE = (f"tasks.validation.{name}" for name in ("profile_dataset", "validate_dataset"))


@pytest.mark.exhaustive
def test_promoted_and_kept_as_the_verdict_says(cluster: Cluster, checked: PodEnded, train_inputs: Inputs) -> None:
    nodes = {
        node.task_node.reference_id.name: node
        for node in cluster.package.workflows["workflows.release.release_wf"].template.nodes
    }
    hp = packed({**SMOKE, "epochs": 4, "max_steps": 0})  # enough to be better than one class for all
    trained = cluster.run(TRAIN, {**train_inputs, "hp": hp}, execution="release")
    given: dict[str, Mapping[str, Literal]] = {
        "start-node": {"model_name": packed("digits"), "policy": packed({"export": "off"})},
        nodes["tasks.preparation.check_inputs"].id: checked.outputs or {},
        nodes[TRAIN].id: trained.outputs or {},
    }
    with locking_proxy(cluster.server) as proxy:
        registry = {"FLYTE_DDP_REGISTRY": f"s3://{BUCKET}/models", "FLYTE_AWS_ENDPOINT": proxy.url}
        outcomes = []
        for name in (PROFILE, VALIDATE):
            ended = cluster.run(name, resolved(nodes[name].inputs, given), environment=registry)
            assert ended.outputs, ended.log
            given[nodes[name].id] = ended.outputs
        assert "1,500 samples in 10 classes" in str(ended.deck)
        passed_on, fetched = (given[nodes[name].id]["data"] for name in (VALIDATE, "tasks.preparation.check_inputs"))
        assert passed_on.scalar.blob.uri == fetched.scalar.blob.uri, "nothing is copied"
        for execution in ("first", "second"):
            judged = cluster.run(JUDGE, resolved(nodes[JUDGE].inputs, given), environment=registry)
            assert judged.outputs, judged.log
            assert judged.deck is not None
            assert "digits: " in judged.deck
            promotes = judged.outputs["promotes"].scalar.primitive.boolean
            inputs = resolved(nodes[CARRY_OUT].inputs, {**given, nodes[JUDGE].id: judged.outputs})
            ended = cluster.run(CARRY_OUT, inputs, environment=registry, execution=execution)
            assert ended.outputs, ended.log
            outcomes.append((promotes, ended.outputs["outcome"].scalar.primitive.string_value))
    folder = cluster.server.folder / BUCKET / "models/digits"
    assert outcomes[0][0], outcomes
    assert outcomes[1] == (False, "kept: it has the champion's weights")
    [entry] = (folder / "log").iterdir()
    assert json.loads(entry.read_text())["by"] == "flytesnacks/development/first"
    [version] = (folder / "versions").iterdir()
    assert (version / "manifest.json").exists()
    assert json.loads((version / "data_profile.json").read_text())["training"]["samples"] == 1500
    verdict = msgpack.unpackb(judged.outputs["verdict"].scalar.binary.value)
    assert verdict["challenger"] == version.name


def test_a_pod_without_a_registry_says_how_to_give_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "f1")
    with pytest.raises(UserError, match="FLYTE_DDP_REGISTRY='': must be an address that all pods reach, such as s3://"):
        registry_address()
