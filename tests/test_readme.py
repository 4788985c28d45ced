"""The README's table of hyperparameters is the code's, and its example of one's own model and data works."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from cli import ROOT, pyflyte

from flyte_ddp.config import Hyperparameters

README = ROOT / "README.md"
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


def test_the_table_of_hyperparameters_is_that_of_the_code() -> None:
    written = TABLE.search(README.read_text())
    assert written is not None
    assert table() in written[0], "run `python tests/test_readme.py` to write it anew"


@pytest.mark.slow
def test_the_example_of_ones_own_model_and_data_works(tmp_path: Path) -> None:
    text = README.read_text()
    source = re.search(r"```python\n# mine.py\n(.*?)```", text, re.DOTALL)
    command = re.search(r"--hp '(\{\"dataset\": \"mine:stripes\".*?\})'", text)
    assert source is not None
    assert command is not None
    (tmp_path / "mine.py").write_text(source[1])
    workflow = ROOT / "workflows" / "training.py"
    ended = pyflyte("run", str(workflow), "training_wf", "--hp", command[1], home=tmp_path / "home", directory=tmp_path)
    assert ended.exit_code == 0, ended.output
    assert "test accuracy 100.00%" in ended.output


if __name__ == "__main__":
    README.write_text(TABLE.sub(lambda found: found[1] + table() + found[2], README.read_text()))
