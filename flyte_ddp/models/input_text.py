"""A model's input in words, from its sidecar. Needs no torch."""

from collections.abc import Mapping
from typing import Any


def describe_input(takes: Mapping[str, Any]) -> str:
    if "leaves" not in takes:
        return f"{takes['channels']} x {takes['height']} x {takes['width']}"
    texts = []
    for name, leaf in takes["leaves"].items():
        shape = " x ".join("?" if size is None else str(size) for size in leaf["shape"])
        texts.append(f"{name} {leaf['dtype']} [{shape}]".strip())
    return ", ".join(texts)
