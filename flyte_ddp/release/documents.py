"""A version's model card, in the Hugging Face Hub's form (Mitchell et al., FAT* 2019)."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from flyte_ddp.models.input_text import describe_input
from flyte_ddp.release.verdict import Verdict
from flyte_ddp.text.formatting import name_measure

UNKNOWN = "not stated"
TASKS = {  # names that the Hugging Face Hub has for objectives of images
    **dict.fromkeys(("classification", "multilabel"), "image-classification"),
    "segmentation": "image-segmentation",
}


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
