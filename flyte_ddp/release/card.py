"""The model card of a version: README.md in the form that the Hugging Face Hub reads.

Mitchell et al., "Model cards for model reporting", FAT* 2019; its metadata are those of the Hub's model cards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import yaml

from flyte_ddp.release.verdict import Verdict

UNKNOWN = "not stated"


def card(name: str, sidecar: Mapping[str, Any], verdict: Verdict, files: Collection[str]) -> bytes:
    """The card of a model of that name; what its sidecar and its verdict do not know reads "not stated"."""
    front = yaml.safe_dump(metadata(name, sidecar), sort_keys=False, allow_unicode=True)
    return "\n".join(("---", f"{front}---", "", *body(name, sidecar, verdict), *use(files), "")).encode()


def metadata(name: str, sidecar: Mapping[str, Any]) -> dict[str, Any]:
    """What stands at the top, for programs."""
    hp = sidecar.get("hyperparameters", {})
    trained_on = hp.get("dataset", UNKNOWN)
    tested_on = hp.get("test_dataset") or trained_on
    metrics = sidecar.get("metrics", {})
    named = {"accuracy": "test_accuracy", "loss": "test_loss"}
    results = {
        "task": {"type": "image-classification", "name": "Image classification"},
        "dataset": {"type": tested_on, "name": tested_on, "split": "test"},
        "metrics": [{"type": kind, "value": metrics[key]} for kind, key in named.items() if key in metrics],
    }
    return {
        "library_name": "pytorch",
        "pipeline_tag": "image-classification",
        "tags": ["flyte-ddp"],
        "datasets": [trained_on],
        "metrics": ["accuracy"],
        "model-index": [{"name": name, "results": [results]}],
    }


def body(name: str, sidecar: Mapping[str, Any], verdict: Verdict) -> Iterator[str]:
    """The lines for people."""
    hp, takes, metrics = (sidecar.get(key, {}) for key in ("hyperparameters", "input", "metrics"))
    yield f"# {name}"
    yield ""
    yield from table(
        ("", ""),
        {
            "Version (SHA-256 of the weights)": sidecar["digests"]["weights"],
            "Model": sidecar["model"],
            "Input": f"{takes['channels']} x {takes['height']} x {takes['width']}",
            "Classes": f"{len(sidecar['classes'])}: {few(sidecar['classes'])}",
            "Data set": hp.get("dataset", UNKNOWN),
            "Test set": hp.get("test_dataset") or "a part of it",
            "Source of the data": hp.get("data_source") or UNKNOWN,
            "Started from": hp.get("init_from") or "random weights",
            "Test accuracy": metrics.get("test_accuracy", UNKNOWN),
            "Test loss": metrics.get("test_loss", UNKNOWN),
            "License": UNKNOWN,
            "Intended use": UNKNOWN,
            "Limitations": UNKNOWN,
        }.items(),
    )
    yield "## Verdict"
    yield ""
    yield f"{verdict.decision}: {verdict.reason}. Judged {verdict.time or UNKNOWN} on {verdict.samples} test samples."
    yield ""
    yield from table(
        ("Check", "Value", "Limit", "Holds"),
        [(check.name, check.value, check.limit, "yes" if check.passed else "no") for check in verdict.checks],
    )
    yield "## Training"
    yield ""
    yield from table(("Hyperparameter", "Value"), hp.items())


def few(classes: Sequence[str]) -> str:
    """The first of many classes."""
    return ", ".join([*map(str, classes[:20]), *(["..."] if len(classes) > 20 else [])])


def use(files: Collection[str]) -> Iterator[str]:
    """The lines that say what the version's files are for."""
    yield "## Use"
    yield ""
    yield "`model.pt` is a state_dict of torch, and `model.json` says what the model takes and gives:"
    yield ""
    yield "```python"
    yield "from pathlib import Path"
    yield "from flyte_ddp import load_model"
    yield 'model, sidecar = load_model(Path("model.pt"), Path("model.json"))'
    yield "```"
    if "model.onnx" in files:
        yield ""
        yield (
            "`model.onnx` is the same for ONNX: it takes `images`, uint8 [N, height, width, channels] of any size, "
            "upright, and gives `logits`. All test samples were answered as by torch. `python serve_check.py` compares "
            "some of them again, without torch."
        )


def table(header: tuple[str, ...], rows: Any) -> Iterator[str]:
    """A table of Markdown, and an empty line."""
    for number, row in enumerate((header, *rows)):
        cells = (" ".join(str(cell).split()).replace("|", "\\|") for cell in row)
        yield f"| {' | '.join(cells)} |"
        if number == 0:
            yield f"|{'---|' * len(header)}"
    yield ""
