"""The model card of a version: README.md in the form that the Hugging Face Hub reads.

Mitchell et al., "Model cards for model reporting", FAT* 2019; its metadata are those of the Hub's model cards.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from flyte_ddp.release.verdict import Verdict

UNKNOWN = "not stated"


def render_model_card(name: str, sidecar: Mapping[str, Any], verdict: Verdict, files: Collection[str]) -> bytes:
    """Return the model card as Markdown in UTF-8, from the template card.md; unknown facts read "not stated".

    Args:
        name: of the model in the registry.
        sidecar: the content of ``model.json``.
        verdict: on this model.
        files: names of the version's other files.
    """
    import jinja2

    hp, takes, metrics = (sidecar.get(key, {}) for key in ("hyperparameters", "input", "metrics"))
    classes = [str(each) for each in sidecar["classes"]]
    facts = {
        "Version (SHA-256 of the weights)": sidecar["digests"]["weights"],
        "Model": sidecar["model"],
        "Input": f"{takes['channels']} x {takes['height']} x {takes['width']}",
        "Classes": f"{len(classes)}: {', '.join([*classes[:20], *(['...'] if len(classes) > 20 else [])])}",
        "Data set": hp.get("dataset", UNKNOWN),
        "Test set": hp.get("test_dataset") or "a part of it",
        "Source of the data": hp.get("data_source") or UNKNOWN,
        "Started from": hp.get("init_from") or "random weights",
        "Test accuracy": metrics.get("test_accuracy", UNKNOWN),
        "Test loss": metrics.get("test_loss", UNKNOWN),
        **dict.fromkeys(("License", "Intended use", "Limitations"), UNKNOWN),
    }
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)  # noqa: S701
    environment.filters["cell"] = lambda value: " ".join(str(value).split()).replace("|", "\\|")
    template = environment.from_string(Path(__file__).with_name("card.md").read_text(encoding="utf-8"))
    front = yaml.safe_dump(card_metadata(name, hp, metrics), sort_keys=False, allow_unicode=True)
    values = {"name": name, "front": front, "facts": facts, "verdict": verdict, "files": files}
    return template.render(hyperparameters=hp, **values).encode()


def card_metadata(name: str, hp: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the front matter of the model card: the fields that the Hub's programs read.

    ``hp`` are the hyperparameters and ``metrics`` the metrics of the sidecar.
    """
    trained_on = hp.get("dataset", UNKNOWN)
    tested_on = hp.get("test_dataset") or trained_on
    measured = {"accuracy": "test_accuracy", "loss": "test_loss"}
    results = {
        "task": {"type": "image-classification", "name": "Image classification"},
        "dataset": {"type": tested_on, "name": tested_on, "split": "test"},
        "metrics": [{"type": kind, "value": metrics[key]} for kind, key in measured.items() if key in metrics],
    }
    return {
        "library_name": "pytorch",
        "pipeline_tag": "image-classification",
        "tags": ["flyte-ddp"],
        "datasets": [trained_on],
        "metrics": ["accuracy"],
        "model-index": [{"name": name, "results": [results]}],
    }
