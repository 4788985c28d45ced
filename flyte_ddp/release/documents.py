"""A version's model card (Mitchell et al., FAT* 2019)."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from flyte_ddp.release.verdict import Verdict
from flyte_ddp.text.formatting import describe_input, name_measure

UNKNOWN = "not stated"


def render_model_card(name: str, sidecar: Mapping[str, Any], verdict: Verdict, files: Collection[str]) -> bytes:
    """Return the model card as Markdown in UTF-8; with "model.onnx" among ``files`` it says how to use that."""
    import jinja2

    hp, takes, metrics = (sidecar.get(key, {}) for key in ("hyperparameters", "input", "metrics"))
    classes = [str(each) for each in sidecar["classes"]]
    listed = [*classes[:20], *(["..."] if len(classes) > 20 else [])]
    facts = {
        "Version (SHA-256 of the weights)": sidecar["digests"]["weights"],
        "Model": sidecar["model"],
        "Objective": sidecar.get("objective", "classification"),
        "Input": describe_input(takes),
        **({"Classes": f"{len(classes)}: {', '.join(listed)}"} if classes else {}),
        "Data set": hp.get("dataset", UNKNOWN),
        "Test set": hp.get("test_dataset") or "a part of it",
        "Source of the data": hp.get("data_source") or UNKNOWN,
        "Started from": hp.get("init_from") or "random weights",
        **{
            f"Test {name_measure(key.removeprefix('test_'))}": value
            for key, value in metrics.items()
            if key.startswith("test_") and value is not None
        },
        **dict.fromkeys(("License", "Intended use", "Limitations"), UNKNOWN),
    }
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)  # noqa: S701
    environment.filters["cell"] = lambda value: " ".join(str(value).split()).replace("|", "\\|")
    template = environment.from_string(Path(__file__).with_name("card.md").read_text(encoding="utf-8"))
    values = {"name": name, "facts": facts, "verdict": verdict, "files": files, "takes": takes}
    return template.render(hyperparameters=hp, **values).encode()
