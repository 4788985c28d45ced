"""A version's model card, in the Hugging Face Hub's form (Mitchell et al., FAT* 2019), and its OpenLineage event."""

import json
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

import flyte_ddp
from flyte_ddp.models.input_text import describe_input
from flyte_ddp.release.verdict import Verdict
from flyte_ddp.text.formatting import name_measure

UNKNOWN = "not stated"
TASKS = {  # names that the Hugging Face Hub has for objectives of images
    **dict.fromkeys(("classification", "multilabel"), "image-classification"),
    "segmentation": "image-segmentation",
}
SPEC = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs"
VERSION_FACET = (
    "https://openlineage.io/spec/facets/1-0-1/DatasetVersionDatasetFacet.json#/$defs/DatasetVersionDatasetFacet"
)
PRODUCER = f"urn:flyte-ddp:{flyte_ddp.__version__}"


def render_model_card(name: str, sidecar: Mapping[str, Any], verdict: Verdict, files: Collection[str]) -> bytes:
    """Return the model card as Markdown in UTF-8; with "model.onnx" among ``files`` it says how to use that."""
    import jinja2

    hp, takes, metrics = (sidecar.get(key, {}) for key in ("hyperparameters", "input", "metrics"))
    classes = [str(each) for each in sidecar["classes"]]
    listed = [*classes[:20], *(["..."] if len(classes) > 20 else [])]
    trained_on = hp.get("dataset", UNKNOWN)
    tested_on = hp.get("test_dataset") or trained_on
    objective = str(sidecar.get("objective", "classification"))
    task = "other" if "leaves" in takes else TASKS.get(objective, "other")
    measured = {
        key.removeprefix("test_"): value
        for key, value in metrics.items()
        if key.startswith("test_") and value is not None
    }
    results = {
        "task": {"type": task, "name": task.replace("-", " ").capitalize()},
        "dataset": {"type": tested_on, "name": tested_on, "split": "test"},
        "metrics": [{"type": name, "value": value} for name, value in measured.items()],
    }
    metadata = {  # that the Hub's programs read
        "library_name": "pytorch",
        **({"pipeline_tag": task} if task != "other" else {}),
        "tags": ["flyte-ddp"],
        "datasets": [trained_on],
        "metrics": [name for name in measured if name != "loss"],
        "model-index": [{"name": name, "results": [results]}],
    }
    facts = {
        "Version (SHA-256 of the weights)": sidecar["digests"]["weights"],
        "Model": sidecar["model"],
        "Objective": objective,
        "Input": describe_input(takes),
        **({"Classes": f"{len(classes)}: {', '.join(listed)}"} if classes else {}),
        "Data set": trained_on,
        "Test set": hp.get("test_dataset") or "a part of it",
        "Source of the data": hp.get("data_source") or UNKNOWN,
        "Started from": hp.get("init_from") or "random weights",
        **{f"Test {name_measure(name)}": value for name, value in measured.items()},
        **dict.fromkeys(("License", "Intended use", "Limitations"), UNKNOWN),
    }
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)  # noqa: S701
    environment.filters["cell"] = lambda value: " ".join(str(value).split()).replace("|", "\\|")
    template = environment.from_string(Path(__file__).with_name("card.md").read_text(encoding="utf-8"))
    front = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    values = {"name": name, "front": front, "facts": facts, "verdict": verdict, "files": files, "takes": takes}
    return template.render(hyperparameters=hp, **values).encode()


def render_lineage_event(address: str, name: str, sidecar: Mapping[str, Any], verdict: Verdict, *, by: str) -> bytes:
    """Return the OpenLineage event of a version as JSON; ``by`` is the Flyte execution, or user, that trained it."""
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
    """Return an input or output of an OpenLineage event; ``namespace`` is data, weights, or a registry's address."""
    facets = {"version": {**make_facet(datasetVersion=digest), "_schemaURL": VERSION_FACET}} if digest else {}
    facets |= {"flyteDdpData": make_facet(**about)} if about else {}
    return {"namespace": namespace, "name": name, "facets": facets}


def make_facet(**values: Any) -> dict[str, Any]:
    return {"_producer": PRODUCER, "_schemaURL": f"{SPEC}/BaseFacet", **values}
