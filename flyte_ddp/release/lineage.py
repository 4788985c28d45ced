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


def lineage_event(address: str, name: str, sidecar: Mapping[str, Any], verdict: Verdict, *, by: str) -> bytes:
    """Return the OpenLineage event of a version as JSON: what it was trained from, and how it was judged.

    Args:
        address: of the registry.
        name: of the model in the registry.
        sidecar: the content of ``model.json``.
        verdict: on this model.
        by: the Flyte execution, or the user, that trained the model.
    """
    hp, digests = sidecar.get("hyperparameters", {}), sidecar["digests"]
    trained_on, started_from = hp.get("dataset", ""), hp.get("init_from")
    inputs = [
        dataset_entry("data", trained_on, digests.get("data", ""), source=hp.get("data_source", "")),
        dataset_entry("data", hp.get("test_dataset") or trained_on, verdict.test_digest, split="test"),
        *([dataset_entry("weights", started_from, digests.get("init_from", ""))] if started_from else []),
        *([dataset_entry(address, name, verdict.champion)] if verdict.champion else []),
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
        "flyteDdpExecution": make_facet(launchedAs=by),
        "flyteDdpTraining": make_facet(**training),
        "flyteDdpVerdict": make_facet(**verdict.to_dict()),
    }
    event = {
        "eventType": "COMPLETE",
        "eventTime": verdict.time,
        "producer": PRODUCER,
        "schemaURL": f"{SPEC}/RunEvent",
        "job": {"namespace": "flyte-ddp", "name": name},
        "run": {"runId": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{by} {digests['weights']}")), "facets": facets},
        "inputs": inputs,
        "outputs": [dataset_entry(address, name, digests["weights"])],
    }
    return json.dumps(event, indent=1, ensure_ascii=False).encode() + b"\n"


def dataset_entry(namespace: str, name: str, digest: str, **about: str) -> dict[str, Any]:
    """Return an input or output of the event: a data set or a model, with its digest as version.

    Args:
        namespace: of the name: data, weights, or the address of a registry.
        name: of the data set or model.
        digest: SHA-256 of its content; empty if it is not known.
        about: further facts.
    """
    facets = {"version": {**make_facet(datasetVersion=digest), "_schemaURL": VERSION_FACET}} if digest else {}
    facets |= {"flyteDdpData": make_facet(**about)} if about else {}
    return {"namespace": namespace, "name": name, "facets": facets}


def make_facet(**values: Any) -> dict[str, Any]:
    """Return a facet of OpenLineage: the values, with the producer and the schema that every facet must name."""
    return {"_producer": PRODUCER, "_schemaURL": f"{SPEC}/BaseFacet", **values}
