"""The table of hyperparameters in docs/: ``python tests/helpers/hyperparameter_table.py`` writes it."""

import dataclasses
import re

from cli import ROOT

from flyte_ddp.config import Hyperparameters

HYPERPARAMETERS = ROOT / "docs" / "hyperparameters.md"
TABLE = re.compile(r"(<!-- hyperparameters:.*?-->\n).*?(<!-- end -->)", re.DOTALL)


def table() -> str:
    """Name, default, range and documentation of every field, as Markdown."""
    lines = ["| name | default | values | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(Hyperparameters):
        default = str(field.default).lower() if field.type is bool else str(field.default)
        cells = [f"`{field.name}`", default or "(empty)", values(field), field.metadata["doc"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def values(field: dataclasses.Field) -> str:
    rule = field.metadata
    if rule["choices"]:
        return ", ".join(rule["choices"])
    if field.type in (bool, str):
        return "true, false" if field.type is bool else "text"
    signs = {"at_least": "≥", "above": ">", "at_most": "≤", "below": "<"}
    bounds = [f"{sign} {rule[key]:g}" for key, sign in signs.items() if key in rule]
    return ", ".join([field.type.__name__, *bounds])


if __name__ == "__main__":
    HYPERPARAMETERS.write_text(TABLE.sub(lambda found: found[1] + table() + found[2], HYPERPARAMETERS.read_text()))
