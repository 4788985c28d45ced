"""Where a version comes from, as an event of OpenLineage: enough to train it again.

https://openlineage.io/spec/2-0-2/OpenLineage.json has the form; facets of our own begin with ``flyteDdp``.
"""

import json
import uuid
from collections.abc import Mapping
from typing import Any

import flyte_ddp
from flyte_ddp.release.verdict import Verdict

SPEC = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs"
VERSION_FACET = (
    "https://openlineage.io/spec/facets/1-0-1/DatasetVersionDatasetFacet.json#/$defs/DatasetVersionDatasetFacet"
)
PRODUCER = f"urn:flyte-ddp:{flyte_ddp.__version__}"


def lineage(address: str, name: str, sidecar: Mapping[str, Any], verdict: Verdict, *, by: str) -> bytes:
    """Return the event, as JSON, for a model of that name in the registry at an address.

    Args:
        address: of the registry.
        name: of the model.
        sidecar: its ``model.json``.
        verdict: on it.
        by: the Flyte execution that trained it, or a user.
    """
    hp, digests = sidecar.get("hyperparameters", {}), sidecar["digests"]
    trained_on, started_from = hp.get("dataset", ""), hp.get("init_from")
    inputs = [
        dataset("data", trained_on, digests.get("data", ""), source=hp.get("data_source", "")),
        dataset("data", hp.get("test_dataset") or trained_on, verdict.test_digest, split="test"),
        *([dataset("weights", started_from, digests.get("init_from", ""))] if started_from else []),
        *([dataset(address, name, verdict.champion)] if verdict.champion else []),
    ]
    training = {
        "hyperparameters": hp,
        "num_ranks": sidecar.get("num_ranks"),
        "threads_per_rank": sidecar.get("threads_per_rank"),
        "code": digests.get("code", ""),
        "userCode": digests.get("user_code", ""),
        "versions": sidecar.get("versions", {}),
    }
    facets = {
        "flyteDdpExecution": facet(launchedAs=by),
        "flyteDdpTraining": facet(**training),
        "flyteDdpVerdict": facet(**verdict.to_dict()),
    }
    event = {
        "eventType": "COMPLETE",
        "eventTime": verdict.time,
        "producer": PRODUCER,
        "schemaURL": f"{SPEC}/RunEvent",
        "job": {"namespace": "flyte-ddp", "name": name},
        "run": {"runId": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{by} {digests['weights']}")), "facets": facets},
        "inputs": inputs,
        "outputs": [dataset(address, name, digests["weights"])],
    }
    return json.dumps(event, indent=1, ensure_ascii=False).encode() + b"\n"


def dataset(namespace: str, name: str, digest: str, **about: str) -> dict[str, Any]:
    """Return a data set, or a model, of the event, with the digest of its content as its version."""
    facets = {"version": {**facet(datasetVersion=digest), "_schemaURL": VERSION_FACET}} if digest else {}
    facets |= {"flyteDdpData": facet(**about)} if about else {}
    return {"namespace": namespace, "name": name, "facets": facets}


def facet(**values: Any) -> dict[str, Any]:
    """Return a facet: values with the producer and schema that each must name."""
    return {"_producer": PRODUCER, "_schemaURL": f"{SPEC}/BaseFacet", **values}
